"""Checks replicas against their digests: each within `scrub_period_s`, slowly, never while the foreground moves bytes.

Memory goes bad in silence; a bad copy that is found while there are good ones costs nothing. The store drops it
and tells (see `inventory`), and the registry has it made again. Between two chunks nothing of a replica is held: a
scrub may take minutes, and what is dropped meanwhile has to go.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import Executor

from ..counters import Counters
from ..errors import FastCheckdError, NotHeldError
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..transfer.pacing import Gate, Pacer
from .scrub_schedule import ScrubItem, ScrubSchedule

logger = logging.getLogger(__name__)

#: How often it is looked whether there is something to check.
LOOK_INTERVAL_S = 1.0
BYTES_PER_S_MIN = 64 << 20


class Checker:
    """Reads replicas on the threads of `executor`, one of them at a time for each call."""

    def __init__(self, store: ReplicaStore, executor: Executor, counters: Counters) -> None:
        self._store = store
        self._executor = executor
        self._counters = counters

    async def check(self, held: Replica, gate: Gate | None = None) -> bool | None:
        """Compare all bytes with their digests; `gate` says when the next chunk may be read.

        True: they match, and that is noted. False: they do not; the replica was dropped and counted. None: it
        was dropped or replaced meanwhile, so there is nothing to say of it.
        """
        loop = asyncio.get_running_loop()
        stream = object()
        if gate is not None:
            gate.begin(stream)
        try:
            good = True
            for index in range(len(held.chunks)):
                start, stop = held.chunks.range(index)
                if gate is not None:
                    await gate.wait_async(stream, stop - start)
                good = await loop.run_in_executor(self._executor, self._store.check, held, index)
                if not good:
                    break
        except NotHeldError:
            return None
        finally:
            if gate is not None:
                gate.end(stream)
        if good:
            self._store.note_verified(held)
        self._counters.add("replicas_scrubbed")
        return good


class Scrubber:
    """The scrub of one data process.

    Args:
        busy: whether the foreground moves bytes.
    """

    def __init__(
        self,
        store: ReplicaStore,
        checker: Checker,
        *,
        period_s: float,
        budget_bytes: int,
        chunk_bytes: int,
        busy: Callable[[], bool],
    ) -> None:
        self._store = store
        self._checker = checker
        self._schedule = ScrubSchedule(period_s)
        # Twice what a full store needs: what was not read while others came first is made up for.
        rate = max(BYTES_PER_S_MIN, 2 * budget_bytes / period_s)
        self._gate = Gate(Pacer(rate, burst_bytes=chunk_bytes, trickle_s=math.inf), busy)

    async def run(self) -> None:
        """Check one replica after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            held = {_item(replica): replica for replica in self._store.held()}
            self._schedule.refresh(held, loop.time())
            item = self._schedule.next(loop.time())
            if item is None:
                await asyncio.sleep(LOOK_INTERVAL_S)
                continue
            try:
                await self._checker.check(held[item], self._gate)
            except FastCheckdError as error:
                logger.warning("cannot check %s: %s", item.name, error)
            self._schedule.checked(item, loop.time())

    def age_ms(self) -> int | None:
        """How long ago the replica that waits longest was checked; None: nothing is held."""
        age_s = self._schedule.age_s(asyncio.get_running_loop().time())
        return None if age_s is None else max(0, round(age_s * 1000))


def _item(replica: Replica) -> ScrubItem:
    return ScrubItem(
        name=tuple(replica.id),
        step=replica.key.step,
        digest=replica.manifest.digest,
        bytes=replica.manifest.bytes,
        verified=replica.verified_at_ms != 0,
    )
