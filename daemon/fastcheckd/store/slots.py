"""Slots: where a chunk's new bytes lie complete before the replica's chunk is touched.

A slot is a segment that no manifest names. When a process is killed while it copies a slot into its
place, the next one finds the torn chunk's whole content there (`recovery`); that is why it is not
ordinary memory. Reused through the pools: there are about as many as threads that use them at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..errors import OverBudgetError, StoreFullError
from .segment_pools import SegmentPools
from .segments import SLOT_POOL

#: More threads than these only wait for memory.
WORKERS_MAX = min(8, os.cpu_count() or 1)


@contextlib.contextmanager
def slot(pools: SegmentPools, size_bytes: int) -> Iterator[memoryview]:
    """A writable slot of exactly this size; what is in it is no longer needed at the end.

    Raises:
        OverBudgetError, StoreFullError: no room.
    """
    segment = pools.allocate(size_bytes, SLOT_POOL)
    try:
        yield segment.view[:size_bytes]
    finally:
        pools.give_back(segment)


@contextlib.contextmanager
def slots(
    pools: SegmentPools, size_bytes: int, wanted: int, spare: memoryview | None = None
) -> Iterator[list[memoryview]]:
    """Up to `wanted` slots (at most WORKERS_MAX), at least one, `spare` among them if given.

    Raises:
        OverBudgetError, StoreFullError: no room for even one; never with a spare.
    """
    with contextlib.ExitStack() as stack:
        found = [spare if spare is not None else stack.enter_context(slot(pools, size_bytes))]
        with contextlib.suppress(OverBudgetError, StoreFullError):
            while len(found) < min(wanted, WORKERS_MAX):
                found.append(stack.enter_context(slot(pools, size_bytes)))
        yield found
