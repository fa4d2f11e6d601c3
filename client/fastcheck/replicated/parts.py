"""Which rank keeps which chunks of a shared state, and what of it is compared. Pure.

Every rank computes this for itself from the same layout, so it must depend on nothing else.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..state.layout import Arrangement, Extent, Place

DIGEST_BYTES = 16
_MIX = 0x9E3779B97F4A7C15
_WORD = 2**64


class Stretch(NamedTuple):
    """Consecutive elements of a slot that lie in one chunk: their byte range in the shared state."""

    slot: int
    first: int
    elements: int
    offset: int
    bytes: int


class Entry(NamedTuple):
    """Consecutive elements of a slot that lie in one part."""

    slot: int
    first: int
    elements: int


def cut(lengths: Sequence[int], count: int) -> tuple[range, ...]:
    """The chunks of each of `count` parts: cut at the chunk ends nearest to an even split, the earlier of two.

    No part is further from an even share than the largest chunk is long. Some are empty if there are few chunks.
    """
    bounds = [0, *accumulate(lengths)]
    cuts = [0]
    for number in range(1, count):
        target = bounds[-1] * number  # times count
        behind = bisect_left(bounds, target, key=lambda bound: bound * count)
        before = max(0, behind - 1)
        nearer = before if target - bounds[before] * count <= bounds[behind] * count - target else behind
        cuts.append(nearer)
    return tuple(range(start, stop) for start, stop in pairwise([*cuts, len(lengths)]))


def partner(rank: int, world_size: int, step: int) -> int:
    """The other part that a rank looks at when ranks compare in pairs: each part has one such rank, in turn."""
    if world_size == 1:
        return rank
    mixed = (step * _MIX % _WORD) >> 32  # steps are often multiples of something
    return (rank + 1 + mixed % (world_size - 1)) % world_size


@dataclass(frozen=True)
class Sharing:
    """A shared state cut for `len(chunks)` ranks."""

    chunks: tuple[range, ...]
    #: One more than ranks: byte offsets in the shared state.
    cuts: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    #: By slot that has bytes.
    places: dict[int, Place]
    #: What is compared, by part.
    entries: tuple[tuple[Entry, ...], ...]

    def stretches_of(self, part: int) -> tuple[Stretch, ...]:
        """What lies in a part, by offset."""
        low = bisect_left(self.stretches, self.cuts[part], key=lambda s: s.offset)
        high = bisect_left(self.stretches, self.cuts[part + 1], key=lambda s: s.offset)
        return self.stretches[low:high]

    def digest(self, described: Sequence[tuple[str, Extent, int]]) -> bytes:
        """Of everything that must be the same on all ranks; (name, extent, slot) of each shared record, in order."""
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        found.update(repr(self.cuts).encode())
        for name, extent, slot in described:
            place = self.places.get(slot)
            found.update(repr((name, extent.dtype, extent.shape, place and tuple(place))).encode())
        return found.digest()


def share(arrangement: Arrangement, extents: Sequence[Extent], ranks: int) -> Sharing:
    """Cut a laid-out state for so many ranks."""
    lengths = [chunk.bytes for chunk in arrangement.layout.chunks[: arrangement.chunks]]
    bounds = [0, *accumulate(lengths)]
    chunks = cut(lengths, ranks)
    cuts = (*(bounds[part.start] for part in chunks), bounds[-1])
    stretches = _stretches(arrangement, extents, bounds)
    entries: list[dict[int, Entry]] = [{} for _ in chunks]
    for stretch in stretches:
        mine = entries[bisect_right(cuts, stretch.offset) - 1]
        # Its stretches follow each other, from chunk to chunk.
        entry = mine.get(stretch.slot, Entry(stretch.slot, stretch.first, 0))
        mine[stretch.slot] = entry._replace(elements=entry.elements + stretch.elements)
    return Sharing(
        chunks=chunks,
        cuts=cuts,
        stretches=tuple(stretches),
        places=_places(stretches),
        entries=tuple(tuple(part.values()) for part in entries),
    )


def _stretches(arrangement: Arrangement, extents: Sequence[Extent], bounds: Sequence[int]) -> list[Stretch]:
    found = []
    for part in arrangement.parts:
        itemsize = extents[part.slot].itemsize
        first = part.number * arrangement.piece_elements.get(part.slot, 0)
        start, stop = part.offset, part.offset + part.bytes
        while start < stop:  # a large tensor that stands alone goes through several chunks
            end = min(stop, bounds[bisect_right(bounds, start)])
            elements = (end - start) // itemsize
            found.append(Stretch(part.slot, first, elements, start, end - start))
            first += elements
            start = end
    return found


def _places(stretches: Sequence[Stretch]) -> dict[int, Place]:
    """All but a slot's last stretch have the same size: pieces."""
    by_slot: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        by_slot.setdefault(stretch.slot, []).append(stretch)
    return {
        slot: Place(found[0].offset)
        if len(found) == 1
        else Place(found[0].offset, tuple(s.offset for s in found), found[0].bytes)
        for slot, found in by_slot.items()
    }
