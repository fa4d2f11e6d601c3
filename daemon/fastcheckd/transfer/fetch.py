"""Shards on their way to this node: the one operation behind replication, repair, restore and range reads.

Each source of a shard is read over a few connections; all of them take their chunks from one `Scheduler`. A source that
fails, or is ended for being slow, leaves what it did not bring to the others. Every chunk is checked against the
manifest, and the manifest against the digest that was committed or offered, before it counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2

from ..chunks import ChunkTable
from ..config import Config
from ..counters import Counters
from ..digests import DIGEST_BYTES, shard_digest
from ..errors import CorruptError, FrameError, InvalidRequestError, NotHeldError, PeerError
from ..tasks import settled
from .channel import Channel
from .checks import chunk_table
from .client import PeerClient, name_of, shown
from .codec_pool import CodecPool
from .connections import Connections, connections
from .frames import Codec, Hello
from .lane_meter import LaneMeter
from .lane_tls import LaneTls
from .pacing import ChunkGate, passing
from .reader import ChunkReceiver, FetchProgress, SourceReader
from .target import Target

logger = logging.getLogger(__name__)

#: Nodes that one shard is read from at a time; further ones take the place of those that fail.
SOURCES_AT_ONCE = 4
#: One that could not be reached while others are read is tried once more after this pause.
TRY_AGAIN_AFTER_S = 0.5


class _CutOtherwiseError(PeerError):
    """A node describes a shard as cut in another way than one that it is being read from."""


class Wanted(Protocol):
    """A shard that is to be fetched, and where it goes."""

    @property
    def key(self) -> pb.ShardKey:
        """Which."""

    @property
    def digest(self) -> bytes:
        """As committed or offered."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def purpose(self) -> peer_pb2.Purpose.ValueType:
        """What it is fetched for."""

    @property
    def chunk_count(self) -> int:
        """About how many chunks will be fetched."""

    def bases(self) -> list[peer_pb2.Base]:
        """Steps that chunks may be encoded against, the best first."""

    async def target(self, manifest: pb.ShardManifest, table: ChunkTable, base_step: int | None) -> Target:
        """Where the chunks go; made at the first call, with that base if it has one.

        Raises:
            FastCheckdError: there is no room, or it may not be held here.
        """

    def missing(self) -> Sequence[int] | None:
        """Once there is a target: the chunks that are not here; None: what was asked for beforehand."""


@dataclass
class Failures:
    """Which sources were asked for a shard in vain."""

    #: What each of them said.
    told: list[str] = field(default_factory=list)
    unreached: list[pb.Holder] = field(default_factory=list)


