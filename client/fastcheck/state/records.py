"""Bytes of a saved tensor, by its record: of the whole tensor or of a box of it, in pieces, as views, or copied.

A tensor lies in its rank's state in one piece or several, row after row. Who reads a part of a tensor asks for the byte
ranges of a box (`read_box`), gets a flat uint8 tensor that is as long as the state and has those bytes in their places,
and copies from there. Nothing else of it is looked at.

Records must have been checked (`header.parse`), so that every piece lies within the state.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, Protocol

import torch

from fastcheck_proto.conventions import STREAM_PIECE_BYTES
from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import InvalidArgumentError
from .sharding import Box
from .tensors import DTYPES, copy_exact, is_expanded

#: Two runs of a box with at most this many bytes between them are read as one: whole chunks are fetched anyway, and a
#: box of columns has a run in each row.
GAP_BYTES_MAX = STREAM_PIECE_BYTES


class ByteRange(NamedTuple):
    """Bytes [offset, offset + bytes) of a rank's state."""

    offset: int
    bytes: int


class StateBytes(Protocol):
    """A rank's state, sliced by byte offsets. A flat uint8 tensor is one."""

    def __getitem__(self, where: slice, /) -> torch.Tensor:
        """Those bytes, flat."""
        ...


class BoxRead(NamedTuple):
    """The byte ranges of a box, and how to assemble the box from them."""

    #: May include some bytes between the runs of the box.
    ranges: tuple[ByteRange, ...]
    #: Copies the box's bits from the state into a plain tensor of the box's sizes and the record's dtype, on any
    #: device, however it is strided. Reads nothing that is not in `ranges`.
    assemble: Callable[[torch.Tensor, StateBytes], None]


def tensor_ranges(record: pb.TensorRecord, element_low: int, element_high: int) -> list[ByteRange]:
    """The bytes of the record's elements [element_low, element_high), in row-major order.

    Raises:
        InvalidArgumentError: the tensor has no such elements.
    """
    if not 0 <= element_low <= element_high <= math.prod(record.shape):
        raise InvalidArgumentError(
            f"tensor {record.name[:200]!r} has {math.prod(record.shape)} elements, not [{element_low}, {element_high})"
        )
    itemsize = DTYPES[record.dtype].itemsize
    low, high = element_low * itemsize, element_high * itemsize
    return [
        ByteRange(place + max(low, start) - start, min(high, stop) - max(low, start))
        for place, start, stop in _pieces(record, low, high)
    ]


