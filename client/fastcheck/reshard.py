"""Loads a step on other ranks, another mesh, or with other placements than it was saved with (docs/resharding.md).

The parts that this rank needs of all ranks' states are read into memory, laid out as this rank would have saved it;
from there on it is an ordinary load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fastcheck_proto.conventions import TENSOR_ALIGNMENT_BYTES
from fastcheck_proto.v1 import state_pb2 as pb

from .errors import OutOfMemoryError, StateMismatchError, WorldSizeError
from .progress import Reporter
from .saved_rank import SavedRank
from .segments import anonymous
from .state.fill import fill
from .state.header import Path, show
from .state.match import Match, any_dtensor, match_records, whole_shape
from .state.sharding import Box, HolesError, box_of, cover, is_dtensor, layout_of, local_of, saved_box
from .state.tensors import DTYPES, carrier
from .step_reader import BoxInto, StepReader

HOLES_SHOWN_MAX = 3
#: Copies on several meshes are compared in batches of this size.
COMPARED_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class ReadPart:
    """A box of a rank's saved tensor, and the box of this rank's record that it is read into."""

    rank: int
    record: pb.TensorRecord
    source: Box
    target: Box

    def source_of(self, target: Box) -> Box:
        """The box of the rank's record that belongs to a part of the target."""
        low = target.within(self.target)
        return Box(tuple(map(sum, zip(self.source.offsets, low.offsets, strict=True))), low.sizes)


@dataclass
class Relayout:
    """The state as this rank would have saved it: header with places, size, and the source of each record's bytes."""

    header: pb.StateHeader
    state_bytes: int = 0
    parts: list[tuple[pb.TensorRecord, list[ReadPart]]] = field(default_factory=list)
    #: The same parts on other meshes, which must have the same bits.
    alike: list[tuple[Path, pb.TensorRecord, list[ReadPart]]] = field(default_factory=list)


def load_resharded(
    state: object,
    reader: StepReader,
    rank: int,
    world_size: int,
    agree: Callable[[], None],
    reporter: Reporter | None = None,
) -> int:
    """Fill `state` from a step that other ranks, or other meshes, saved; `agree` as for `fill`.

    `reporter` is told the progress of the read that fetches the tensors; the headers before it are small.

    Returns the rank whose plain values these are: this one, or 0 if it had no part in the step.

    Raises:
        WorldSizeError: other ranks saved it, and there is no DTensor on either side.
        StateMismatchError, UnsupportedStateError, PartialLoadError: as `fill`, or no rank has a part.
        What `StepReader` does.
    """
    saved = reader.ranks
    own = rank if rank in saved else 0
    header = saved[own].header
    try:
        matches = match_records(state, header)
    except StateMismatchError:
        if world_size != reader.world_size and not any_dtensor(header, {}):
            raise _no_whole(reader, world_size) from None
        raise
    if world_size != reader.world_size and not any_dtensor(header, matches):
        raise _no_whole(reader, world_size)
    planned = plan(saved, own, rank, matches, same_world=world_size == reader.world_size)
    try:
        memory = anonymous(planned.state_bytes).tensor[: planned.state_bytes]
    except MemoryError as error:
        raise OutOfMemoryError(f"step {reader.step}: {error}") from None
    reader.fill(
        [
            BoxInto(part.rank, part.record, *part.source, _place(memory, record, part.target))
            for record, parts in planned.parts
            for part in parts
        ],
        reporter,
    )
    _compare(planned, own, reader, memory)
    fill(state, planned.header, memory, agree=agree)
    return own


def plan(
    saved: Mapping[int, SavedRank], own: int, rank: int, matches: Mapping[int, Match], *, same_world: bool
) -> Relayout:
    """Plan the reads for `rank`, whose tree is that of the saved rank `own`. Reads nothing.

    Raises:
        StateMismatchError: a part is in no rank's state, or it cannot be known in which.
    """
    header = pb.StateHeader()
    header.CopyFrom(saved[own].header)
    made = Relayout(header)
    mismatches: list[str] = []
    for index, record in enumerate(header.tensors):
        there = saved[own].header.tensors[index]
        try:
            parts, *others = _parts(saved, own, rank, there, matches.get(index), same_world=same_world)
        except _UnclearError as error:
            path = matches[index].path
            mismatches.append(f"{show(path)} {error}")
            continue
        _lay_out(record, matches.get(index), made)
        made.parts.append((record, parts))
        made.alike += [(matches[index].path, record, other) for other in others]
    if mismatches:
        raise StateMismatchError(mismatches)
    return made


