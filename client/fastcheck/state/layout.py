"""Where each tensor's bytes go, and what the chunks of a state hold: docs/formats.md, "State". Pure.

What belongs together lies together. A group (a parameter with its moments and copies) that fits into a
chunk lies in one; a larger one is cut into pieces of elements, and each chunk holds the same elements of
all members. So whoever has one chunk has everything that is needed to predict it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastcheck_proto.conventions import LAYOUT_CHUNK_BYTES, LAYOUT_SCHEMA, TENSOR_ALIGNMENT_BYTES
from fastcheck_proto.v1 import layout_pb2 as pb

from .tensors import DTYPES

#: Pieces of whole rows where a row has at most this many elements; larger rows would leave chunks half empty.
ROW_ELEMENTS_MAX = 4096
#: Otherwise pieces have a multiple of this many elements.
PIECE_ELEMENTS = 1024
#: Longer headers only by this much, so that one more digit in a step number moves nothing.
HEADER_PADDING_BYTES = 4096

#: What the codec calls a dtype, and how many of those an element is. All others are bytes to it.
_HALVES = {"complex32": ("float16", 2), "complex64": ("float32", 2), "complex128": ("float64", 2)}
_NUMBERS = frozenset(
    ["float16", "bfloat16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


class Extent(NamedTuple):
    """What a layout needs to know of a tensor: the name of its dtype, its shape, whether it is C-contiguous."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.itemsize

    @property
    def row(self) -> int:
        """Elements of one index of the first dimension; 1 for a vector."""
        return math.prod(self.shape[1:])

    @property
    def numbers(self) -> tuple[str, int]:
        """The dtype of its runs, and how many numbers of it each element has."""
        if self.dtype in _NUMBERS:
            return self.dtype, 1
        return _HALVES.get(self.dtype, ("uint8", self.itemsize))


class Member(NamedTuple):
    """One tensor of a group: its slot and what it is to the optimizer."""

    slot: int
    role: pb.Role.ValueType


class Group(NamedTuple):
    """Tensors with as many numbers each, element by element about the same, and the step that made them.

    `optimizer_step` counts from 1; 0: none, or unknown.
    """

    members: tuple[Member, ...]
    optimizer_step: int = 0


class Place(NamedTuple):
    """Where a slot lies: byte offsets of its pieces and bytes of each but the last; no offsets: one piece."""

    offset: int
    piece_offsets: tuple[int, ...] = ()
    piece_bytes: int = 0


class Part(NamedTuple):
    """The `number`-th piece of a slot: its byte range in the state."""

    slot: int
    number: int
    offset: int
    bytes: int


@dataclass
class Arrangement:
    """A layout of all tensors of a state; the header comes after `end`."""

    #: By slot.
    places: list[Place]
    #: All pieces that have bytes, by offset.
    parts: list[Part]
    #: Elements of a piece, of the slots that lie in several.
    piece_elements: dict[int, int]
    #: The first `chunks` are the tensors', the rest the header's.
    layout: pb.StateLayout
    chunks: int
    end: int


