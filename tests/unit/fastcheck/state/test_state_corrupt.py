"""A header from a wire is data that may be anything: it is refused with our error, cheaply, never run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck import CorruptError, FastCheckError
from fastcheck.state.fill import fill
from fastcheck.state.flatten import flatten
from fastcheck.state.header import parse
from fastcheck_proto.v1 import state_pb2 as pb


class Anything:
    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def make_state():
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "any": Anything(),
        "t": torch.ones(3, 4),
        "empty": torch.ones(0, 7),
        "list": [1, 2.5, None, "x", b"y", True, (1, (2,))],
        7: {None: {True: -(2**70)}},
    }


FLAT = flatten(make_state())


def attempt(data: bytes, state_bytes: int = FLAT.state_bytes) -> None:
    """Reading and filling may succeed or end in an error of ours; nothing else."""
    with contextlib.suppress(FastCheckError):
        header = parse(data, state_bytes)
        fill(make_state(), header, torch.zeros(state_bytes, dtype=torch.uint8))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data):
    attempt(data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FLAT.header) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes(changes):
    data = bytearray(FLAT.header)
    for place, byte in changes:
        data[place] = byte
    attempt(bytes(data))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(FLAT.header)), st.integers(0, len(FLAT.header)))
def test_bytes_cut_out(start, stop):
    attempt(FLAT.header[:start] + FLAT.header[stop:])


def header(**record: object) -> bytes:
    values = {"name": "t", "dtype": "float32", "shape": [2], "offset": 0, "bytes": 8} | record
    return pb.StateHeader(
        schema=2, root=pb.StateValue(tensor=0), tensors=[pb.TensorRecord(**values)]
    ).SerializeToString()


def test_the_sample_is_good():
    assert parse(header(), 64).tensors[0].bytes == 8


@pytest.mark.parametrize(
    "record",
    [
        {"offset": 64},
        {"offset": 2**63},
        {"offset": 4},
        {"shape": [3]},
        {"shape": [2**62, 2**62], "bytes": 0},
        {"shape": [0, 2**62, 2**62], "bytes": 0},
        {"shape": [1] * 65, "bytes": 4},
        {"shape": [2**61], "bytes": 2**63},
        {"dtype": "float99"},
        {"dtype": "qint8", "bytes": 2},
        {"dtype": "__class__"},
        {"bytes": 4},
    ],
)
def test_records_that_contradict_the_state_are_refused(record):
    with pytest.raises(CorruptError):
        parse(header(**record), 64)


def root(value: pb.StateValue, schema: int = 2) -> bytes:
    return pb.StateHeader(schema=schema, root=value).SerializeToString()


def entry(key: pb.StateValue) -> pb.StateEntry:
    return pb.StateEntry(key=key, value=pb.StateValue(none=True))


@pytest.mark.parametrize(
    "value",
    [
        pb.StateValue(),
        pb.StateValue(tensor=0),
        pb.StateValue(int_value="1e5"),
        pb.StateValue(int_value="\uff11\uff12"),
        pb.StateValue(int_value=""),
        pb.StateValue(int_value="9" * 200_000),
        pb.StateValue(list=pb.StateList(items=[pb.StateValue()])),
        pb.StateValue(dict=pb.StateDict(entries=[entry(pb.StateValue(float_value=1))])),
        pb.StateValue(dict=pb.StateDict(entries=[entry(pb.StateValue(int_value="x"))])),
        pb.StateValue(dict=pb.StateDict(entries=[entry(pb.StateValue(string_value="a"))] * 2)),
        pb.StateValue(
            dict=pb.StateDict(
                entries=[entry(pb.StateValue(int_value="1")), entry(pb.StateValue(bool_value=True))]
            )
        ),
        pb.StateValue(dict=pb.StateDict(entries=[pb.StateEntry()])),
    ],
)
def test_values_that_make_no_sense_are_refused(value):
    with pytest.raises(CorruptError):
        parse(root(value), 64)


def test_an_unknown_format_is_refused_by_its_version():
    with pytest.raises(CorruptError, match="version 3"):
        parse(root(pb.StateValue(none=True), schema=3), 64)


def test_bottomless_nesting_is_refused():
    message = pb.StateHeader(schema=2)
    value = message.root
    for _ in range(200):
        value = value.object
    value.none = True
    with pytest.raises(CorruptError, match="not readable"):
        parse(message.SerializeToString(), 64)
