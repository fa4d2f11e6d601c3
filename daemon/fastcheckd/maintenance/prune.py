"""Drops what the registry does not keep any more: with each new view, and now and then.

Now and then, because a copy can arrive after the view that says that its step is not kept: of an offer or a repair that
was under way, or of a load that has published what it brought.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from ..errors import StoreError
from ..store.manifests import replica_id
from ..store.replica_store import ReplicaStore
from ..store.retention import Kept, what_to_drop
from ..view import ViewFollower

logger = logging.getLogger(__name__)

PRUNE_S = 5.0


class Pruner:
    """Of one data process. Owned by the event loop's thread.

    Args:
        on_pruned: told by which view it was done.
    """

    def __init__(
        self,
        store: ReplicaStore,
        view: ViewFollower,
        on_pruned: Callable[[Mapping[str, Kept]], None] = lambda _jobs: None,
    ) -> None:
        self._store = store
        self._view = view
        self._on_pruned = on_pruned
        self._wanted = asyncio.Event()

    def changed(self) -> None:
        """There is a new view. Returns at once."""
        self._wanted.set()

    async def prune(self) -> None:
        """Drop what the newest view does not need; before the first view nothing."""
        jobs = self._view.retention()
        await asyncio.to_thread(prune, self._store, jobs)
        self._on_pruned(jobs)

    async def run(self) -> None:
        """Do so with each new view, and now and then, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRUNE_S):
                    await self._wanted.wait()
            self._wanted.clear()
            await self.prune()


def prune(store: ReplicaStore, jobs: Mapping[str, Kept]) -> None:
    """Drop replicas of steps that the registry no longer keeps, the oldest first: they lead to newer ones. Blocks.

    Nor is memory kept ready for sessions that are over.
    """
    held = {shard.id: shard for shard in store.held()}
    drop = what_to_drop([(s.kind, s.key, s.manifest.session) for s in held.values()], jobs)
    for kind, key, _ in sorted(drop, key=lambda entry: entry[1].step):
        try:
            store.drop(held[replica_id(key, kind)])
        except StoreError as error:  # the next time brings it up again
            logger.warning("cannot drop step %d of job %r yet: %s", key.step, key.job, error)
    store.retire_jobs({job: kept.void_below_session for job, kept in jobs.items()})
