"""Drops what the registry does not keep any more: with each new view, and now and then.

Now and then, because a copy can arrive after the view that says that its step is not kept: of a put or a repair that
was under way, or of a load that has published what it brought. And what cannot be dropped while it is being read can
be later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ..errors import NotHeldError, OverBudgetError, StoreFullError
from ..store.manifests import replica_id
from ..store.ram_store import RamStore
from ..store.retention import Kept, what_to_drop
from ..view import ViewFollower

logger = logging.getLogger(__name__)

PRUNE_S = 5.0


class Pruner:
    """Of one data process. Owned by the event loop's thread."""

    def __init__(self, store: RamStore, view: ViewFollower) -> None:
        self._store = store
        self._view = view
        self._pruning = asyncio.Lock()

    async def prune(self) -> None:
        """Drop what the newest view does not need; before the first view nothing."""
        async with self._pruning:
            await asyncio.to_thread(prune, self._store, self._view.retention())

    async def run(self) -> None:
        """Do so now and then, until cancelled."""
        while True:
            await asyncio.sleep(PRUNE_S)
            await self.prune()


def prune(store: RamStore, jobs: Mapping[str, Kept]) -> None:
    """Drop replicas of steps that the registry no longer keeps, the oldest first: they need the newer ones. Blocks."""
    held = {shard.id: shard for shard in store.held()}
    drop = what_to_drop([(s.kind, s.key, s.manifest.session) for s in held.values()], jobs)
    for kind, key, _ in sorted(drop, key=lambda entry: entry[1].step):
        try:
            store.drop(held[replica_id(key, kind)])
        except (NotHeldError, OverBudgetError, StoreFullError) as error:
            # Older steps need its bytes, and they are being read: the next time brings it up again.
            logger.info("cannot drop step %d of job %r yet: %s", key.step, key.job, error)
