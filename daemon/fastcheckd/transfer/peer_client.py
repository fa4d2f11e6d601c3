"""Putting a shard on another node and getting one from there: the asking side of every transfer.

Control goes over gRPC, bytes over the lane, from and to the memory that the caller gives. Which peer,
which shard and what to do about a failure are the saving and restore rooms' matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

from ..chunks import ChunkTable
from ..config import Config
from ..counters import Counters
from ..dialer import Dialer
from ..digests import DIGEST_BYTES, shard_digest
from ..errors import CorruptError, FastCheckdError, InvalidRequestError, PeerError
from .codec_pool import CodecPool
from .frames import ON_DEMAND, TICKET_BYTES, Hello
from .lane import Lane
from .lane_client import ChunkAsker, ChunkGate, get_asked, get_stream, put_stream
from .lane_meter import LaneMeter
from .lane_tls import LaneTls
from .peer_calls import PeerCalls
from .put_checks import chunk_table
from .put_pacing import PutPacing
from .put_tally import PutOutcome, PutTally
from .shard_source import ShardSource
from .stream_crew import LoopProgress, StreamCrew, hired

logger = logging.getLogger(__name__)

#: A holder that has to touch fresh memory for the copy is given this much time for it.
_FRESH_MEMORY_BYTES_PER_S = 200_000_000
_ABORT_TIMEOUT_S = 2.0
_REPORT_TIMEOUT_S = 5.0


class ShardDesk(Protocol):
    """One holder's part in bringing a shard that several may be read for."""

    def describe(self, manifest: pb.ShardManifest, table: ChunkTable) -> bool:
        """What the holder says of the shard, proved by its digest; False if it is cut in another way."""

    def reader(self, end: Callable[[], None], bad: list[int]) -> AbstractContextManager[ChunkAsker]:
        """In the thread of a connection, while it reads. `end` makes it fail soon; bad chunks are noted in `bad`."""


