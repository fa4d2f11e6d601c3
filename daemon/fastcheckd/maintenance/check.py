"""Checks one replica against its digests, a chunk at a time, without getting into anybody's way.

A replica is pinned for one chunk at a time only: whoever pins one ends the patch that is being made of it, and
keeps a newer step from being put into its place.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from ..counters import Counters
from ..digests import chunk_digest
from ..errors import NotHeldError
from ..store.ram_store import HeldShard, RamStore
from ..transfer.pacing import Gate


class Checker:
    """Reads replicas on the threads of `executor`, one of them at a time for each call."""

    def __init__(self, store: RamStore, executor: Executor, counters: Counters) -> None:
        self._store = store
        self._executor = executor
        self._counters = counters

    async def check(self, held: HeldShard, gate: Gate | None = None) -> bool | None:
        """Compare all bytes with their digests; `gate` says when the next chunk may be read.

        True: they match, and that is noted. False: they do not; the replica was dropped and counted. None: it
        was dropped, replaced or patched meanwhile, so there is nothing to say of it.
        """
        loop = asyncio.get_running_loop()
        stream = object()
        if gate is not None:
            gate.begin(stream)
        try:
            if not held.is_full:
                if gate is not None:
                    await gate.wait_async(stream, held.manifest.bytes)
                # Decoded as a whole, into scratch memory.
                good = await loop.run_in_executor(self._executor, self._store.verify, held)
            else:
                for index in range(len(held.chunks)):
                    start, stop = held.chunks.range(index)
                    if gate is not None:
                        await gate.wait_async(stream, stop - start)
                    good = await loop.run_in_executor(self._executor, self._is_good, held, index)
                    if not good:
                        break
                else:
                    good = True
                    await loop.run_in_executor(self._executor, self._store.note_verified, held)
        except NotHeldError:
            return None
        finally:
            if gate is not None:
                gate.end(stream)
        self._counters.add("replicas_scrubbed")
        return good

    def _is_good(self, held: HeldShard, index: int) -> bool:
        with self._store.pinned(held):
            start, stop = held.chunks.range(index)
            with held.view[start:stop] as view:
                good = chunk_digest(view) == held.chunk_digest(index)
            if not good:
                self._store.condemn(held, f"chunk {index}")
        return good
