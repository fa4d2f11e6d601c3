"""One shard from wherever it is to its place: from this node's own replicas, else from all its sources at once.

All connections of all shards of a load take their chunks from one `Progress`. A source that fails, or has ended for
being slow, leaves what it did not bring to the others; when nobody is left, nodes that the commit does not name are
asked, and last, once more, those that did not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..chunks import ChunkTable
from ..config import Config
from ..counters import Counters
from ..errors import CorruptError, FastCheckdError, LostError, NotHeldError
from ..store.replica_store import ReplicaStore
from ..tasks import settled, to_its_end
from ..transfer.client import PeerClient
from ..transfer.fetch import Failures, Fetcher
from ..transfer.frames import CHUNK_BYTES_MIN
from ..transfer.reader import FetchProgress
from ..transfer.scheduler import WantedChunks
from ..transfer.target import MemoryTarget
from .plan import ShardPlan, other_sources
from .tally import Tally

logger = logging.getLogger(__name__)

R = TypeVar("R")

LIST_TIMEOUT_S = 2.0
#: A node that is just starting refuses connections for a moment, and a channel that saw it does not try again for a
#: second. Before a shard is called lost, those that were not reached are asked once more after this pause.
ASK_AGAIN_AFTER_S = 1.5


@dataclass(frozen=True)
class WantedShard:
    """A shard that is to be brought into memory; see `transfer.fetch.Wanted`."""

    key: pb.ShardKey
    plan: ShardPlan
    into: memoryview
    #: None: all of it.
    part: WantedChunks | None = None

    purpose = peer_pb2.PURPOSE_RESTORE

    @property
    def digest(self) -> bytes:
        """As committed."""
        return self.plan.record.digest

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.plan.record.bytes

    @property
    def chunk_count(self) -> int:
        """About how many chunks are wanted."""
        return -(-self.bytes // CHUNK_BYTES_MIN) if self.part is None else len(self.part.chunks)

    def bases(self) -> list[peer_pb2.Base]:
        """None: the memory holds nothing yet."""
        return []

    async def target(
        self, manifest: pb.ShardManifest, table: ChunkTable, base_step: int | None
    ) -> MemoryTarget:
        """The memory."""
        return MemoryTarget(self.into, table)

    def missing(self) -> None:
        """All, or `part`."""

    @property
    def wanted_bytes(self) -> int:
        """How much of it is to be brought."""
        return self.plan.record.bytes if self.part is None else self.part.bytes


class ShardLoader:
    """Brings shards to this node. Used on the event loop."""

    def __init__(
        self, config: Config, store: ReplicaStore, client: PeerClient, fetcher: Fetcher, counters: Counters
    ) -> None:
        self._config = config
        self._store = store
        self._client = client
        self._fetcher = fetcher
        self._counters = counters

    async def pull(
        self, shard: WantedShard, nodes: Mapping[str, rpb.NodeRecord], progress: FetchProgress, tally: Tally
    ) -> pb.ShardManifest:
        """Get one shard into its place, checked; its manifest.

        Raises:
            LostError: no good copy is left, or not of every chunk.
        """
        manifest = await self._copy_local(shard)
        if manifest is not None:
            tally.local_bytes += shard.wanted_bytes
            return manifest
        failures = Failures()
        plan = shard.plan
        known = plan.sources
        for sources in (known[: plan.at_once], known[plan.at_once :]):
            if (manifest := await self._read(shard, sources, progress, tally, failures)) is not None:
                return manifest
        others = await self.who_else_has(
            shard.key, shard.digest, other_sources(plan, nodes, self._config.node_id)
        )
        if (manifest := await self._read(shard, others, progress, tally, failures)) is not None:
            return manifest
        if once_more := list(failures.unreached):
            await asyncio.sleep(ASK_AGAIN_AFTER_S)
            if (manifest := await self._read(shard, once_more, progress, tally, failures)) is not None:
                return manifest
        key = shard.key
        raise LostError(
            f"shard {key.shard} of rank {key.rank}, step {key.step} of job {key.job!r}: no good copy left "
            f"({'; '.join(dict.fromkeys(failures.told)) or 'none of its holders is known'})"
        )

    async def _copy_local(self, shard: WantedShard) -> pb.ShardManifest | None:
        for kind in (pb.REPLICA_KIND_OWNER, pb.REPLICA_KIND_COPY):
            held = self._store.find(shard.key, kind)
            if held is None or held.manifest.digest != shard.digest:
                continue
            part = shard.part
            if part is not None and held.chunks != part.table:
                continue
            chunks = None if part is None else part.chunks
            try:
                await to_its_end(partial(self._store.copy_to, held, shard.into, chunks))
            except (NotHeldError, CorruptError) as error:
                logger.info("not from this node's own memory: %s", error)
                continue
            return held.manifest
        return None

    async def _read(
        self,
        shard: WantedShard,
        sources: Iterable[pb.Holder],
        progress: FetchProgress,
        tally: Tally,
        failures: Failures,
    ) -> pb.ShardManifest | None:
        """Fetch a shard from several peers together; its manifest, or None when they do not have all of it."""

        def bad_copy() -> None:
            tally.bad_copies += 1

        manifest = await self._fetcher.fetch(shard, sources, progress, failures, on_bad_copy=bad_copy)
        if manifest is not None:
            self._counters.add("shards_fetched")
        return manifest

    async def who_else_has(
        self, key: pb.ShardKey, digest: bytes, nodes: Sequence[pb.Holder]
    ) -> list[pb.Holder]:
        """Those of some nodes that say that they have a shard with this digest."""

        async def has(node: pb.Holder) -> bool:
            try:
                replicas = await self._client.list_replicas(
                    node.node.node_id, node.data_address, key.job, key.step, LIST_TIMEOUT_S
                )
            except FastCheckdError:
                return False  # it was only a chance; the named holders have been reported already
            return any(
                r.key.rank == key.rank and r.key.shard == key.shard and r.digest == digest for r in replicas
            )

        answers = await asyncio.gather(*(has(n) for n in nodes))
        return [n for n, yes in zip(nodes, answers, strict=True) if yes]


async def together(works: Sequence[Callable[[], Awaitable[R]]], at_once: int) -> list[R]:
    """The results of all works, so many of them under way at a time; the first failure ends the others."""
    turns = asyncio.Semaphore(at_once)

    async def in_turn(work: Callable[[], Awaitable[R]]) -> R:
        async with turns:
            return await work()

    tasks = [asyncio.ensure_future(in_turn(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await settled(tasks)
