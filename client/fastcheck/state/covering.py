"""Boxes of a tensor; which saved ones make up a wanted one, and from which ranks. Pure, and knows no torch.

A **box** is what a rank has of a tensor that is cut over ranks: its offsets in the whole, and its sizes. Several ranks
may hold the same box (replicas). Boxes of one tensor are else apart, but nothing here needs them to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor; empty if some size is 0."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """All of a tensor of this shape."""
        sizes = tuple(shape)
        return Box((0,) * len(sizes), sizes)

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Behind its last element, per dimension."""
        return tuple(low + size for low, size in zip(self.offsets, self.sizes, strict=True))

    def lies_in(self, other: Box) -> bool:
        """Whether all of it is in a box of as many dimensions."""
        return len(self.offsets) == len(self.sizes) == len(other.sizes) and all(
            theirs <= low and high <= end
            for theirs, low, high, end in zip(other.offsets, self.offsets, self.ends, other.ends, strict=True)
        )

    def meet(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        lows = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(high - low for low, high in zip(lows, map(min, self.ends, other.ends), strict=True))
        return Box(lows, sizes) if all(size > 0 for size in sizes) else None

    def minus(self, other: Box) -> list[Box]:
        """What is left without the other's part: at most two boxes per dimension, apart from each other."""
        both = self.meet(other)
        if both is None:
            return [self] if self.elements else []
        left = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (low, high) in enumerate(zip(both.offsets, both.ends, strict=True)):
            start, end = offsets[dim], offsets[dim] + sizes[dim]
            for first, last in ((start, low), (high, end)):
                if first < last:
                    left.append(
                        Box(
                            (*offsets[:dim], first, *offsets[dim + 1 :]),
                            (*sizes[:dim], last - first, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = low, high - low
        return left

    def pieces(self, elements_max: int) -> Iterator[Box]:
        """It in parts of at most so many elements, apart from each other and in order."""
        outer = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if self.elements <= elements_max or outer is None:
            yield self
            return
        half = self.sizes[outer] // 2
        for low, size in ((0, half), (half, self.sizes[outer] - half)):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[outer] += low
            sizes[outer] = size
            yield from Box(tuple(offsets), tuple(sizes)).pieces(elements_max)

    def within(self, other: Box) -> Box:
        """The same part, seen from an enclosing box."""
        return Box(
            tuple(own - theirs for own, theirs in zip(self.offsets, other.offsets, strict=True)), self.sizes
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """It as an index of the whole tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def __str__(self) -> str:
        ranges = (f"{low}:{high}" for low, high in zip(self.offsets, self.ends, strict=True))
        return f"[{', '.join(ranges)}]"


class Source(NamedTuple):
    """A part of a wanted box, and the rank to have it from. Boxes are of the whole."""

    rank: int
    box: Box


class HolesError(Exception):
    """No rank has these parts of what is wanted."""

    def __init__(self, holes: Sequence[Box]) -> None:
        super().__init__(", ".join(map(str, holes)))
        self.holes = tuple(holes)


def cover(wanted: Box, saved: Mapping[int, Box], rank: int) -> list[Source]:
    """Parts that make up the wanted box, apart from each other: few, and as many from `rank` itself as may be.

    Args:
        saved: what each rank has.
        rank: who wants it; of ranks that have the same box others are chosen by it, so that readers spread.

    Raises:
        HolesError: something of it is in no saved box.
    """
    holders: dict[Box, list[int]] = {}
    for other, box in sorted(saved.items()):
        if box.meet(wanted) is not None:
            holders.setdefault(box, []).append(other)
    found: list[Source] = []
    missing = [wanted] if wanted.elements else []
    for box in sorted(holders, key=lambda box: _worth(box, wanted, rank in holders[box]), reverse=True):
        ranks = holders[box]
        source = rank if rank in ranks else ranks[rank % len(ranks)]
        left: list[Box] = []
        for hole in missing:
            part = hole.meet(box)
            if part is not None:
                found.append(Source(source, part))
            left += hole.minus(box)
        missing = left
        if not missing:
            return found
    if missing:
        raise HolesError(missing)
    return found


def _worth(box: Box, wanted: Box, own: bool) -> tuple[int, bool, tuple[int, ...]]:
    """Boxes with more of what is wanted come first, of those alike the rank's own; the rest is for a fixed order."""
    both = box.meet(wanted)
    return (0 if both is None else both.elements), own, tuple(-offset for offset in box.offsets)
