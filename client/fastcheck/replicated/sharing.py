"""One rank's part of a state that all ranks hold alike, ready to be copied, and what it found in the whole.

The part is a rank's state like any other: chunks of tensors, then what is this rank's alone, then a header. The header
has the whole tree, with places in the whole state, so that every part says what the whole is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fastcheck_proto.conventions import LAYOUT_SCHEMA
from fastcheck_proto.v1 import common_pb2, layout_pb2

from ..errors import InvalidArgumentError
from ..state.collect import Collected, collect
from ..state.flatten import FlatState, Piece, header_of, pieces_of
from ..state.header import SHARED_SCHEMA
from ..state.layout import Arrangement
from ..state.layouts import Layouts
from . import sums
from .parts import Sharing, partner, share

COMPARISONS = ("all", "pairs", "off")
#: A rank that looks at all parts sends 16 bytes for each, once a second while a step is incomplete.
RANKS_MAX = 4096


class SharedSaves:
    """Makes one rank's parts, save after save.

    Args:
        rank, world_size: this rank, and how many hold the state.
        per_rank: keys whose tensors are each rank's own, as dotted paths from the top of the state.
        compare: "all": every rank looks at all of the state; "pairs": at its own part and one other's, in turn;
            "off".

    Raises:
        InvalidArgumentError: an argument is not usable.
    """

    def __init__(self, rank: int, world_size: int, per_rank: Sequence[str], compare: str) -> None:
        if compare not in COMPARISONS:
            raise InvalidArgumentError(f"compare = {compare!r} is none of {', '.join(COMPARISONS)}")
        if isinstance(per_rank, str) or not all(isinstance(key, str) and key for key in per_rank):
            raise InvalidArgumentError(f'per_rank = {per_rank!r} must be a tuple of keys, such as ("rng",)')
        if world_size > RANKS_MAX:
            raise InvalidArgumentError(f"replicated=True takes at most {RANKS_MAX} ranks, not {world_size}")
        self._rank = rank
        self._world_size = world_size
        self._per_rank = tuple(per_rank)
        self._compare = compare
        #: The last sharing and its digest: good for as long as the layout is the same.
        self._known: tuple[Arrangement, Sharing, bytes] | None = None

    def flatten(self, state: object, layouts: Layouts) -> tuple[FlatState, Shared]:
        """This rank's part of a state.

        Raises:
            UnsupportedStateError: something in the state cannot be saved; the message names its path.
        """
        found = collect(state)
        own = self._own_slots(found)
        shared = layouts.arrange(found, without=own)
        apart = layouts.arrange(found, without=set(range(len(found.extents))) - own) if own else None
        sharing, digest = self._share(found, shared, own)
        flat = self._part(found, shared, apart, sharing, own)
        part = common_pb2.SharedPart(
            shared_bytes=sharing.cuts[-1],
            start=sharing.cuts[self._rank],
            stop=sharing.cuts[self._rank + 1],
            layout_digest=digest,
        )
        return replace(flat, shared=part), Shared(found, sharing)

    def compared(self, flat: FlatState, shared: Shared, step: int) -> FlatState:
        """The part with what this rank finds in the state now: reads as much of it as `compare` says."""
        if self._compare == "off" or self._world_size == 1:
            return flat
        parts = range(self._world_size)
        looked_at = (
            parts if self._compare == "all" else sorted({self._rank, partner(self._rank, len(parts), step)})
        )
        return replace(flat, shared_digests=tuple(shared.digest(part) for part in looked_at))

    def _own_slots(self, found: Collected) -> set[int]:
        """Slots that only named keys lead to."""
        own: set[int] = set()
        shared: set[int] = set()
        for name, slot in zip(found.names, found.record_slots, strict=True):
            named = any(name == key or name.startswith(f"{key}.") for key in self._per_rank)
            (own if named else shared).add(slot)
        return own - shared

    def _share(self, found: Collected, shared: Arrangement, own: set[int]) -> tuple[Sharing, bytes]:
        if self._known is None or self._known[0] is not shared:
            sharing = share(shared, found.extents, self._world_size)
            described = [
                (name, found.extents[slot], slot)
                for name, slot in zip(found.names, found.record_slots, strict=True)
                if slot not in own
            ]
            self._known = (shared, sharing, sharing.digest(described))
        return self._known[1:]

    def _part(
        self,
        found: Collected,
        shared: Arrangement,
        apart: Arrangement | None,
        sharing: Sharing,
        own: set[int],
    ) -> FlatState:
        start, stop = sharing.cuts[self._rank : self._rank + 2]
        whole_bytes = sharing.cuts[-1]
        for record, slot in zip(found.header.tensors, found.record_slots, strict=True):
            place = apart.places[slot] if apart is not None and slot in own else sharing.places.get(slot)
            if place is None or not record.bytes:
                continue  # nothing lies anywhere
            beside = whole_bytes if slot in own else 0
            record.offset = beside + place.offset
            if place.piece_offsets:
                record.piece_offsets.extend(beside + offset for offset in place.piece_offsets)
                record.piece_bytes = place.piece_bytes
        found.header.schema = SHARED_SCHEMA
        found.header.shared.cuts.extend(sharing.cuts)
        chunks = sharing.chunks[self._rank]
        layout = layout_pb2.StateLayout(
            schema=LAYOUT_SCHEMA,
            chunks=shared.layout.chunks[chunks.start : chunks.stop],
            optimizer_steps=shared.layout.optimizer_steps,
            precision=shared.layout.precision if shared.layout.HasField("precision") else None,
        )
        slices = Slices(found)
        pieces = [
            Piece(slices.of(s.slot, s.first, s.elements), s.offset - start, s.bytes)
            for s in sharing.stretches_of(self._rank)
        ]
        end = stop - start
        if apart is not None:
            layout.chunks.extend(apart.layout.chunks[: apart.chunks])
            pieces += [p._replace(offset=end + p.offset) for p in pieces_of(found, apart)]
            end += apart.end
        return FlatState(tuple(pieces), header_of(found, layout), end, layout)


@dataclass(frozen=True)
class Shared:
    """A state of which a part is being saved: what a comparison needs of it."""

    found: Collected
    sharing: Sharing

    def digest(self, part: int) -> common_pb2.PartDigest:
        """What is in a part, as this rank has it."""
        slices = Slices(self.found)
        tensors = [slices.of(*entry) for entry in self.sharing.entries[part]]
        return common_pb2.PartDigest(part=part, digest=sums.combined(sums.digests(tensors)))


class Slices:
    """Runs of elements of a state's tensors, without copying where that can be avoided."""

    def __init__(self, found: Collected) -> None:
        self._found = found
        self._flat: dict[int, torch.Tensor] = {}

    def of(self, slot: int, first: int, elements: int) -> torch.Tensor:
        """So many elements of a slot from `first` on."""
        tensor = self._found.tensors[slot]
        extent = self._found.extents[slot]
        if elements == extent.elements:
            return tensor
        if not tensor.is_contiguous() and not first % extent.row and not elements % extent.row:
            return tensor[first // extent.row : (first + elements) // extent.row]
        if slot not in self._flat:
            self._flat[slot] = tensor.reshape(-1)
        return self._flat[slot][first : first + elements]
