"""The lane's bytes: what is packed is read again, and nothing else is read at all."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.chunks import ChunkTable
from fastcheckd.errors import FrameError
from fastcheckd.transfer.frames import (
    CHUNK_BYTES_MAX,
    ERROR_BYTES_MAX,
    FRAME_BYTES,
    HELLO_BYTES,
    WANT_INDEXES_MAX,
    Codec,
    FrameHeader,
    Hello,
    Kind,
    check_data_frame,
    pack_error,
    pack_frame,
    pack_hello,
    pack_want,
    parse_frame,
    parse_hello,
    parse_want,
)

hellos = st.builds(Hello, ticket=st.binary(min_size=32, max_size=32))
data_headers = st.integers(1, CHUNK_BYTES_MAX).flatmap(
    lambda size: st.builds(
        FrameHeader,
        kind=st.just(Kind.DATA),
        chunk=st.integers(0, 2**32 - 1),
        raw_bytes=st.just(size),
        encoded_bytes=st.just(size),
        codec=st.sampled_from(Codec),
        offset=st.integers(0, 2**64 - 1),
        digest=st.binary(min_size=16, max_size=16),
    )
)


def sealed(body: bytes) -> bytes:
    """A header with a right checksum, whatever it says."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def frame_body(
    *, version: int = 1, kind: int = 1, codec: int = 0, flags: int = 0, chunk: int = 0, raw: int = 4096,
    encoded: int = 4096, reserved_a: int = 0, offset: int = 0, reserved_b: int = 0,
) -> bytes:  # fmt: skip
    return struct.pack(
        "<4sBBBBIIIIQ16sQ",
        b"FCFR", version, kind, codec, flags, chunk, raw, encoded, reserved_a, offset, bytes(16), reserved_b,
    )  # fmt: skip


@given(hellos)
def test_a_hello_comes_back_as_it_was(hello: Hello) -> None:
    packed = pack_hello(hello)
    assert len(packed) == HELLO_BYTES
    assert parse_hello(packed) == hello


@given(data_headers)
def test_a_data_header_comes_back_as_it_was(header: FrameHeader) -> None:
    packed = pack_frame(header)
    assert len(packed) == FRAME_BYTES
    assert parse_frame(packed) == header


