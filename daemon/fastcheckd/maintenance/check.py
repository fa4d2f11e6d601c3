"""Checks one replica against its digests, a chunk at a time, without getting into anybody's way.

Between two chunks nothing of the replica is held: a scrub may take minutes, and what is dropped meanwhile has to go.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from ..counters import Counters
from ..errors import NotHeldError
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..transfer.pacing import Gate


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
