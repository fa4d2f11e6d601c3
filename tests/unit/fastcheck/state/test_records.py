"""Boxes of saved tensors: which bytes they are, and that they come out as plain indexing says."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.fastcheck.state_bytes import bits

from fastcheck import InvalidArgumentError
from fastcheck.state import records
from fastcheck.state.records import read_box, tensor_ranges
from fastcheck.state.tensors import dtype_name
from fastcheck_proto.v1 import state_pb2 as pb

ALIGNMENT = 64
DTYPES = [
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


class Only:
    """A state of which nothing but what was asked for may be looked at."""

    def __init__(self, state: torch.Tensor, ranges) -> None:
        self.state = state
        self.allowed = [False] * state.numel()
        for offset, size in ranges:
            self.allowed[offset : offset + size] = [True] * size

    def __getitem__(self, where: slice) -> torch.Tensor:
        assert all(self.allowed[where]), f"{where} was not asked for"
        return self.state[where]


def random_tensor(dtype, shape, seed):
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype).view(shape)
    raw = torch.randint(0, 256, (max(1, count * dtype.itemsize),), generator=generator, dtype=torch.uint8)
    return raw[: count * dtype.itemsize].view(dtype).view(shape)


def laid_out(tensor, piece_elements, seed):
    """A record of the tensor and a state that has it, its pieces in any order with other bytes in between."""
    flat = torch.frombuffer(bytearray(bits(tensor) or b"\0"), dtype=torch.uint8)
    size = tensor.numel() * tensor.dtype.itemsize
    piece = piece_elements * tensor.dtype.itemsize if piece_elements else size
    count = max(1, -(-size // piece)) if size else 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    offsets, end = [0] * count, ALIGNMENT
    for number in order:
        offsets[number] = end
        end += -(-min(piece, size) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
    state = torch.full((end,), 0xEE, dtype=torch.uint8)
    for number, offset in enumerate(offsets):
        part = flat[number * piece : min(size, (number + 1) * piece)]
        state[offset : offset + part.numel()] = part
    record = pb.TensorRecord(
        name="t", dtype=dtype_name(tensor.dtype), shape=tensor.shape, offset=offsets[0], bytes=size
    )
    if count > 1:
        record.piece_offsets[:] = offsets
        record.piece_bytes = piece
    return record, state


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    seed = draw(st.integers(0, 2**20))
    count = math.prod(shape)
    piece = draw(st.one_of(st.none(), st.integers(1, max(1, count))))
    offsets = [draw(st.integers(0, length)) for length in shape]
    sizes = [draw(st.integers(0, length - low)) for length, low in zip(shape, offsets, strict=True)]
    gap = draw(st.sampled_from([0, 8, 64, 1 << 19]))
    return random_tensor(dtype, shape, seed), piece, seed, offsets, sizes, gap


def boxed(tensor, offsets, sizes):
    return tensor[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]


@given(cases(), st.booleans())
def test_a_box_is_what_indexing_gives_and_only_its_ranges_are_read(case, transposed):
    tensor, piece, seed, offsets, sizes, gap = case
    record, state = laid_out(tensor, piece, seed)
    before, records.GAP_BYTES_MAX = records.GAP_BYTES_MAX, gap
    try:
        found = read_box(record, offsets, sizes)
    finally:
        records.GAP_BYTES_MAX = before
    target = random_tensor(tensor.dtype, tuple(reversed(sizes)) if transposed else tuple(sizes), seed + 1)
    if transposed:
        target = target.permute(tuple(reversed(range(len(sizes)))))
    found.assemble(target, Only(state, found.ranges))
    wanted = boxed(tensor, offsets, sizes)
    assert bits(target) == bits(wanted)
    if gap == 0:
        assert sum(size for _, size in found.ranges) == wanted.numel() * tensor.dtype.itemsize


@given(cases(), st.data())
def test_a_run_of_elements_is_had_from_its_ranges_in_order(case, data):
    tensor, piece, seed, *_ = case
    record, state = laid_out(tensor, piece, seed)
    low = data.draw(st.integers(0, tensor.numel()))
    high = data.draw(st.integers(low, tensor.numel()))
    found = b"".join(bytes(state[o : o + n].tolist()) for o, n in tensor_ranges(record, low, high))
    assert found == bits(tensor.reshape(-1)[low:high])


def test_every_box_of_a_small_tensor_in_pieces_and_in_one():
    tensor = random_tensor(torch.bfloat16, (3, 2, 3), 5)
    bounds = [[(low, high) for low in range(n) for high in range(low + 1, n + 1)] for n in tensor.shape]
    for piece in (None, 1, 4, 7):
        record, state = laid_out(tensor, piece, 5)
        for cut in product(*bounds):
            offsets, sizes = [low for low, _ in cut], [high - low for low, high in cut]
            target = torch.empty(sizes, dtype=torch.bfloat16)
            read_box(record, offsets, sizes).assemble(target, state)
            assert bits(target) == bits(boxed(tensor, offsets, sizes))


def test_rows_of_a_large_tensor_cost_only_their_bytes():
    record = pb.TensorRecord(
        name="w", dtype="bfloat16", shape=[4096, 4096], offset=128, bytes=4096 * 4096 * 2
    )
    assert read_box(record, (1024, 0), (512, 4096)).ranges == ((128 + 1024 * 8192, 512 * 8192),)


def test_a_box_of_columns_is_asked_for_as_one_range_and_far_rows_are_not():
    record = pb.TensorRecord(
        name="w", dtype="float32", shape=[8, 4096, 1024], offset=0, bytes=8 * 4096 * 4096
    )
    expert = 4096 * 4096
    # Half of each row of 4 KiB, of 10 rows of each of 3 experts that are 16 MiB apart.
    found = read_box(record, (2, 5, 0), (3, 10, 512)).ranges
    assert found == tuple((number * expert + 5 * 4096, 9 * 4096 + 2048) for number in (2, 3, 4))


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0,), (2, 2)), ((0, 3), (1, 2)), ((-1, 0), (1, 1)), ((0, 0), (-1, 1)), ((0,), (1,))],
)
def test_a_box_outside_of_its_tensor_is_refused(offsets, sizes):
    record, _ = laid_out(torch.zeros(3, 4), None, 0)
    with pytest.raises(InvalidArgumentError, match="has no box"):
        read_box(record, offsets, sizes)


@pytest.mark.parametrize(
    "target", [torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(4)]
)
def test_a_target_of_another_shape_or_dtype_is_refused(target):
    record, state = laid_out(torch.zeros(3, 4), None, 0)
    with pytest.raises(InvalidArgumentError, match="does not go into"):
        read_box(record, (0, 0), (2, 2)).assemble(target, state)


def test_elements_that_a_tensor_does_not_have_are_refused():
    record, _ = laid_out(torch.zeros(3, 4), 5, 0)
    for low, high in ((-1, 2), (3, 2), (0, 13)):
        with pytest.raises(InvalidArgumentError, match="12 elements"):
            tensor_ranges(record, low, high)