def test_the_layout_is_the_one_in_the_protocol_page() -> None:
    header = FrameHeader(
        kind=Kind.DATA, chunk=0x01020304, raw_bytes=5, encoded_bytes=5, offset=0x0A0B, digest=b"d" * 16
    )
    packed = pack_frame(header)
    assert packed[:8] == b"FCFR" + bytes([1, 1, 0, 0])
    assert packed[8:24] == bytes([4, 3, 2, 1, 5, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    assert packed[24:48] == bytes([0x0B, 0x0A, 0, 0, 0, 0, 0, 0]) + b"d" * 16
    assert packed[48:56] == bytes(8)
    assert packed[56:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(packed[:56]))
    hello = pack_hello(Hello(b"t" * 32))
    assert hello[:24] == b"FCLANE1\n" + bytes([2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    assert hello[24:56] == b"t" * 32


@given(st.binary(max_size=200))
def test_random_bytes_are_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        parse_hello(data)
    with pytest.raises(FrameError):
        parse_frame(data)


@given(st.one_of(hellos.map(pack_hello), data_headers.map(pack_frame)), st.integers(0, 511))
def test_one_flipped_bit_is_a_frame_error(packed: bytes, bit: int) -> None:
    damaged = bytearray(packed)
    damaged[bit // 8] ^= 1 << bit % 8
    parse = parse_hello if packed.startswith(b"FCLANE1") else parse_frame
    with pytest.raises(FrameError):
        parse(damaged)


@given(st.binary(min_size=52, max_size=52))
def test_random_fields_under_a_right_checksum_never_exceed_the_bounds(fields: bytes) -> None:
    try:
        header = parse_frame(sealed(b"FCFR" + fields))
    except FrameError:
        return
    limit = {
        Kind.DATA: CHUNK_BYTES_MAX + 1024, Kind.END: 0, Kind.WANT: 4096, Kind.ERROR: ERROR_BYTES_MAX,
    }  # fmt: skip
    assert header.encoded_bytes <= limit[header.kind]


@pytest.mark.parametrize(
    "body",
    [
        frame_body(version=2),
        frame_body(kind=0),
        frame_body(kind=5),
        frame_body(kind=4, chunk=0, raw=0, encoded=0),
        frame_body(kind=4, chunk=2, raw=4, encoded=4),
        frame_body(kind=4, chunk=1025, raw=4100, encoded=4100),
        frame_body(codec=2),
        frame_body(codec=1, encoded=0),
        frame_body(codec=1, encoded=4096 + 1025),
        frame_body(kind=2, codec=1, raw=0, encoded=0),
        frame_body(flags=1),
        frame_body(reserved_a=1),
        frame_body(reserved_b=1),
        frame_body(raw=0, encoded=0),
        frame_body(raw=CHUNK_BYTES_MAX + 1, encoded=CHUNK_BYTES_MAX + 1),
        frame_body(raw=4096, encoded=4097),
        frame_body(raw=4096, encoded=4096 + 1025),
        frame_body(kind=2, raw=1, encoded=1),
        frame_body(kind=2, raw=0, encoded=0, offset=1),
        frame_body(kind=2, chunk=1, raw=0, encoded=0),
        frame_body(kind=3, raw=1025, encoded=1025),
        frame_body(kind=3, chunk=1, raw=1, encoded=1),
    ],
)
def test_a_well_sealed_frame_out_of_bounds_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        parse_frame(sealed(body))


@pytest.mark.parametrize(
    "fields", [(1, 0, 0, 0, 0), (3, 0, 0, 0, 0), (2, 1, 0, 0, 0), (2, 0, 1, 0, 0), (2, 0, 0, 17, 0)]
)
def test_a_well_sealed_hello_of_another_version_or_with_reserved_bits_is_refused(
    fields: tuple[int, ...],
) -> None:
    with pytest.raises(FrameError):
        parse_hello(sealed(struct.pack("<8sHHIII32s", b"FCLANE1\n", *fields, bytes(32))))


@given(st.lists(st.integers(1, 400), max_size=40), st.data())
def test_only_chunks_that_exist_pass_with_their_own_place_and_size(
    lengths: list[int], data: st.DataObject
) -> None:
    table = ChunkTable(lengths)
    index = data.draw(st.integers(0, len(table) + 1))
    start, stop = table.range(index) if index < len(table) else (table.shard_bytes, table.shard_bytes + 1)
    size = stop - start
    header = FrameHeader(kind=Kind.DATA, chunk=index, raw_bytes=size, encoded_bytes=size, offset=start)
    if index < len(table):
        check_data_frame(header, table)
        wrongs = ({"offset": start + 1}, {"raw_bytes": size + 1}, {"kind": Kind.END})
    else:
        wrongs = ({},)
    for wrong in wrongs:
        with pytest.raises(FrameError):
            check_data_frame(dataclasses.replace(header, **wrong), table)


def test_a_long_sentence_is_cut() -> None:
    header, payload = pack_error("ä" * 5000)
    assert parse_frame(header).encoded_bytes == len(payload) == ERROR_BYTES_MAX


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=WANT_INDEXES_MAX, unique=True))
def test_a_want_comes_back_as_it_was_and_names_only_chunks_that_exist(chunks: list[int]) -> None:
    header, payload = pack_want(chunks)
    parsed = parse_frame(header)
    assert (parsed.kind, parsed.chunk, parsed.encoded_bytes) == (Kind.WANT, len(chunks), len(payload))
    assert parse_want(payload, 5001) == chunks
    with pytest.raises(FrameError):
        parse_want(payload, max(chunks))
    with pytest.raises(FrameError):
        parse_want(payload + payload[:4], 5001)
