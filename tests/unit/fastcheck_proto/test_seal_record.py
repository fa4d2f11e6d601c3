"""The record of a seal in a segment: whole or none, of one loan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.seal_record import FOOTER_BYTES, NewerRecordError, read_record, write_record

LOAN = "0" * 32
#: Where a record's version stands: the last two bytes of its magic, before digest and length.
VERSION_AT = (-22, -21)


@given(body=st.binary(max_size=300), room=st.integers(0, 200))
def test_what_is_written_is_read_by_its_loan_alone(body, room):
    segment = bytearray(b"x" * (room + len(body) + FOOTER_BYTES))
    write_record(memoryview(segment), LOAN, body)
    assert segment[:room] == b"x" * room
    assert read_record(memoryview(segment), LOAN) == body
    assert read_record(memoryview(segment), "1" * 32) is None


@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_record(data):
    assert read_record(memoryview(data), LOAN) is None


@pytest.mark.parametrize("at", range(-FOOTER_BYTES - 50, 0))
def test_a_torn_record_is_none(at):
    segment = bytearray(200)
    write_record(memoryview(segment), LOAN, b"b" * 50)
    segment[at] ^= 1
    if at in VERSION_AT:
        with pytest.raises(NewerRecordError):
            read_record(memoryview(segment), LOAN)
    else:
        assert read_record(memoryview(segment), LOAN) is None


def test_a_record_of_a_newer_version_is_refused_and_both_are_named():
    segment = bytearray(200)
    write_record(memoryview(segment), LOAN, b"b" * 50)
    segment[VERSION_AT[0] : VERSION_AT[1] + 1] = b"07"
    with pytest.raises(NewerRecordError, match="has version 7, this daemon reads 1"):
        read_record(memoryview(segment), LOAN)


@pytest.mark.parametrize("length", [1, 172, 173, 2**24 + 1, 2**32 - 1])
def test_a_length_that_lies_costs_nothing(length):
    segment = bytearray(200)
    write_record(memoryview(segment), LOAN, b"")
    segment[-4:] = length.to_bytes(4, "little")
    assert read_record(memoryview(segment), LOAN) is None