def read_box(record: pb.TensorRecord, offsets: Sequence[int], sizes: Sequence[int]) -> BoxRead:
    """What to read for a box of the record's tensor. Rows of the outer dimensions outside of the box are left out.

    Raises:
        InvalidArgumentError: the box does not lie in the tensor.
    """
    shape = tuple(record.shape)
    box = Box(tuple(offsets), tuple(sizes))
    if not box.lies_in(Box.whole(shape)) or min(box.sizes, default=0) < 0:
        raise InvalidArgumentError(
            f"tensor {record.name[:200]!r} of shape {shape} has no box at {box.offsets} of sizes {box.sizes}"
        )
    runs = list(_runs(shape, box, DTYPES[record.dtype].itemsize))
    ranges = tuple(found for low, high in runs for found in tensor_ranges(record, low, high))

    def assemble(target: torch.Tensor, state: StateBytes) -> None:
        dtype = DTYPES[record.dtype]
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
    """Copy the box's share of bytes [low, high) of the tensor, piece by piece."""
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
    """Pieces that overlap bytes [low, high) of a tensor: place in the state, start and stop in the tensor."""
    if low >= high:
        return
    size = record.piece_bytes or record.bytes
    offsets = record.piece_offsets or [record.offset]
    for number in range(low // size, -(-high // size)):
        yield offsets[number], number * size, min((number + 1) * size, record.bytes)


def _runs(shape: Sequence[int], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Ascending element ranges [low, high) that cover the box, with only small gaps outside of it."""
    if not math.prod(box.sizes):
        return
    strides = _strides(shape)
    #: Elements from the first one of the inner dimensions to the end of the last one.
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
    """Consecutive elements [low, high) of a tensor as boxes, each with the number of its first element.

    Whole rows (all dimensions but the first) are one box; at most two boxes per dimension remain beside them.
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
    """Row-major strides, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


#: Destination address, source address, bytes.
Move = tuple[int, int, int]
#: Does moves. Destinations that overlap get the same bytes.
Pour = Callable[[Sequence[Move]], None]


def is_cut(record: pb.TensorRecord) -> bool:
    """Whether the tensor lies in several pieces."""
    return bool(record.piece_offsets)


def same_place(one: pb.TensorRecord, other: pb.TensorRecord) -> bool:
    """Whether two records describe the same bytes of the state."""
    return (
        one.offset == other.offset
        and one.piece_bytes == other.piece_bytes
        and one.piece_offsets == other.piece_offsets
    )


def whole(record: pb.TensorRecord, segment: torch.Tensor) -> torch.Tensor:
    """The record's tensor: a view of the segment, or memory of its own if it lies in several pieces."""
    dtype = DTYPES[record.dtype]
    if not record.bytes:
        return torch.empty(tuple(record.shape), dtype=dtype)
    if is_cut(record):
        flat = torch.empty(record.bytes, dtype=torch.uint8)
        for into, piece in zip(
            torch.split(flat, record.piece_bytes), _piece_views(record, segment), strict=True
        ):
            into.copy_(piece)
    else:
        flat = segment[record.offset : record.offset + record.bytes]
    return flat.view(dtype).view(tuple(record.shape))


def fresh(record: pb.TensorRecord, segment: torch.Tensor) -> torch.Tensor:
    """The record's tensor in CPU memory of its own."""
    found = whole(record, segment)
    return found if is_cut(record) else found.clone()


def copy_record(target: torch.Tensor, record: pb.TensorRecord, segment: torch.Tensor) -> None:
    """Copy a record's bits into a plain tensor of its shape and dtype, on any device, however it is strided.

    Piece by piece where the target can be cut like the record, so that bytes move once.
    """
    into = target.detach()
    slices = _slices(into, record) if is_cut(record) else None
    if slices is None:
        copy_exact(into, whole(record, segment))
        return
    for place, piece in zip(slices, _piece_views(record, segment), strict=True):
        copy_exact(place, piece.view(into.dtype).view(place.shape))


def moves(target: torch.Tensor, record: pb.TensorRecord, segment: torch.Tensor) -> list[Move] | None:
    """Moves that fill a tensor of the record's shape and dtype; None where it cannot be filled by address."""
    if not target.is_cpu or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    if target.numel() * target.dtype.itemsize != record.bytes:
        return None
    into, base = target.data_ptr(), segment.data_ptr()
    return [
        (into + start, base + place, stop - start) for place, start, stop in _pieces(record, 0, record.bytes)
    ]


def pour_plainly(moves: Sequence[Move]) -> None:
    """Do the moves one after the other."""
    for move in moves:
        ctypes.memmove(*move)


def _piece_views(record: pb.TensorRecord, segment: torch.Tensor) -> list[torch.Tensor]:
    return [segment[place : place + stop - start] for place, start, stop in _pieces(record, 0, record.bytes)]


def _slices(target: torch.Tensor, record: pb.TensorRecord) -> tuple[torch.Tensor, ...] | None:
    """The target, cut as the record is; None where a piece would be no view of it."""
    if target.is_conj() or target.is_neg():
        return None
    elements = record.piece_bytes // target.dtype.itemsize
    if target.is_contiguous():
        return torch.split(target.view(-1), elements)
    row = math.prod(target.shape[1:])
    return None if is_expanded(target) or elements % row else torch.split(target, elements // row)
