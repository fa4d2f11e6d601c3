"""Maintenance of what one data process holds: checks, the scrub, the reports. All of it gives way to saves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from fastcheck_proto.v1 import peer_pb2

from ..config import Config
from ..counters import Counters
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..store.retention import Kept
from ..view import ViewFollower
from .inventory import Inventory
from .prune import Pruner
from .scrub import Checker, Scrubber

logger = logging.getLogger(__name__)

RESTART_S = 1.0
#: How often free memory that nobody has needed meanwhile is given back.
TRIM_S = 60.0


class Maintenance:
    """Owned by the event loop's thread.

    Args:
        executor: the threads that hash.
        busy: whether saves, copies or restores move bytes here; may be asked from any thread.
        on_pruned: told, by job, what is kept, when all else has been dropped.
    """

    def __init__(
        self,
        *,
        config: Config,
        identity: NodeLife,
        store: ReplicaStore,
        registry: RegistryClient,
        view: ViewFollower,
        counters: Counters,
        executor: Executor,
        busy: Callable[[], bool],
        on_pruned: Callable[[Mapping[str, Kept]], None],
    ) -> None:
        self._store = store
        self._view = view
        self._checker = Checker(store, executor, counters)
        self._scrubber = Scrubber(
            store, self._checker, period_s=config.scrub_period_s, budget_bytes=config.ram_budget_bytes,
            chunk_bytes=config.chunk_bytes, busy=busy,
        )  # fmt: skip
        self._inventory = Inventory(
            identity=identity, store=store, registry=registry, checker=self._checker, counters=counters,
            kept_steps=self._kept_steps,
        )  # fmt: skip
        self._pruner = Pruner(store, view, on_pruned)
        #: One check on demand at a time: they must not take all cores.
        self._verifying = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to scrub, to report and to tidy up."""
        loop = asyncio.get_running_loop()

        def condemned(held: Replica) -> None:
            loop.call_soon_threadsafe(self._inventory.lost, held)

        self._store.on_condemned = condemned
        works = (
            ("scrub", self._scrubber.run), ("inventory", self._inventory.run), ("trim", self._trim),
            ("prune", self._pruner.run),
        )  # fmt: skip
        for name, work in works:
            self._tasks.append(asyncio.create_task(_kept_going(name, work), name=name))

    async def stop(self) -> None:
        """End everything; nobody touches the store for it afterwards."""
        self._store.on_condemned = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def changed(self) -> None:
        """There is a new life of this node, or a new view."""
        self._inventory.changed()
        self._pruner.changed()

    def brought(self, shards: Sequence[Replica]) -> None:
        """A restore has brought these here."""
        self._inventory.brought(shards)

    async def verify(self, job: str, step: int | None) -> peer_pb2.VerifyReplicasResponse:
        """Check what is held of a job (empty: of all), of one step or of all, now."""
        response = peer_pb2.VerifyReplicasResponse()
        async with self._verifying:
            for held in self._store.held(job, step):
                good = await self._checker.check(held)
                if good is None:
                    continue
                response.checked += 1
                response.checked_bytes += held.manifest.bytes
                if not good:
                    response.bad.add().CopyFrom(held.key)
        return response

    def scrub_age_ms(self) -> int | None:
        """How long ago the replica that waits longest was checked; None: nothing is held."""
        return self._scrubber.age_ms()

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(TRIM_S)
            if given_back := await asyncio.to_thread(self._store.trim):
                logger.info("gave back %d bytes that nobody needed", given_back)

    def _kept_steps(self) -> dict[str, list[int]] | None:
        return self._view.kept_steps() if self._view.view.version else None


async def _kept_going(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run something that never ends; after an error, which is a defect, begin again."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("the %s begins anew after an error", name)
        await asyncio.sleep(RESTART_S)
