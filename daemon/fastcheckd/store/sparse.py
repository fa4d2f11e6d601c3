"""A segment of which only some stretches have memory: a place for parts of states, each where it lies in its state.

It counts for those stretches alone. They are allocated when it is made, so that writing to them cannot fail; nobody
may write elsewhere. Nothing is published in one and none is used twice: who reads it finds zeros where nothing was put.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from .directory import create_sparse
from .segment_pools import SegmentPools
from .segments import PAGE_BYTES, Segment

#: No manifest names it.
PARTS_POOL = "parts"


def filled_pages(stretches: Sequence[range]) -> list[range]:
    """The whole pages that have these bytes, as stretches that neither touch nor overlap, rising."""
    found: list[range] = []
    for each in sorted(filter(None, stretches), key=lambda stretch: stretch.start):
        low = each.start // PAGE_BYTES * PAGE_BYTES
        high = -(-each.stop // PAGE_BYTES) * PAGE_BYTES
        if found and low <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, high))
        else:
            found.append(range(low, high))
    return found


class SparseSegment(Segment):
    """One such file. `size_bytes` is what it counts for, `length_bytes` how long it is."""

    def __init__(self, path: Path, length_bytes: int) -> None:
        super().__init__(path, 0, PARTS_POOL)
        self._length_bytes = length_bytes

    @classmethod
    def make(
        cls, folder: Path, pools: SegmentPools, length_bytes: int, stretches: Sequence[range], job: str = ""
    ) -> SparseSegment:
        """A file of at least that length with memory for these byte ranges; the caller gives it back to the pools.

        Raises:
            OverBudgetError: the budget does not allow that memory, even without the free segments.
            StoreFullError: the file system has no room for it.
        """
        length = max(1, -(-length_bytes // PAGE_BYTES)) * PAGE_BYTES
        filled = filled_pages(stretches)
        size = sum(map(len, filled))
        made = cls(folder / f"{secrets.token_hex(16)}.seg", length)
        made.recyclable = False
        pools.adopt(made, job)
        pools.take_again(made)
        try:
            pools.grow(made, size)
            pools.with_room(f"allocate {size} bytes", lambda: create_sparse(made.path, length, filled))
        except BaseException:
            pools.give_back(made)
            raise
        return made

    @property
    def length_bytes(self) -> int:
        """Of the file, holes included."""
        return self._length_bytes
