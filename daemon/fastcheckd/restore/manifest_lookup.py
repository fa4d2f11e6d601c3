"""What a committed shard's holders say of it: which chunks it has, and where its rank's header lies.

That they tell the truth about the chunks' digests is proved by the committed digest. Nothing of the shard's bytes is
read here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from fastcheck_proto.conventions import HEADER_BYTES_MAX
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..chunks import ChunkTable
from ..errors import CorruptError, FastCheckdError, LostError
from ..store.replica_store import ReplicaStore
from ..tasks import settled
from ..transfer.fetch import Fetcher
from .plan import ShardPlan, other_sources
from .shard_loader import ASK_AGAIN_AFTER_S, ShardLoader

logger = logging.getLogger(__name__)

Description = tuple[pb.ShardManifest, ChunkTable]


class ManifestLookup:
    """Asks this node's own store, else all holders at once. Used on the event loop."""

    def __init__(self, node_id: str, store: ReplicaStore, fetcher: Fetcher, puller: ShardLoader) -> None:
        self._node_id = node_id
        self._store = store
        self._fetcher = fetcher
        self._puller = puller

    async def describe(
        self, key: pb.ShardKey, rank: rpb.RankRecord, plan: ShardPlan, nodes: Mapping[str, rpb.NodeRecord]
    ) -> Description:
        """The manifest of a shard of a rank, and its chunks.

        Raises:
            LostError: nobody who has the shard can be found.
        """
        told: list[str] = []
        for kind in (pb.REPLICA_KIND_OWNER, pb.REPLICA_KIND_COPY):
            held = self._store.find(key, kind)
            if held is None or held.manifest.digest != plan.record.digest:
                continue
            try:
                _check(held.manifest, rank, plan.record, "this node")
            except CorruptError as error:
                told.append(str(error))
            else:
                return held.manifest, held.chunks
        for sources in (plan.sources[: plan.at_once], plan.sources[plan.at_once :]):
            if (found := await self._first(sources, key, rank, plan, told)) is not None:
                return found
        others = await self._puller.who_else_has(
            key, plan.record.digest, other_sources(plan, nodes, self._node_id)
        )
        if (found := await self._first(others, key, rank, plan, told)) is not None:
            return found
        if plan.sources:
            # One that is just starting refuses connections for a moment.
            await asyncio.sleep(ASK_AGAIN_AFTER_S)
            if (found := await self._first(plan.sources, key, rank, plan, told)) is not None:
                return found
        raise LostError(
            f"shard {key.shard} of rank {key.rank}, step {key.step} of job {key.job!r}: no good copy left "
            f"({'; '.join(dict.fromkeys(told)) or 'none of its holders is known'})"
        )

    async def _first(
        self,
        sources: Sequence[pb.Holder],
        key: pb.ShardKey,
        rank: rpb.RankRecord,
        plan: ShardPlan,
        told: list[str],
    ) -> Description | None:
        """The first good answer; None when there is none."""
        asking = {
            asyncio.create_task(self._ask(source, key, rank, plan, told), name="describe")
            for source in sources
        }
        try:
            while asking:
                answered, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in answered:
                    if (found := task.result()) is not None:
                        return found
        finally:
            for task in asking:
                task.cancel()
            await settled(asking)
        return None

    async def _ask(
        self, source: pb.Holder, key: pb.ShardKey, rank: rpb.RankRecord, plan: ShardPlan, told: list[str]
    ) -> Description | None:
        record = plan.record
        try:
            manifest, table = await self._fetcher.describe(source, key, record.digest, record.bytes)
            _check(manifest, rank, record, f"node {source.node.node_id}")
        except FastCheckdError as error:
            # Counted when its chunks are asked for: here it was one of several.
            logger.info("%s does not describe shard %d: %s", source.node.node_id, key.shard, error)
            told.append(str(error))
            return None
        return manifest, table


def _check(manifest: pb.ShardManifest, rank: rpb.RankRecord, record: rpb.ShardRecord, whose: str) -> None:
    """Raise CorruptError unless a manifest places its shard as the commit does, and a header within the state."""
    if (manifest.offset, manifest.bytes) != (record.offset, record.bytes):
        raise CorruptError(f"{whose} places shard {record.shard} of rank {rank.rank} elsewhere in its state")
    end = manifest.header_offset + manifest.header_bytes
    if manifest.state_bytes != rank.state_bytes or end > rank.state_bytes:
        raise CorruptError(f"{whose} describes the state of rank {rank.rank} wrongly")
    if manifest.header_bytes > HEADER_BYTES_MAX:
        raise CorruptError(f"{whose} speaks of a header of {manifest.header_bytes} bytes")
