"""Parts of a saved tensor: which bytes of a rank's state they lie in, and how they get from there into a tensor. Pure.

A tensor lies in its state in one piece or several, row after row; a box of it is `offsets` and `sizes`, one per
dimension. Whoever reads parts asks for the byte ranges of what it wants, gets a flat uint8 tensor that is as long as
the state and has those bytes in their places, and copies from there. Nothing else of it is looked at.

The record must have been checked (`header.parse`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, Protocol

import torch

from fastcheck_proto.conventions import STREAM_PIECE_BYTES
from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import InvalidArgumentError
from . import dtypes
from .covering import Box
from .tensors import copy_exact

#: Bytes between two runs of a box that are asked for with them: whole chunks are fetched anyway, and a box of columns
#: has a run in each row.
GAP_BYTES_MAX = STREAM_PIECE_BYTES


class ByteRange(NamedTuple):
    """Bytes [offset, offset + bytes) of a rank's state."""

    offset: int
    bytes: int


class StateBytes(Protocol):
    """A rank's state by byte offsets; a flat uint8 tensor is one."""

    def __getitem__(self, where: slice, /) -> torch.Tensor:
        """Those bytes, flat."""
        ...


class BoxRead(NamedTuple):
    """What has to be read for a box, and what is done with it."""

    #: Some bytes between a box's runs are among them.
    ranges: tuple[ByteRange, ...]
    #: Copies the box's bits from the state into a plain tensor of the box's sizes and the record's dtype, on any
    #: device, however it is strided. Reads nothing that is not in `ranges`.
    assemble: Callable[[torch.Tensor, StateBytes], None]


def tensor_ranges(record: pb.TensorRecord, element_low: int, element_high: int) -> list[ByteRange]:
    """The bytes of the record's elements [element_low, element_high), counted row after row; in that order.

    Raises:
        InvalidArgumentError: the tensor has no such elements.
    """
    if not 0 <= element_low <= element_high <= math.prod(record.shape):
        raise InvalidArgumentError(
            f"tensor {record.name[:200]!r} has {math.prod(record.shape)} elements, not [{element_low}, {element_high})"
        )
    itemsize = dtypes.BY_NAME[record.dtype].itemsize
    low, high = element_low * itemsize, element_high * itemsize
    return [
        ByteRange(place + max(low, start) - start, min(high, stop) - max(low, start))
        for place, start, stop in _pieces(record, low, high)
    ]


def read_box(record: pb.TensorRecord, offsets: Sequence[int], sizes: Sequence[int]) -> BoxRead:
    """What to read for a box of the record's tensor: of its outer dimensions only the rows that the box has.

    Raises:
        InvalidArgumentError: the box does not lie in the tensor.
    """
    shape = tuple(record.shape)
    box = Box(tuple(offsets), tuple(sizes))
    if not box.lies_in(Box.whole(shape)) or min(box.sizes, default=0) < 0:
        raise InvalidArgumentError(
            f"tensor {record.name[:200]!r} of shape {shape} has no box at {box.offsets} of sizes {box.sizes}"
        )
    runs = list(_runs(shape, box, dtypes.BY_NAME[record.dtype].itemsize))
    ranges = tuple(found for low, high in runs for found in tensor_ranges(record, low, high))

    def assemble(target: torch.Tensor, state: StateBytes) -> None:
        dtype = dtypes.BY_NAME[record.dtype]
        if tuple(target.shape) != box.sizes or target.dtype is not dtype:
            raise InvalidArgumentError(
                f"a box of sizes {box.sizes} and dtype {record.dtype} of tensor {record.name[:200]!r} does not go into "
                f"a tensor of shape {tuple(target.shape)} and {target.dtype}"
            )
        into = target.detach()
        for low, high in runs:
            _copy_run(record, (low * dtype.itemsize, high * dtype.itemsize), box, into, state)

    return BoxRead(ranges, assemble)


def _copy_run(
    record: pb.TensorRecord, run: tuple[int, int], box: Box, into: torch.Tensor, state: StateBytes
) -> None:
    """Copy what the box has of bytes [low, high) of the tensor, piece by piece, each cut into boxes."""
    low, high = run
    for place, piece_start, piece_stop in _pieces(record, low, high):
        start, stop = max(low, piece_start), min(high, piece_stop)
        at = place + start - piece_start
        elements = state[at : at + stop - start].view(into.dtype)
        first = start // into.dtype.itemsize
        for begin, part in _boxes(tuple(record.shape), first, first + elements.numel()):
            both = part.meet(box)
            if both is not None:
                count = math.prod(part.sizes)
                source = elements[begin - first : begin - first + count].view(part.sizes)
                copy_exact(into[both.within(box).slices], source[both.within(part).slices])


def _pieces(record: pb.TensorRecord, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The pieces that have some of bytes [low, high) of a tensor: place in the state; start and stop in the tensor."""
    if low >= high:
        return
    size = record.piece_bytes or record.bytes
    offsets = record.piece_offsets or [record.offset]
    for number in range(low // size, -(-high // size)):
        yield offsets[number], number * size, min((number + 1) * size, record.bytes)


def _runs(shape: Sequence[int], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Element ranges [low, high), rising and apart, that have all of the box and only small gaps beside it."""
    if not math.prod(box.sizes):
        return
    strides = _strides(shape)
    #: Elements from the first to behind the last one of what the inner dimensions have.
    span, outer = 1, 0
    inner_span = 1
    for dim in reversed(range(len(shape))):
        gap_bytes = (strides[dim] - span) * itemsize
        if not outer and box.sizes[dim] > 1 and gap_bytes > GAP_BYTES_MAX:
            outer, inner_span = dim + 1, span
        span += (box.sizes[dim] - 1) * strides[dim]
    if not outer:
        inner_span = span
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for index in product(*(range(size) for size in box.sizes[:outer])):
        low = base + sum(number * stride for number, stride in zip(index, strides, strict=False))
        yield low, low + inner_span


def _boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, Box]]:
    """Consecutive elements [low, high) of a tensor as boxes, each with its first element: whole rows and what is left.

    A row is a box of what is behind the first dimension; at most two boxes per dimension are left.
    """
    if not shape:
        yield low, Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:  # within one row
        yield from _in_row(shape, last, low, high)
        return
    if low < first * row:
        yield from _in_row(shape, first - 1, low, first * row)
    if first < last:
        yield first * row, Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < high:
        yield from _in_row(shape, last, last * row, high)


def _in_row(shape: tuple[int, ...], number: int, low: int, high: int) -> Iterator[tuple[int, Box]]:
    start = number * math.prod(shape[1:])
    for begin, inner in _boxes(shape[1:], low - start, high - start):
        yield start + begin, Box((number, *inner.offsets), (1, *inner.sizes))


def _strides(shape: Sequence[int]) -> list[int]:
    """In elements, as they lie row after row."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
