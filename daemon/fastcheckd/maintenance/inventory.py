"""Tells the registry what this node holds, when a new life begins, and what it holds no more.

A node that comes back has its bytes and no claim to them: they are the registry's again in the new life only after
they were read and compared with their digests. The newest steps go first; what the registry does not need any more is
left to retention. What was found bad here is told as soon as it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..counters import Counters
from ..errors import FastCheckdError, FencedError, NoQuorumError
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from .scrub import Checker

logger = logging.getLogger(__name__)

#: Entries that one report has at most; shards of one rank are never in different ones.
ENTRIES_MAX = 1000
#: A report goes out at least this often while replicas are checked: the registry waits for those to come.
REPORT_INTERVAL_S = 1.0
REPORT_TIMEOUT_S = 10.0
RETRY_S = 0.5
#: Losses that wait to be told; the registry's audit finds what is beyond that.
LOSSES_MAX = 10_000


class Inventory:
    """The reports of one data process. Owned by the event loop's thread.

    Args:
        kept_steps: the committed steps that the registry keeps, of each job, or None as long as that is not known.
    """

    def __init__(
        self,
        *,
        identity: NodeLife,
        store: ReplicaStore,
        registry: RegistryClient,
        checker: Checker,
        counters: Counters,
        kept_steps: Callable[[], dict[str, list[int]] | None],
    ) -> None:
        self._identity = identity
        self._store = store
        self._registry = registry
        self._checker = checker
        self._counters = counters
        self._kept_steps = kept_steps
        self._wake = asyncio.Event()
        self._life = 0
        self._reported_life = 0
        #: Held when this life began and not told yet. A first view may come from a voter that lags behind, and lack
        #: the steps that these are of: they are told when a later one names them.
        self._untold: set[tuple[object, ...]] = set()
        self._lost: dict[tuple[object, ...], rpb.InventoryEntry] = {}

    def changed(self) -> None:
        """There is a new life, or a new view."""
        self._wake.set()

    def brought(self, shards: Iterable[Replica]) -> None:
        """A restore has brought these here: an owner whose memory was lost has its bytes again."""
        self._untold.update(tuple(held.id) for held in shards)
        self._wake.set()

    def lost(self, held: Replica) -> None:
        """A replica was found bad and dropped."""
        if len(self._lost) < LOSSES_MAX and not self._has(held):
            entry = rpb.InventoryEntry(
                key=held.key, kind=pb.REPLICA_KIND_UNSPECIFIED, digest=held.manifest.digest
            )
            self._lost[tuple(held.id)] = entry
            self._wake.set()

    def _has(self, held: Replica) -> bool:
        """Whether the same bytes are here all the same, as the other kind of replica."""
        found = (self._store.find(held.key, kind) for kind in (pb.REPLICA_KIND_COPY, pb.REPLICA_KIND_OWNER))
        return any(other is not None and other.manifest.digest == held.manifest.digest for other in found)

    async def run(self) -> None:
        """Report whatever there is to report, until cancelled."""
        while True:
            self._wake.clear()
            life = self._identity.incarnation
            if life != self._life:
                self._life, self._untold = life, {tuple(held.id) for held in self._store.held()}
            kept = self._kept_steps()
            if life and kept is not None and (life != self._reported_life or self._to_tell(kept)):
                if await self._report_all(life, kept):
                    self._reported_life = life
            elif life and self._lost:
                lost, self._lost = self._lost, {}
                entries = list(lost.values())
                for first in range(0, len(entries), ENTRIES_MAX):
                    await self._send(life, entries[first : first + ENTRIES_MAX])
            else:
                await self._wake.wait()

    def _to_tell(self, kept: dict[str, list[int]]) -> list[Replica]:
        """What is held of kept steps and was not told in this life."""
        if not self._untold:
            return []
        held = self._store.held()
        self._untold &= {tuple(each.id) for each in held}
        return [
            each
            for each in held
            if tuple(each.id) in self._untold and each.key.step in kept.get(each.key.job, ())
        ]

    async def _report_all(self, life: int, kept: dict[str, list[int]]) -> bool:
        """Check and report what is held of kept steps; whether the registry knows it all now."""
        loop = asyncio.get_running_loop()
        wanted = self._to_tell(kept)
        sent_at = loop.time()
        batch: list[rpb.InventoryEntry] = []
        told: set[tuple[object, ...]] = set()
        adopted = total = 0
        for group in _by_rank(wanted):
            verdicts = [True if held.verified_at_ms else await self._checker.check(held) for held in group]
            checked = [held for held, good in zip(group, verdicts, strict=True) if good]
            if (
                None not in verdicts
            ):  # otherwise another replica took its place meanwhile: all of them once more
                told |= {tuple(held.id) for held in group}
            entries = [
                rpb.InventoryEntry(key=held.key, kind=held.kind, digest=held.manifest.digest)
                for held in checked
            ]
            if batch and (
                len(batch) + len(entries) > ENTRIES_MAX or loop.time() > sent_at + REPORT_INTERVAL_S
            ):
                if (count := await self._send(life, batch)) is None:
                    return False
                adopted, batch, sent_at = adopted + count, [], loop.time()
            batch += entries
            total += len(entries)
        # The last one is empty: it says that this was all.
        for last in ([batch] if batch else []) + [[]]:
            if (count := await self._send(life, last)) is None:
                return False
            adopted += count
        self._untold -= told
        if total:
            logger.info("of %d replicas here the registry counts %d again in this life", total, adopted)
        return True

    async def _send(self, life: int, entries: Sequence[rpb.InventoryEntry]) -> int | None:
        """Report until the registry answers; None when this life is over, so that all of it is told again."""
        request = rpb.ReportInventoryRequest(
            node=pb.NodeRef(node_id=self._identity.node_id, incarnation=life), entries=entries
        )
        while self._identity.incarnation == life:
            try:
                response = await self._registry.report_inventory(request, timeout_s=REPORT_TIMEOUT_S)
            except FencedError as error:
                logger.info("the registry does not know this life any more: %s", error)
                await asyncio.sleep(RETRY_S)  # the agent is about to begin another one
            except NoQuorumError as error:
                logger.info("cannot report what is here yet: %s", error)
                await asyncio.sleep(RETRY_S)
            except FastCheckdError as error:
                logger.error("the registry refused the report of what is here: %s", error)
                return 0
            else:
                self._counters.add("inventory_reported", len(entries))
                return response.adopted
        return None


def _by_rank(held: Iterable[Replica]) -> list[list[Replica]]:
    """Replicas of one job, step, rank and kind together; the newest steps first."""
    groups: dict[tuple[object, ...], list[Replica]] = {}
    for shard in sorted(held, key=lambda shard: (-shard.key.step, shard.id)):
        key = (shard.key.step, shard.key.job, shard.key.rank, shard.kind)
        groups.setdefault(key, []).append(shard)
    return list(groups.values())