class _UnclearError(Exception):
    """Why a tensor cannot be put together, as the end of a sentence."""


def _parts(
    saved: Mapping[int, SavedRank],
    own: int,
    rank: int,
    record: pb.TensorRecord,
    match: Match | None,
    *,
    same_world: bool,
) -> list[list[ReadPart]]:
    """The parts of one tensor, and the same parts on other meshes."""
    if match is None or not (record.HasField("dtensor") or is_dtensor(match.like)):
        box = Box.whole(record.shape)
        return [[ReadPart(own, record, box, box)] if record.bytes else []]
    wanted = box_of(match.like)
    if wanted is None:
        raise _UnclearError(
            "is a DTensor here whose local part is no box of the whole: it cannot be resharded"
        )
    if not wanted.elements:
        return [[]]
    if not record.HasField("dtensor"):
        # Every rank has all of it, and nothing says that the copies are equal: all ranks cut rank 0's.
        first = saved[0].records.get(match.path)
        if first is None or first.HasField("dtensor") or list(first.shape) != list(record.shape):
            raise _UnclearError("is not distributed in the checkpoint, and rank 0 has no such tensor")
        return [[ReadPart(0, first, wanted, wanted.within(wanted))]]
    # With the same number of ranks each is still in its old mesh, unless the tensor is on another one now.
    stays = same_world and (
        not is_dtensor(match.like) or layout_of(match.like).mesh_digest == record.dtensor.mesh_digest
    )
    meshes = _meshes(saved, own, record, match.path, own_only=stays)
    found: list[list[ReadPart]] = []
    holes: HolesError | None = None
    for records in meshes:
        try:
            found.append(_covered(records, wanted, rank))
        except HolesError as error:
            holes = holes or error
    if holes is not None and (not found or len(meshes) == 1):
        shown = ", ".join(map(str, holes.holes[:HOLES_SHOWN_MAX]))
        raise _UnclearError(f"is not all in the checkpoint: no rank has {shown} of it") from None
    if holes is not None:
        raise _UnclearError(
            f"is on {len(meshes)} meshes in the checkpoint, of which not all have the whole of it: they may be "
            "different tensors, so only the same ranks on the same mesh can load it"
        )
    return found


def _covered(records: Mapping[int, pb.TensorRecord], wanted: Box, rank: int) -> list[ReadPart]:
    """The parts of one mesh's ranks that make up the wanted box; raises HolesError if some are missing."""
    boxes = {other: saved_box(each) for other, each in records.items()}
    known = {other: box for other, box in boxes.items() if box is not None}
    if unknown := sorted(boxes.keys() - known.keys()):
        placements = ", ".join(records[unknown[0]].dtensor.placements)
        raise _UnclearError(
            f"was laid out as ({placements}) by rank {unknown[0]}: which part of the whole that is was not recorded, "
            "or it is no box of it; load it with the same ranks, mesh and placements"
        )
    return [
        ReadPart(
            source.rank,
            records[source.rank],
            source.box.within(known[source.rank]),
            source.box.within(wanted),
        )
        for source in cover(wanted, known, rank)
    ]


