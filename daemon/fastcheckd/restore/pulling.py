"""One shard from wherever it is to its place: from this node's own replicas, else from all its sources at once.

All connections of all shards of a load take their chunks from one `Gathering`. A source that fails, or has ended for
being slow, leaves what it did not bring to the others; when nobody is left, nodes that the commit does not name are
asked, and last, once more, those that did not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..counters import Counters
from ..errors import CorruptError, FastCheckdError, LostError, NotHeldError, PeerError
from ..store.ram_store import RamStore
from ..tasks import settled, to_its_end
from ..transfer.peer_client import PeerClient
from .gathering import Gathering
from .plan import ShardPlan, other_sources
from .sharing import Part
from .tally import Tally

logger = logging.getLogger(__name__)

R = TypeVar("R")

LIST_TIMEOUT_S = 2.0
#: Nodes that one shard is read from at a time; further ones take the place of those that fail.
SOURCES_AT_ONCE = 4
#: A node that is just starting refuses connections for a moment, and a channel that saw it does not try again for a
#: second. Before a shard is called lost, those that were not reached are asked once more after this pause.
ASK_AGAIN_AFTER_S = 1.5
#: The same for one that could not be reached while others are read.
TRY_AGAIN_AFTER_S = 0.5


@dataclass
class _Hunt:
    """Who was asked for a shard in vain."""

    #: What each of them said.
    told: list[str] = field(default_factory=list)
    unreached: list[pb.Holder] = field(default_factory=list)


@dataclass(frozen=True)
class Shard:
    """A shard that is to be brought."""

    key: pb.ShardKey
    plan: ShardPlan
    into: memoryview
    #: None: all of it.
    part: Part | None = None

    @property
    def digest(self) -> bytes:
        """As committed."""
        return self.plan.record.digest

    @property
    def wanted_bytes(self) -> int:
        """How much of it is to be brought."""
        return self.plan.record.bytes if self.part is None else self.part.bytes


class Puller:
    """Brings shards to this node. Used on the event loop."""

    def __init__(self, config: Config, store: RamStore, peers: PeerClient, counters: Counters) -> None:
        self._config = config
        self._store = store
        self._peers = peers
        self._counters = counters

    async def pull(
        self, shard: Shard, nodes: Mapping[str, rpb.NodeRecord], gathering: Gathering, tally: Tally
    ) -> pb.ShardManifest:
        """Get one shard into its place, checked; its manifest.

        Raises:
            LostError: no good copy is left, or not of every chunk.
        """
        manifest = await self._copy_local(shard)
        if manifest is not None:
            tally.local_bytes += shard.wanted_bytes
            return manifest
        hunt = _Hunt()
        plan = shard.plan
        known = plan.sources
        for sources in (known[: plan.at_once], known[plan.at_once :]):
            if (manifest := await self._read(shard, sources, gathering, tally, hunt)) is not None:
                return manifest
        others = await self.who_else_has(
            shard.key, shard.digest, other_sources(plan, nodes, self._config.node_id)
        )
        if (manifest := await self._read(shard, others, gathering, tally, hunt)) is not None:
            return manifest
        if once_more := list(hunt.unreached):
            await asyncio.sleep(ASK_AGAIN_AFTER_S)
            if (manifest := await self._read(shard, once_more, gathering, tally, hunt)) is not None:
                return manifest
        key = shard.key
        raise LostError(
            f"shard {key.shard} of rank {key.rank}, step {key.step} of job {key.job!r}: no good copy left "
            f"({'; '.join(dict.fromkeys(hunt.told)) or 'none of its holders is known'})"
        )

    async def _copy_local(self, shard: Shard) -> pb.ShardManifest | None:
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
        shard: Shard,
        sources: Iterable[pb.Holder],
        gathering: Gathering,
        tally: Tally,
        hunt: _Hunt,
    ) -> pb.ShardManifest | None:
        """Read a shard from several peers together; its manifest, or None when they do not have all of it."""
        waiting = deque(sources)
        at_once = min(len(waiting), SOURCES_AT_ONCE)
        streams = max(1, self._config.lane_streams // max(1, at_once))
        if shard.part is not None:
            streams = min(streams, len(shard.part.chunks))
        number = shard.key.shard
        reading: set[asyncio.Task[None]] = set()
        try:
            while waiting or reading:
                while waiting and len(reading) < at_once:
                    source = waiting.popleft()
                    work = self._read_from(source, shard, gathering, tally, hunt, streams)
                    reading.add(asyncio.create_task(work, name="read"))
                ended, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                if (manifest := gathering.manifest(number)) is not None:
                    self._counters.add("shards_fetched")
                    return manifest
        finally:
            # Nobody may write to the memory any more when this returns.
            for task in reading:
                task.cancel()
            await settled(reading)
        return None

    async def _read_from(
        self,
        source: pb.Holder,
        shard: Shard,
        gathering: Gathering,
        tally: Tally,
        hunt: _Hunt,
        streams: int,
    ) -> None:
        """Read what one peer is asked for; its failure is counted and noted in `hunt`.

        One that cannot be reached, while others read, is tried once more beside them: its link may just be full.
        """
        number, name = shard.key.shard, source.node.node_id
        is_bad = False

        def read() -> Coroutine[Any, Any, None]:
            part = gathering.source(number, name)
            return self._peers.read_shard(source, shard.key, shard.digest, shard.into, part, streams=streams)

        try:
            try:
                await read()
            except PeerError as error:
                if gathering.was_too_slow(number, name) or not gathering.is_read(number):
                    raise
                logger.info("%s: %s; trying it once more", _shown(shard.key), error)
                await asyncio.sleep(TRY_AGAIN_AFTER_S)
                await read()
        except CorruptError as error:
            is_bad = True
            hunt.told.append(str(error))
        except (NotHeldError, PeerError) as error:
            hunt.told.append(str(error))
            if isinstance(error, PeerError):
                hunt.unreached.append(source)
            if gathering.was_too_slow(number, name):
                logger.warning("%s: node %s was too slow", _shown(shard.key), name)
            else:
                is_bad = True
                self._counters.add("copies_missing")
                logger.warning("%s: %s; others bring what it did not", _shown(shard.key), error)
        finally:
            # Also when it was ended because the others have brought all by now.
            if bad := gathering.bad_chunks(number, name):
                is_bad = True
                hunt.told.append(f"node {name} has sent {bad} bad chunks")
            tally.bad_copies += is_bad

    async def who_else_has(
        self, key: pb.ShardKey, digest: bytes, nodes: Sequence[pb.Holder]
    ) -> list[pb.Holder]:
        """Those of some nodes that say that they have a shard with this digest."""

        async def has(node: pb.Holder) -> bool:
            try:
                replicas = await self._peers.list_replicas(
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


def _shown(key: pb.ShardKey) -> str:
    return f"{key.job}/{key.step}/{key.rank}/{key.shard}"
