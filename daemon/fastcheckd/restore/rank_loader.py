"""Shards of one rank's state brought into memory, from wherever they are: what loads and reads have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError
from ..registry.client import RegistryClient
from ..store.replica_store import ReplicaStore
from ..tasks import settled
from ..transfer.client import PeerClient
from ..transfer.fetch import Fetcher
from ..transfer.reader import FairTurns, FetchProgress
from ..transfer.scheduler import WantedChunks
from ..view import ViewFollower
from .manifest_lookup import ManifestLookup
from .plan import ShardPlan
from .shard_loader import ShardLoader, WantedShard
from .shared_states import Bytes
from .tally import Tally

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 2.0


class RankLoader:
    """For all loads and reads of one data process, which share the link equally. Used on the event loop."""

    def __init__(
        self,
        config: Config,
        store: ReplicaStore,
        registry: RegistryClient,
        client: PeerClient,
        fetcher: Fetcher,
        view: ViewFollower,
        counters: Counters,
    ) -> None:
        self._registry = registry
        self._view = view
        self._puller = ShardLoader(config, store, client, fetcher, counters)
        self._turns = FairTurns()
        self.describer = ManifestLookup(config.node_id, store, fetcher, self._puller)

    async def gather(
        self,
        job: str,
        step: int,
        rank: int,
        plans: Sequence[ShardPlan],
        into: Bytes,
        nodes: Mapping[str, rpb.NodeRecord],
        tally: Tally,
        parts: Mapping[int, WantedChunks] | None = None,
    ) -> list[pb.ShardManifest]:
        """Get all these shards of a rank, or `parts` of some, into their places in `into`; their manifests.

        Raises:
            LostError: no good copy of one is left.
        """
        wanted = parts or {}
        numbers = [plan.record.shard for plan in plans]
        progress = FetchProgress(numbers, self._turns, tally.came, parts=wanted)

        def shard(record: rpb.ShardRecord, plan: ShardPlan) -> WantedShard:
            key = pb.ShardKey(job=job, step=step, rank=rank, shard=record.shard)
            place = into.view[record.offset : record.offset + record.bytes]
            return WantedShard(key, plan, place, wanted.get(record.shard))

        with self._turns.taking_part():
            pulls = [
                asyncio.create_task(self._puller.pull(shard(p.record, p), nodes, progress, tally))
                for p in plans
            ]
            try:
                return await asyncio.gather(*pulls)
            finally:
                # One that failed, or a caller that is gone, ends all: the segment is given back after this.
                for task in pulls:
                    task.cancel()
                await settled(pulls)

    async def nodes(self) -> dict[str, rpb.NodeRecord]:
        """The membership by node id: the leader's if it answers, else the newest seen."""
        try:
            view = await self._registry.view(timeout_s=LIST_TIMEOUT_S)
        except FastCheckdError as error:
            logger.info("using the last view seen: %s", error)
            view = self._view.members()
        return {node.node_id: node for node in view.nodes}