def align(offset: int) -> int:
    """The next offset at which a tensor or a run may start."""
    return -(-offset // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES


def header_padding(header_bytes: int) -> int:
    """Bytes of zeros after a header."""
    return -header_bytes % HEADER_PADDING_BYTES


def add_header(layout: pb.StateLayout, padded_bytes: int) -> None:
    """Append the chunks of a header, its padding included."""
    for start in range(0, padded_bytes, LAYOUT_CHUNK_BYTES):
        layout.chunks.add(bytes=min(LAYOUT_CHUNK_BYTES, padded_bytes - start))


def arrange(extents: Sequence[Extent], groups: Sequence[Group]) -> Arrangement:
    """Lay all slots out. Groups are disjoint; slots in none stand alone. Same input, same layout."""
    group_of = {member.slot: group for group in groups for member in group.members}
    builder = _Builder(extents)
    placed: set[int] = set()
    for slot, extent in enumerate(extents):
        if slot in placed or not extent.bytes:
            continue
        group = group_of.get(slot) or Group((Member(slot, pb.ROLE_UNSPECIFIED),))
        placed.update(member.slot for member in group.members)
        builder.put(group)
    return builder.finish()


@dataclass
class _Span:
    """Elements of a slot in a chunk."""

    member: Member
    first: int
    elements: int
    offset: int
    unit: int
    optimizer_step: int


@dataclass
class _ChunkDraft:
    bytes: int = 0
    units: int = 0
    spans: list[_Span] = field(default_factory=list)


class _Builder:
    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = extents
        self._chunks: list[_ChunkDraft] = []
        #: What is small goes on filling this one, wherever it stands by now.
        self._open: _ChunkDraft | None = None
        self._piece_elements: dict[int, int] = {}

    def put(self, group: Group) -> None:
        extents = [self._extents[member.slot] for member in group.members]
        size = sum(align(extent.bytes) for extent in extents)
        if size <= LAYOUT_CHUNK_BYTES:
            if self._open is None or self._open.bytes + size > LAYOUT_CHUNK_BYTES:
                self._open = self._new()
            self._add(self._open, group, 0, extents[0].elements)
        elif len(extents) == 1:
            self._put_large(group)
        elif piece := piece_elements(extents):
            for member in group.members:
                self._piece_elements[member.slot] = piece
            total = extents[0].elements
            for first in range(0, total, piece):
                self._add(self._new(), group, first, min(piece, total - first))
        else:
            for member in group.members:
                self.put(Group((member,), group.optimizer_step))

    def _put_large(self, group: Group) -> None:
        """A lone tensor in as many chunks as it takes, one after the other; what is small may fill the last."""
        extent = self._extents[group.members[0].slot]
        # Chunks begin with rows where that is cheap, and always at aligned bytes.
        cut = math.lcm(extent.row * extent.itemsize, TENSOR_ALIGNMENT_BYTES)
        if extent.row > ROW_ELEMENTS_MAX or cut > LAYOUT_CHUNK_BYTES // 8:
            cut = TENSOR_ALIGNMENT_BYTES
        step = LAYOUT_CHUNK_BYTES // cut * cut // extent.itemsize
        for first in range(0, extent.elements, step):
            chunk = self._new()
            self._add(chunk, group, first, min(step, extent.elements - first))
        if self._open is None or chunk.bytes < self._open.bytes:
            self._open = chunk

    def _new(self) -> _ChunkDraft:
        self._chunks.append(_ChunkDraft())
        return self._chunks[-1]

    def _add(self, chunk: _ChunkDraft, group: Group, first: int, elements: int) -> None:
        unit = 0
        if len(group.members) > 1:
            unit = chunk.units = chunk.units + 1
        for member in group.members:
            chunk.spans.append(_Span(member, first, elements, chunk.bytes, unit, group.optimizer_step))
            chunk.bytes += align(elements * self._extents[member.slot].itemsize)

    def finish(self) -> Arrangement:
        layout = pb.StateLayout(schema=LAYOUT_SCHEMA)
        offsets: dict[int, list[int]] = {}
        parts: list[Part] = []
        start = 0
        for chunk in self._chunks:
            described = layout.chunks.add(bytes=chunk.bytes)
            for span in chunk.spans:
                slot = span.member.slot
                extent = self._extents[slot]
                described.runs.append(_run(span, extent))
                seen = offsets.setdefault(slot, [])
                if slot in self._piece_elements:
                    size = span.elements * extent.itemsize
                    parts.append(Part(slot, len(seen), start + span.offset, size))
                elif not seen:
                    parts.append(Part(slot, 0, start + span.offset, extent.bytes))
                seen.append(start + span.offset)
            start += chunk.bytes
        places = []
        for slot, extent in enumerate(self._extents):
            found = offsets.get(slot, [0])
            pieces = self._piece_elements.get(slot)
            if pieces is None:
                places.append(Place(found[0]))
            else:
                places.append(Place(found[0], tuple(found), pieces * extent.itemsize))
        return Arrangement(places, parts, self._piece_elements, layout, len(self._chunks), start)


def _run(span: _Span, extent: Extent) -> pb.Run:
    dtype, numbers = extent.numbers
    row = extent.row
    whole = len(extent.shape) >= 2 and row > 1 and not span.first % row and not span.elements % row
    return pb.Run(
        offset=span.offset,
        elements=span.elements * numbers,
        dtype=dtype,
        role=span.member.role,
        unit=span.unit,
        optimizer_step=span.optimizer_step,
        row_elements=row * numbers if whole else 0,
    )


def piece_elements(extents: Sequence[Extent]) -> int | None:
    """Elements per piece of a group too large for one chunk; None if it cannot be cut alike.

    As few pieces as possible, of equal size: whole rows where rows are short, or where a tensor is not
    contiguous, since then only rows can be taken out of it without a copy.
    """
    shape, elements, row = extents[0].shape, extents[0].elements, extents[0].row
    alike = all(extent.shape == shape for extent in extents)
    strided = not all(extent.contiguous for extent in extents)
    if alike and (strided or (len(shape) >= 2 and row <= ROW_ELEMENTS_MAX)):
        rows = _most(extents, row)
        if rows:
            return _evenly(shape[0], rows) * row
    if strided:
        return None
    most = _most(extents, PIECE_ELEMENTS)
    if not most:
        return None
    return _evenly(-(-elements // PIECE_ELEMENTS), most) * PIECE_ELEMENTS


def _most(extents: Sequence[Extent], step: int) -> int:
    """How many times `step` elements of each fit into a chunk together."""
    sizes = [extent.itemsize * step for extent in extents]
    most = LAYOUT_CHUNK_BYTES // sum(sizes)
    while most and sum(align(size * most) for size in sizes) > LAYOUT_CHUNK_BYTES:
        most -= 1
    return most


def _evenly(total: int, most: int) -> int:
    """Size of parts of at most `most` when there are as few as possible."""
    return -(-total // -(-total // most))