def _meshes(
    saved: Mapping[int, SavedRank], own: int, record: pb.TensorRecord, path: Path, *, own_only: bool
) -> list[dict[int, pb.TensorRecord]]:
    """The ranks' records of this tensor, by mesh; the mesh of rank `own` first."""
    found: dict[int, dict[int, pb.TensorRecord]] = {record.dtensor.mesh_digest: {}}
    for other, each in saved.items():
        theirs = each.records.get(path)
        if theirs is None:
            continue
        mesh = theirs.dtensor.mesh_digest if theirs.HasField("dtensor") else None
        if own_only and mesh not in (None, record.dtensor.mesh_digest):
            continue
        if whole_shape(theirs) != whole_shape(record) or theirs.dtype != record.dtype:
            raise _UnclearError(
                f"has shape {whole_shape(record)} and dtype {record.dtype} on rank {own} of the checkpoint, "
                f"{whole_shape(theirs)} and {theirs.dtype} on rank {other}"
            )
        if mesh is not None:
            found.setdefault(mesh, {})[other] = theirs
    return list(found.values())


def _compare(planned: Relayout, own: int, reader: StepReader, memory: torch.Tensor) -> None:
    """Check that a tensor on several meshes has the same bits on all; otherwise one name stands for different tensors.

    Tensor parallelism leaves tensors that its plan does not name (norms, embeddings) on a mesh of their own per rank.
    The stages of a pipeline may give different tensors the same name, which looks alike.

    Raises:
        StateMismatchError: they differ, by name.
    """
    differ: dict[Path, str] = {}
    batch: list[tuple[Path, pb.TensorRecord, ReadPart, BoxInto]] = []
    size = 0

    def check() -> None:
        reader.fill([box for *_, box in batch])
        for path, record, part, box in batch:
            here = _place(memory, record, part.target)
            if not torch.equal(carrier(box.target), carrier(here)):
                differ.setdefault(
                    path,
                    f"{show(path)} was on one mesh on rank {own} and on another on rank {part.rank}, with other "
                    "values: they are different tensors, or copies that have drifted apart, so only the same ranks "
                    "on the same mesh can load it",
                )
        batch.clear()

    for path, record, parts in planned.alike:
        itemsize = DTYPES[record.dtype].itemsize
        for whole in parts:
            for box in whole.target.pieces(COMPARED_BYTES_MAX // itemsize):
                part = ReadPart(whole.rank, whole.record, whole.source_of(box), box)
                into = torch.empty(box.sizes, dtype=DTYPES[record.dtype])
                batch.append((path, record, part, BoxInto(part.rank, part.record, *part.source, into)))
                size += into.nbytes
                if size >= COMPARED_BYTES_MAX:
                    check()
                    size = 0
    if batch:
        check()
    if differ:
        raise StateMismatchError(list(differ.values()))


def _lay_out(record: pb.TensorRecord, match: Match | None, made: Relayout) -> None:
    """Set a record's place in this rank's memory."""
    del record.piece_offsets[:]
    record.ClearField("piece_bytes")
    if match is not None:
        wanted = box_of(match.like)
        assert wanted is not None or not (record.HasField("dtensor") or is_dtensor(match.like))
        record.ClearField("dtensor")
        if is_dtensor(match.like):
            record.dtensor.CopyFrom(layout_of(match.like))
        if wanted is not None:
            del record.shape[:]
            record.shape.extend(_local_shape(match.like, wanted))
            record.bytes = wanted.elements * DTYPES[record.dtype].itemsize
    record.offset = made.state_bytes
    made.state_bytes += -(-record.bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES


def _local_shape(like: torch.Tensor, wanted: Box) -> tuple[int, ...]:
    if wanted.elements or not is_dtensor(like):
        return wanted.sizes
    return tuple(local_of(like).shape)  # on a rank outside of the mesh it has one dimension


def _place(memory: torch.Tensor, record: pb.TensorRecord, box: Box) -> torch.Tensor:
    """A box of a record's tensor, as a view."""
    flat = memory[record.offset : record.offset + record.bytes].view(DTYPES[record.dtype])
    place = flat.view(tuple(record.shape))
    for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        place = place.narrow(dim, low, size)
    return place


def _no_whole(reader: StepReader, world_size: int) -> WorldSizeError:
    return WorldSizeError(
        f"step {reader.step} of job {reader.job!r} was saved by {reader.world_size} ranks, and nothing in it says how "
        f"its tensors make a whole for {world_size}: start as many ranks as saved it, use DTensors, or save with "
        "replicated=True"
    )
