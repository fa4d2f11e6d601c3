"""A record's bytes in a segment: as a view, in pieces, gathered, or copied to where they belong.

The header was checked, so every piece lies within the segment, a flat uint8 tensor that starts aligned.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from . import dtypes
from .tensors import copy_exact, is_expanded

#: Destination address, source address, bytes.
Move = tuple[int, int, int]
#: Does moves whose destinations do not overlap, unless with the same bytes.
Pour = Callable[[Sequence[Move]], None]


def is_cut(record: pb.TensorRecord) -> bool:
    """Whether the tensor lies in several pieces."""
    return bool(record.piece_offsets)


def same_place(one: pb.TensorRecord, other: pb.TensorRecord) -> bool:
    """Whether two records are about the same bytes."""
    return (
        one.offset == other.offset
        and one.piece_bytes == other.piece_bytes
        and one.piece_offsets == other.piece_offsets
    )


def whole(record: pb.TensorRecord, segment: torch.Tensor) -> torch.Tensor:
    """The record's tensor: a view of the segment, or memory of its own if it lies in several pieces."""
    dtype = dtypes.BY_NAME[record.dtype]
    if not record.bytes:
        return torch.empty(tuple(record.shape), dtype=dtype)
    if is_cut(record):
        flat = torch.empty(record.bytes, dtype=torch.uint8)
        for into, piece in zip(torch.split(flat, record.piece_bytes), _pieces(record, segment), strict=True):
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
    for place, piece in zip(slices, _pieces(record, segment), strict=True):
        copy_exact(place, piece.view(into.dtype).view(place.shape))


def moves(target: torch.Tensor, record: pb.TensorRecord, segment: torch.Tensor) -> list[Move] | None:
    """How to fill a tensor of the record's shape and dtype by addresses; None where that is not possible."""
    if not target.is_cpu or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    if target.numel() * target.dtype.itemsize != record.bytes:
        return None
    into, base = target.data_ptr(), segment.data_ptr()
    if not is_cut(record):
        return [(into, base + record.offset, record.bytes)] if record.bytes else []
    found, left = [], record.bytes
    for offset in record.piece_offsets:
        size = min(record.piece_bytes, left)
        found.append((into + record.bytes - left, base + offset, size))
        left -= size
    return found


def pour_plainly(moves: Sequence[Move]) -> None:
    """Do moves one after the other."""
    for move in moves:
        ctypes.memmove(*move)


def _pieces(record: pb.TensorRecord, segment: torch.Tensor) -> list[torch.Tensor]:
    size, left = record.piece_bytes, record.bytes
    found = []
    for offset in record.piece_offsets:
        found.append(segment[offset : offset + min(size, left)])
        left -= size
    return found


def _slices(target: torch.Tensor, record: pb.TensorRecord) -> tuple[torch.Tensor, ...] | None:
    """The target cut like the record; None where a piece is no view of it."""
    if target.is_conj() or target.is_neg():
        return None
    elements = record.piece_bytes // target.dtype.itemsize
    if target.is_contiguous():
        return torch.split(target.view(-1), elements)
    row = math.prod(target.shape[1:])
    return None if is_expanded(target) or elements % row else torch.split(target, elements // row)