class Fetcher:
    """Fetches shards for one data process. Used on its event loop.

    Args:
        executor: lends the threads that move the bytes: `config.lane_streams` for each source, mostly waiting for
            the network. What is beyond its size waits for its turn.
        pool: decodes; with `codec: never` sources are asked for raw chunks.
        on_bad_copy: is called when a source was found bad, gone or failing, once for each shard.
    """

    def __init__(
        self,
        config: Config,
        client: PeerClient,
        counters: Counters,
        executor: Executor,
        pool: CodecPool,
        *,
        meter: LaneMeter | None = None,
        tls: LaneTls | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._counters = counters
        self._executor = executor
        self._pool = pool
        self._meter = meter or LaneMeter()
        self._tls = tls

    async def fetch(
        self,
        wanted: Wanted,
        sources: Iterable[pb.Holder],
        progress: FetchProgress,
        failures: Failures,
        *,
        streams: int | None = None,
        gate: ChunkGate | None = None,
        on_bad_copy: Callable[[], None] = lambda: None,
    ) -> pb.ShardManifest | None:
        """Get a shard from several nodes together; its manifest, or None when they do not have all of it.

        When this returns, raises or is cancelled, nobody writes to the target for it any more.

        Args:
            progress: of the load or copy that the shard belongs to.
            streams: connections to all sources together, at most.
            gate: may hold up each chunk.

        Raises:
            FastCheckdError: what `wanted.target` raises, or its target when it has no room for a chunk.
        """
        number = wanted.key.shard
        waiting = deque(sources)
        #: They cut the shard otherwise than one that was read: whoever was wrong, these are tried when that has ended.
        otherwise: deque[pb.Holder] = deque()
        at_once = min(len(waiting), SOURCES_AT_ONCE)
        each = max(1, (streams or self._config.lane_streams) // max(1, at_once))
        reading: set[asyncio.Task[None]] = set()
        try:
            while waiting or reading:
                while waiting and len(reading) < at_once:
                    read = self._read(
                        wanted, waiting.popleft(), progress, failures, each, gate, on_bad_copy, otherwise
                    )
                    reading.add(asyncio.create_task(read, name="read"))
                ended, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                if (manifest := progress.manifest(number)) is not None:
                    return manifest
                if otherwise and not waiting and not reading:
                    waiting, otherwise = otherwise, deque(maxlen=0)
        finally:
            for task in reading:
                task.cancel()
            await settled(reading)
        return None

    async def describe(
        self, source: pb.Holder, key: pb.ShardKey, digest: bytes, shard_bytes: int
    ) -> tuple[pb.ShardManifest, ChunkTable]:
        """What a node says of the shard with that key and digest, proved by the digest, and how it is cut.

        Raises:
            NotHeldError: the node does not have this shard with this digest.
            CorruptError: its digests are not the committed ones.
            PeerError: it cannot be reached, or refused.
        """
        request = peer_pb2.OpenRequest(cluster_id=self._config.cluster_id, key=key, digest=digest)
        opened = await self._client.open(source, request)
        return opened.manifest, check_manifest(opened.manifest, key, digest, shard_bytes, name_of(source))

    async def _read(
        self,
        wanted: Wanted,
        source: pb.Holder,
        progress: FetchProgress,
        failures: Failures,
        streams: int,
        gate: ChunkGate | None,
        on_bad_copy: Callable[[], None],
        otherwise: deque[pb.Holder],
    ) -> None:
        """Read what one node is asked for; its failure is counted and noted.

        One that cannot be reached, while others are read, is tried once more beside them: its link may just be full.
        One that cuts the shard in another way than those is left to `otherwise`, if that takes it.
        """
        number, node_id = wanted.key.shard, source.node.node_id
        is_bad = False

        def read() -> Coroutine[Any, Any, None]:
            return self._read_once(wanted, source, progress, streams, gate)

        try:
            try:
                await read()
            except _CutOtherwiseError:
                if otherwise.maxlen == 0:
                    raise
                otherwise.append(source)
                return
            except PeerError as error:
                if progress.was_too_slow(number, node_id) or not progress.is_read(number):
                    raise
                logger.info("%s: %s; trying it once more", shown(wanted.key), error)
                await asyncio.sleep(TRY_AGAIN_AFTER_S)
                await read()
        except CorruptError as error:
            is_bad = True
            failures.told.append(str(error))
        except (NotHeldError, PeerError) as error:
            failures.told.append(str(error))
            if isinstance(error, PeerError):
                failures.unreached.append(source)
            if progress.was_too_slow(number, node_id):
                logger.warning("%s: node %s was too slow", shown(wanted.key), node_id)
            else:
                is_bad = True
                self._counters.add("copies_missing")
                logger.warning("%s: %s; others bring what it did not", shown(wanted.key), error)
        finally:
            # Also when it was ended because the others have brought all by now.
            if bad := progress.bad_chunks(number, node_id):
                is_bad = True
                failures.told.append(f"node {node_id} has sent {bad} bad chunks")
            if is_bad:
                on_bad_copy()

    async def _read_once(
        self, wanted: Wanted, source: pb.Holder, progress: FetchProgress, streams: int, gate: ChunkGate | None
    ) -> None:
        """Read a shard from one node until nothing more is wanted from it."""
        whom = name_of(source)
        bad: list[int] = []
        try:
            async with connections(self._executor, min(streams, wanted.chunk_count)) as opened:
                answer, target = await self._open(wanted, source, opened.size)
                manifest, table = answer.manifest, ChunkTable.of(answer.manifest)
                if not progress.describe(wanted.key.shard, manifest, table, wanted.missing()):
                    raise _CutOtherwiseError(
                        f"{whom} cuts shard {shown(wanted.key)} into other chunks than another holder"
                    )
                if progress.manifest(wanted.key.shard) is not None:
                    return
                receiver = ChunkReceiver(table, manifest.chunk_digests, target, self._pool, self._counters)
                reader = progress.source(wanted.key.shard, source.node.node_id)

                def work(channel: Channel, ticket: bytes) -> None:
                    with passing(gate, channel), reader.reading(channel.end, bad) as asker:
                        _receive(channel, ticket, receiver, asker, gate)

                await self._run(opened, source, answer.tickets, work)
        except CorruptError as error:
            bad.append(-1)
            raise CorruptError(f"{whom} has a bad copy of shard {shown(wanted.key)}: {error}") from None
        finally:
            if bad:
                self._counters.add("corrupt_reported")
                logger.error("%s has a bad copy of shard %s", whom, shown(wanted.key))
                self._client.report_corrupt(source, wanted.key, wanted.digest)

    async def _open(
        self, wanted: Wanted, source: pb.Holder, streams: int
    ) -> tuple[peer_pb2.OpenResponse, Target]:
        """Open the replica, and have a place for its chunks."""
        request = peer_pb2.OpenRequest(
            cluster_id=self._config.cluster_id,
            key=wanted.key,
            digest=wanted.digest,
            streams=streams,
            purpose=wanted.purpose,
            bases=wanted.bases(),
            accept_encoded=self._config.codec != "never",
            reader=self._config.node_id,
        )
        whom = name_of(source)
        answer = await self._client.open(source, request)
        table = check_manifest(answer.manifest, wanted.key, wanted.digest, wanted.bytes, whom)
        base_step = answer.base_step if answer.HasField("base_step") else None
        if base_step is not None and all(base.step != base_step for base in request.bases):
            raise PeerError(f"{whom} chose step {base_step} as base, which was not named")
        target = await wanted.target(answer.manifest, table, base_step)
        if target.lean or target.base_step != base_step:
            # Room turned out to be short, or another source's base is the one that is used.
            request.lean = target.lean
            del request.bases[:]
            request.bases.extend(base for base in wanted.bases() if base.step == target.base_step)
            answer = await self._client.open(source, request)
            check_manifest(answer.manifest, wanted.key, wanted.digest, wanted.bytes, whom)
        return answer, target

    async def _run(
        self,
        opened: Connections,
        source: pb.Holder,
        tickets: Sequence[bytes],
        work: Callable[[Channel, bytes], None],
    ) -> None:
        """Let each thread work over a connection of its own."""

        def connection(ticket: bytes) -> None:
            with opened.channel(
                source.lane_address,
                name_of(source),
                self._config.transfer_timeout_s,
                self._config.lane_congestion,
                source=self._config.effective_lane_host,
                meter=self._meter,
                tls=self._tls,
                node_id=source.node.node_id,
            ) as channel:
                work(channel, ticket)

        await opened.run([partial(connection, ticket) for ticket in tickets])


def _receive(
    channel: Channel, ticket: bytes, receiver: ChunkReceiver, asker: SourceReader, gate: ChunkGate | None
) -> None:
    """One connection's work: ask for chunks and put them in their places, until nothing more is wanted from it.

    A chunk that is not for its place any more is received and thrown away. A bad one is told to `asker`.

    Raises:
        CorruptError: `asker` gives the source up.
        FrameError, PeerError: see `Channel`.
        StoreError: the target has no room.
    """
    due: set[int] = set()
    with contextlib.ExitStack() as stack:
        buffers = stack.enter_context(receiver.buffers())
        channel.send_hello(Hello(ticket))
        while (run := asker.next(channel.check)) is not None:
            if run:
                channel.send_want(run)
                due.update(run)
            header = channel.receive_header()
            receiver.check(header)
            index = header.chunk
            if index not in due:
                raise FrameError(f"chunk {index} was not asked for")
            if gate is not None:
                gate.wait(channel, header.encoded_bytes, channel.check)
            due.discard(index)
            in_place = asker.wanted(index)
            good = receiver.receive(channel, header, buffers, in_place=in_place)
            if good:
                asker.got(index, header.encoded_bytes)
            else:
                asker.came_bad(index, encoded=header.codec == Codec.ENCODED)
        if not due:
            channel.send_end()


def check_manifest(
    manifest: pb.ShardManifest, key: pb.ShardKey, digest: bytes, shard_bytes: int, whom: str
) -> ChunkTable:
    """The chunks of a shard as somebody else describes it.

    Raises:
        CorruptError: the manifest is not proved by the digest, or does not describe the shard.
    """
    if manifest.key != key or shard_digest(manifest.chunk_digests) != digest or manifest.digest != digest:
        raise CorruptError(f"the chunk digests of {whom} are not those of the committed digest")
    try:
        table = chunk_table(manifest)
    except InvalidRequestError as error:
        raise CorruptError(f"{whom} describes the shard wrongly: {error}") from None
    if manifest.bytes != shard_bytes or len(manifest.chunk_digests) != len(table) * DIGEST_BYTES:
        raise CorruptError(f"{whom} speaks of {manifest.bytes} bytes, the shard has {shard_bytes}")
    return table