class PeerClient(PeerCalls):
    """Speaks to the data processes of other nodes. Used on one event loop.

    `executor` lends the threads that hash and move the bytes: `config.lane_streams` for each
    transfer, mostly waiting for the network. Transfers beyond its size wait for their turn. `pool` decodes what is
    read; without it, and with `codec: never`, holders are asked for raw chunks.
    """

    def __init__(
        self,
        config: Config,
        counters: Counters,
        executor: Executor,
        pool: CodecPool | None = None,
        *,
        meter: LaneMeter | None = None,
        pacing: PutPacing | None = None,
        tls: LaneTls | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        super().__init__(config.transfer_timeout_s, dialer)
        self._config = config
        self._pool = pool if config.codec != "never" else None
        self._counters = counters
        self._executor = executor
        self._meter = meter or LaneMeter()
        self._pacing = pacing
        self._tls = tls

    async def put_shard(
        self,
        holder: pb.Holder,
        *,
        epoch: int,
        owner: pb.NodeRef,
        manifest: pb.ShardManifest,
        source: ShardSource,
        progress: Callable[[int], None],
        obsolete_steps: Collection[int] = (),
        due: Callable[[], float] | None = None,
    ) -> PutOutcome:
        """Put a copy of the shard in `source` on `holder`, as changes of the source's base if it has that.

        `manifest` needs no digests. `progress` is told, on the event loop, how many payload bytes were sent
        since it was last called. `obsolete_steps` of the shard were given up and never reported. When this returns,
        raises or is cancelled, no thread uses `source` for it any more. Pacing may hold it up, but it should be done
        at `due()`, by the monotonic clock. Nothing is acknowledged before the source is sealed.

        Raises:
            PeerError: the holder cannot be reached, stopped, or refused.
            CorruptError: what arrives there stays different from what is here.
            FencedError, OverBudgetError, StoreFullError, InvalidRequestError: the holder's answer.
        """
        if source.table != ChunkTable.of(manifest):
            raise InvalidRequestError("source and manifest do not describe the same shard")
        whom = _name(holder)
        stub = self._stub(holder.node.node_id, holder.data_address)
        request = peer_pb2.BeginPutRequest(
            cluster_id=self._config.cluster_id,
            epoch=epoch,
            holder_incarnation=holder.node.incarnation,
            owner=owner,
            manifest=manifest,
            provisional=manifest.provisional,
            obsolete_steps=obsolete_steps,
        )
        request.manifest.ClearField("chunk_digests")
        request.manifest.ClearField("digest")
        request.manifest.ClearField("codecs")
        request.manifest.kind = pb.REPLICA_KIND_COPY
        if source.base is not None:
            request.bases.add(step=source.base.step, digest=source.base.digest)
        tally = PutTally()
        moved = LoopProgress(asyncio.get_running_loop(), progress)
        async with hired(self._executor, min(self._config.lane_streams, len(source))) as crew:
            request.streams = crew.size
            allocation_s = manifest.bytes / _FRESH_MEMORY_BYTES_PER_S
            begun = await self._begin_put(stub, request, whom, self._timeout_s + allocation_s)
            try:
                base_step = begun.base_step if begun.HasField("base_step") else None
                if base_step is not None and (source.base is None or base_step != source.base.step):
                    raise PeerError(f"{whom} chose step {base_step} as base, which was not offered")
                against_base = base_step is not None
                work = partial(
                    put_stream,
                    source=source,
                    against_base=against_base,
                    counters=self._counters,
                    moved=moved,
                    tally=tally,
                    gate=self._pacing,
                )
                with contextlib.ExitStack() as stack:
                    stack.enter_context(source.put_under_way(against_base=against_base))
                    if self._pacing is not None:
                        course = stack.enter_context(self._pacing.put_under_way(manifest.bytes, due))
                        work = partial(work, course=course)
                    await self._stream(crew, holder, begun.tickets, work)
                # All computed by now, unless there was nothing to send.
                chunk_digests = source.complete()
                digest = shard_digest(chunk_digests)
                finish = peer_pb2.FinishPutRequest(
                    transfer_id=begun.transfer_id, chunk_digests=chunk_digests, digest=digest
                )
                finished = await self._ask(stub.FinishPut, finish, whom, self._timeout_s)
                if finished.digest != digest:
                    raise CorruptError(f"{whom} acknowledged another digest than that of the shard")
            except BaseException:
                self._later(self._abort(stub, begun.transfer_id, whom))
                raise
        return tally.outcome(
            digest=digest, base_step=base_step, raw_bytes=manifest.bytes, fresh_memory=begun.fresh_memory
        )

    async def get_shard(
        self,
        holder: pb.Holder,
        key: pb.ShardKey,
        digest: bytes,
        into: memoryview,
        progress: Callable[[int], None],
        *,
        streams: int | None = None,
        gate: ChunkGate | None = None,
    ) -> pb.ShardManifest:
        """Get the shard with that key and digest from `holder` into `into`, checked chunk by chunk.

        Returns the holder's manifest, proved by `digest`. `progress` as in `put_shard`. At most `streams`
        connections are used; `gate` may hold up each chunk. After an error
        the content of `into` is undefined, and nobody writes to it any more.

        Raises:
            NotHeldError: the holder does not have this shard with this digest.
            CorruptError: its copy is bad; it has been told.
            PeerError: it cannot be reached, stopped, or refused.
        """
        whom = _name(holder)
        stub = self._stub(holder.node.node_id, holder.data_address)
        moved = LoopProgress(asyncio.get_running_loop(), progress)
        wanted = min(streams or self._config.lane_streams, -(-len(into) // self._config.chunk_bytes))
        try:
            async with hired(self._executor, wanted) as crew:
                request = peer_pb2.BeginGetRequest(
                    cluster_id=self._config.cluster_id,
                    key=key,
                    digest=digest,
                    streams=crew.size,
                    background=gate is not None,
                    accept_encoded=self._pool is not None,
                )
                # The holder may have to make it from a newer step first.
                making_s = len(into) / _FRESH_MEMORY_BYTES_PER_S
                begun = await self._ask(stub.BeginGet, request, whom, self._timeout_s + making_s)
                manifest = begun.manifest
                table = _check_manifest(manifest, key, digest, len(into), whom)
                work = partial(
                    get_stream,
                    manifest=manifest,
                    table=table,
                    into=into,
                    counters=self._counters,
                    moved=moved,
                    gate=gate,
                    pool=self._pool,
                )
                await self._stream(crew, holder, begun.tickets, work)
        except CorruptError as error:
            self._counters.add("corrupt_reported")
            logger.error("%s has a bad copy of shard %s: %s", whom, _shown(key), error)
            await self._report_corrupt(stub, key, digest, whom)
            raise CorruptError(f"{whom} has a bad copy of shard {_shown(key)}: {error}") from None
        return manifest

    async def get_manifest(
        self, holder: pb.Holder, key: pb.ShardKey, digest: bytes, shard_bytes: int
    ) -> tuple[pb.ShardManifest, ChunkTable]:
        """What `holder` says of the shard with that key and digest, proved by the digest, and how it is cut.

        Raises:
            NotHeldError: the holder does not have this shard with this digest.
            CorruptError: its digests are not the committed ones.
            PeerError: it cannot be reached, or refused.
        """
        whom = _name(holder)
        request = peer_pb2.BeginGetRequest(cluster_id=self._config.cluster_id, key=key, digest=digest)
        begun = await self._ask(
            self._stub(holder.node.node_id, holder.data_address).BeginGet, request, whom, self._timeout_s
        )
        return begun.manifest, _check_manifest(begun.manifest, key, digest, shard_bytes, whom)

    async def read_shard(
        self,
        holder: pb.Holder,
        key: pb.ShardKey,
        digest: bytes,
        into: memoryview,
        sharing: ShardDesk,
        *,
        streams: int,
    ) -> None:
        """Get those chunks of a shard from `holder` that `sharing` wants from it, over at most `streams` connections.

        Several holders may be read into the same memory at once. Returns when `sharing` wants nothing more; when
        this returns, raises or is cancelled, nobody writes to `into` for it any more. Bad chunks are told to
        `sharing`, and in the background to the holder.

        Raises:
            NotHeldError: the holder does not have this shard with this digest.
            CorruptError: its digests are not the committed ones, or too many chunks were bad; it has been told.
            PeerError: it cannot be reached, stopped, or refused.
        """
        whom = _name(holder)
        stub = self._stub(holder.node.node_id, holder.data_address)
        bad: list[int] = []
        try:
            async with hired(self._executor, min(streams, -(-len(into) // self._config.chunk_bytes))) as crew:
                request = peer_pb2.BeginGetRequest(
                    cluster_id=self._config.cluster_id,
                    key=key,
                    digest=digest,
                    streams=crew.size,
                    accept_encoded=self._pool is not None,
                )
                making_s = len(into) / _FRESH_MEMORY_BYTES_PER_S
                begun = await self._ask(stub.BeginGet, request, whom, self._timeout_s + making_s)
                manifest = begun.manifest
                table = _check_manifest(manifest, key, digest, len(into), whom)
                if not sharing.describe(manifest, table):
                    raise PeerError(f"{whom} cuts shard {_shown(key)} into other chunks than another holder")

                def work(lane: Lane, hello: Hello) -> None:
                    with sharing.reader(lane.end, bad) as asker:
                        get_asked(
                            lane,
                            Hello(first=0, stride=ON_DEMAND, ticket=hello.ticket),
                            manifest=manifest,
                            table=table,
                            into=into,
                            counters=self._counters,
                            asker=asker,
                            pool=self._pool,
                        )

                await self._stream(crew, holder, begun.tickets, work)
        except CorruptError as error:
            bad.append(-1)
            raise CorruptError(f"{whom} has a bad copy of shard {_shown(key)}: {error}") from None
        finally:
            if bad:
                self._counters.add("corrupt_reported")
                logger.error("%s has a bad copy of shard %s", whom, _shown(key))
                self._later(self._report_corrupt(stub, key, digest, whom))

    async def _stream(
        self,
        crew: StreamCrew,
        holder: pb.Holder,
        tickets: Any,
        work: Callable[..., None],
    ) -> None:
        """Let the crew move the shard: every thread one connection, every `size`-th chunk on each."""
        whom = _name(holder)
        if len(tickets) != crew.size or any(len(ticket) != TICKET_BYTES for ticket in tickets):
            raise PeerError(f"{whom} gave {len(tickets)} lane tickets, {crew.size} are needed")

        def connection(first: int, ticket: bytes) -> None:
            lane = crew.lane(
                holder.lane_address,
                whom,
                self._timeout_s,
                self._config.lane_congestion,
                source=self._config.effective_lane_host,
                meter=self._meter,
                tls=self._tls,
                node_id=holder.node.node_id,
            )
            with lane as connected:
                work(connected, Hello(first=first, stride=crew.size, ticket=ticket))

        await crew.run([partial(connection, first, ticket) for first, ticket in enumerate(tickets)])

    async def _begin_put(
        self,
        stub: peer_pb2_grpc.PeerServiceAsyncStub,
        request: peer_pb2.BeginPutRequest,
        whom: str,
        timeout_s: float,
    ) -> peer_pb2.BeginPutResponse:
        """A put that is given up meanwhile is aborted as soon as its id is known."""
        asking = asyncio.create_task(self._ask(stub.BeginPut, request, whom, timeout_s))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._later(self._abort_begun(stub, asking, whom))
            raise

    async def _abort_begun(
        self,
        stub: peer_pb2_grpc.PeerServiceAsyncStub,
        asking: asyncio.Task[peer_pb2.BeginPutResponse],
        whom: str,
    ) -> None:
        with contextlib.suppress(FastCheckdError):  # then there is nothing to abort
            await self._abort(stub, (await asking).transfer_id, whom)

    async def _abort(self, stub: peer_pb2_grpc.PeerServiceAsyncStub, transfer_id: str, whom: str) -> None:
        request = peer_pb2.AbortPutRequest(transfer_id=transfer_id)
        try:
            await self._ask(stub.AbortPut, request, whom, _ABORT_TIMEOUT_S)
        except FastCheckdError as error:
            logger.info("the holder will find out by itself that a put is over: %s", error)

    async def _report_corrupt(
        self, stub: peer_pb2_grpc.PeerServiceAsyncStub, key: pb.ShardKey, digest: bytes, whom: str
    ) -> None:
        request = peer_pb2.ReportCorruptRequest(key=key, digest=digest)
        try:
            answer = await self._ask(stub.ReportCorrupt, request, whom, _REPORT_TIMEOUT_S)
            logger.info("%s checked its copy of shard %s: dropped=%s", whom, _shown(key), answer.dropped)
        except FastCheckdError as error:
            logger.warning("could not tell of a bad copy: %s", error)


def _check_manifest(
    manifest: pb.ShardManifest, key: pb.ShardKey, digest: bytes, shard_bytes: int, whom: str
) -> ChunkTable:
    """The chunks; CorruptError unless the manifest is proved by the digest and describes the shard."""
    if manifest.key != key or shard_digest(manifest.chunk_digests) != digest or manifest.digest != digest:
        raise CorruptError(f"the chunk digests of {whom} are not those of the committed digest")
    try:
        table = chunk_table(manifest)
    except InvalidRequestError as error:
        raise CorruptError(f"{whom} describes the shard wrongly: {error}") from None
    if manifest.bytes != shard_bytes or len(manifest.chunk_digests) != len(table) * DIGEST_BYTES:
        raise CorruptError(f"{whom} speaks of {manifest.bytes} bytes, the shard has {shard_bytes}")
    return table


def _name(holder: pb.Holder) -> str:
    return f"node {holder.node.node_id} ({holder.data_address})"


def _shown(key: pb.ShardKey) -> str:
    return f"{key.job} step {key.step} rank {key.rank} shard {key.shard}"
