"""Any tree of containers, values and tensors comes back bit for bit through header bytes and a segment."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheck.state_bytes import bits, same, snapshot

from fastcheck.state.flatten import flatten
from fastcheck.state.header import DEPTH_MAX, parse
from fastcheck.state.tensors import DTYPES, carrier

KEYS = st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.none())
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(10**40), max_value=10**40),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)


@dataclass(frozen=True)
class Spec:
    """A tensor to be: torch cannot print those of its smallest dtypes, so examples hold this instead."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes
    transposed: bool

    def build(self) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        if not self.raw:
            return torch.empty(self.shape, dtype=dtype)
        tensor = torch.frombuffer(bytearray(self.raw), dtype=torch.uint8).view(dtype).view(self.shape)
        return tensor.transpose(0, -1) if self.transposed and self.shape else tensor


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    name = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape) * DTYPES[name].itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if name == "bool":
        raw = bytes(b & 1 for b in raw)
    return Spec(name, shape, raw, draw(st.booleans()))


def build(tree):
    if isinstance(tree, Spec):
        return tree.build()
    if isinstance(tree, dict):
        return {k: build(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(build(v) for v in tree)
    return tree


TREES = st.recursive(
    st.one_of(VALUES, specs()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def blank(value):
    """The same structure with other content, as a restarted trainer would have it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(carrier(value)).view(value.dtype)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(v) for v in value)
    return None


def through(state):
    """Save and fill a blank; then the daemon reuses the memory."""
    kept = snapshot(state)
    fresh = blank(state)
    kept.fill(fresh)
    kept.scribble()
    return fresh


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_any_tree_comes_back_exactly(tree):
    state = build(tree)
    assert same(through(state), state)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_this_torch_comes_back_with_its_bits(name):
    dtype = DTYPES[name]
    torch.manual_seed(1)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    state = {
        "t": raw.view(dtype).view(2, 3),
        "strided": raw.view(dtype).view(3, 2).t(),
        "dot": raw.view(dtype)[0],
    }
    assert same(through(state), state)


def test_the_table_of_dtypes_holds_what_training_uses():
    wanted = (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 "
        "complex64 complex128 float8_e4m3fn float8_e5m2"
    )
    assert set(wanted.split()) <= set(DTYPES)
    assert not [n for n in DTYPES if n.startswith("q")]


def test_nan_payloads_negative_zero_and_denormals_keep_their_bits():
    patterns = torch.tensor([0x7FC00001, -0x400001, -(2**31), 1, 0x7F800001, 0x007FFFFF], dtype=torch.int32)
    payload = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]
    state = {"t": patterns.view(torch.float32), "nan": payload, "zero": -0.0, "tiny": 5e-324}
    back = through(state)
    assert torch.equal(back["t"].view(torch.int32), patterns)
    assert struct.pack("<d", back["nan"]).hex() == "efbeadde0000f87f"
    assert math.copysign(1, back["zero"]) == -1
    assert back["tiny"] == 5e-324


@pytest.mark.parametrize("power", [0, 1, 63, 200, 6000, 60_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_of_any_size(power, sign):
    value = sign * (2**power + 1)
    state = {"n": value, value: torch.ones(1)}
    back = {"n": 0, value: torch.zeros(1)}
    snapshot(state).fill(back)
    assert back["n"] == value
    assert back[value].item() == 1


def test_lazy_conjugates_expanded_and_strided_tensors_are_saved_as_what_they_mean():
    base = torch.randn(3, 4, dtype=torch.complex64)
    state = {
        "conj": base.conj(),
        "neg": torch._neg_view(torch.randn(5)),
        "expanded": torch.randn(3, 1).expand(3, 7),
        "diagonal": torch.randn(4, 4).diagonal(),
        "every other": torch.arange(10)[1::2],
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    wanted = {k: bits(v) for k, v in state.items()}
    kept = snapshot(state)
    into = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in state.items()}
    kept.fill(into)
    assert {k: bits(v) for k, v in into.items()} == wanted


def test_strange_views_are_filled_in_place_too():
    source = {"conj": torch.randn(3, dtype=torch.complex64), "expanded": torch.full((3, 7), 4.0)}
    kept = snapshot(source)
    under = torch.zeros(3, dtype=torch.complex64)
    row = torch.zeros(3, 1)
    leaf = {"conj": under.conj(), "expanded": row.expand(3, 7)}
    kept.fill(leaf)
    assert torch.equal(leaf["conj"].resolve_conj(), source["conj"])
    assert torch.equal(under, source["conj"].conj())
    assert row.flatten().tolist() == [4.0] * 3


def test_leaf_parameters_that_require_grad_are_filled_without_a_graph():
    parameter = torch.nn.Parameter(torch.zeros(4))
    snapshot({"p": torch.arange(4.0)}).fill({"p": parameter})
    assert parameter.tolist() == [0, 1, 2, 3]
    assert parameter.is_leaf
    assert parameter.requires_grad


def test_the_same_view_is_stored_once_and_overlapping_views_are_each_stored():
    base = torch.arange(1024.0)
    flat = flatten(
        {"a": base, "b": base, "c": base.view(1024), "part": base[:512], "typed": base.view(torch.int32)}
    )
    header = parse(flat.header, flat.state_bytes)
    a, b, c, part, typed = header.tensors
    assert a.offset == b.offset == c.offset
    assert len({a.offset, part.offset, typed.offset}) == 3
    assert flat.header_offset == 4096 + 2048 + 4096
    assert all(r.offset % 64 == 0 for r in header.tensors)
    assert [r.name for r in header.tensors] == ["a", "b", "c", "part", "typed"]


def test_temporaries_that_die_during_flattening_are_not_taken_for_one_another():
    class Fresh:
        def state_dict(self):
            return {"t": torch.full((1000,), 3.0)}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    state = {i: Fresh() for i in range(20)}
    flat = flatten(state)
    assert len(flat.pieces) == 20


def test_containers_keep_the_callers_types_and_order():
    Point = namedtuple("Point", "x y")
    state = {
        "point": Point(1, torch.ones(2)),
        "size": torch.Size([2, 3]),
        "counter": Counter("aab"),
        "z": 1,
        "a": 2,
    }
    back = {
        "a": 0,
        "z": 0,
        "point": Point(0, torch.zeros(2)),
        "size": torch.Size([0, 0]),
        "counter": Counter({"a": 0, "b": 0}),
    }
    held = back["point"].y
    snapshot(state).fill(back)
    assert isinstance(back["point"], Point)
    assert back["point"].x == 1
    assert back["point"].y is held
    assert held.tolist() == [1, 1]
    assert back["size"] == torch.Size([2, 3])
    assert isinstance(back["size"], torch.Size)
    assert back["counter"] == Counter("aab")
    assert list(back) == ["a", "z", "point", "size", "counter"]


def test_ordered_and_default_dicts_are_filled_in_place():
    back = OrderedDict(a=0, b=torch.zeros(1))
    snapshot({"a": 5, "b": torch.ones(1)}).fill(back)
    assert type(back) is OrderedDict
    assert back["a"] == 5
    assert back["b"].item() == 1


def test_a_history_may_have_grown_and_a_value_may_have_appeared():
    back = {"history": [], "best": None, "lr": 1, "nested": [[1, 2]]}
    snapshot({"history": [(1, 0.5), {"loss": 0.25}], "best": 0.1, "lr": 0.5, "nested": []}).fill(back)
    assert back == {"history": [(1, 0.5), {"loss": 0.25}], "best": 0.1, "lr": 0.5, "nested": []}


def test_the_deepest_allowed_tree_can_be_read_back():
    state: dict = {}
    inner = state
    for _ in range(DEPTH_MAX - 1):
        inner["x"] = {}
        inner = inner["x"]
    inner["x"] = torch.ones(1)
    assert same(through(state), state)


def test_the_root_may_be_a_tensor_or_a_list():
    tensor = torch.zeros(3)
    snapshot(torch.arange(3.0)).fill(tensor)
    assert tensor.tolist() == [0, 1, 2]
    values = [0, torch.zeros(1)]
    snapshot([7, torch.ones(1)]).fill(values)
    assert values[0] == 7
    assert values[1].item() == 1
