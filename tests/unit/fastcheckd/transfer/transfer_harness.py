"""A holder in this process, an owner's client, and a wire between them that can be made to fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from fastcheckd.store.ram_store import RamStore
from fastcheckd.transfer.lane_server import LaneServer
from fastcheckd.transfer.peer_client import PeerClient
from fastcheckd.transfer.put_desk import PutDesk
from fastcheckd.transfer.put_tally import PutOutcome
from fastcheckd.transfer.shard_source import BaseSource, ShardSource

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2_grpc
from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.chunk_plan import ChunkPlan, opaque
from fastcheckd.config import Config
from fastcheckd.counters import Counters
from fastcheckd.health.lease import LeaseHolder
from fastcheckd.rpc import server_options
from fastcheckd.services.peer import PeerService
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.tickets import TicketOffice

CHUNK = 64 << 10
INCARNATION = 7
EPOCH = 3
BUDGET = 16 << 20


def some_bytes(size: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def manifest_of(
    size: int,
    *,
    shard: int = 0,
    owner: str = "owner",
    chunk_bytes: int = CHUNK,
    step: int = 5,
    lengths: Sequence[int] = (),
) -> pb.ShardManifest:
    return pb.ShardManifest(
        key=pb.ShardKey(job="job", step=step, rank=0, shard=shard),
        shard_count=4,
        world_size=1,
        owner=owner,
        session=1,
        state_bytes=size,
        bytes=size,
        chunk_bytes=chunk_bytes,
        chunk_lengths=lengths,
    )


def source_of(
    data: bytes | bytearray,
    manifest: pb.ShardManifest,
    pool: CodecPool,
    *,
    plans: Sequence[ChunkPlan] | None = None,
    base: BaseSource | None = None,
    choose: Callable[[int], bool] = lambda _: False,
) -> ShardSource:
    table = ChunkTable.of(manifest)
    return ShardSource(
        memoryview(data),
        table,
        step=manifest.key.step,
        plans=plans or [opaque(length) for length in table.lengths],
        base=base,
        pool=pool,
        choose=choose,
    )


@contextlib.contextmanager
def codec_pool(threads: int = 2) -> Iterator[CodecPool]:
    pool = CodecPool(threads, 1)
    try:
        yield pool
    finally:
        pool.close()


async def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


LEASE_FOR_EVER_NS = 2**62


@dataclass
class Holder:
    """The real parts of a holder; `incarnation` and `epoch` may be changed while it runs."""

    counters: Counters
    store: RamStore
    tickets: TicketOffice
    desk: PutDesk
    lane: LaneServer
    data_address: str
    codec: CodecPool
    lease: LeaseHolder
    epoch: int = EPOCH
    incarnation: int = INCARNATION

    def ref(self, lane_port: int | None = None, incarnation: int = INCARNATION) -> pb.Holder:
        return pb.Holder(
            node=pb.NodeRef(node_id="holder", incarnation=incarnation),
            data_address=self.data_address,
            lane_address=f"127.0.0.1:{lane_port or self.lane.port}",
        )

    @property
    def reserved_bytes(self) -> int:
        """Memory in use, without what is free for recycling."""
        usage = self.store.usage()
        return usage.used_bytes - usage.free_bytes


@contextlib.asynccontextmanager
async def running_holder(
    directory: Path,
    *,
    timeout_s: float = 20.0,
    codec: str = "auto",
    job_budget_bytes: int = 0,
    **lane_options: Any,
) -> AsyncIterator[Holder]:
    counters = Counters()
    store = RamStore.open(
        directory / "ram", budget_bytes=BUDGET, job_budget_bytes=job_budget_bytes, counters=counters
    )
    tickets = TicketOffice()
    holder: Holder
    lease = LeaseHolder("holder", lambda: holder.incarnation)
    lease.renew(INCARNATION, LEASE_FOR_EVER_NS, has_quorum=True)
    desk = PutDesk(
        cluster_id="fastcheck",
        node_id="holder",
        store=store,
        tickets=tickets,
        counters=counters,
        incarnation=lambda: holder.incarnation,
        epoch=lambda: holder.epoch,
        require_lease=lease.require,
        kept_steps=lambda job: (),
        budget_bytes=BUDGET,
        transfer_timeout_s=timeout_s,
    )
    pool = CodecPool(2, 1)
    lane = LaneServer("127.0.0.1", 0, tickets, counters, timeout_s, pool=pool, codec=codec, **lane_options)
    server = grpc.aio.server(options=server_options())
    service = PeerService(
        cluster_id="fastcheck", desk=desk, store=store, tickets=tickets, counters=counters, lease=lease
    )
    peer_pb2_grpc.add_PeerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    holder = Holder(counters, store, tickets, desk, lane, f"127.0.0.1:{port}", pool, lease)
    desk.start()
    lane.start()
    await server.start()
    try:
        yield holder
    finally:
        await server.stop(0)
        lane.stop()
        desk.close()
        pool.close()
        store.close()


@dataclass
class Owner:
    """A client and what it counted."""

    client: PeerClient
    counters: Counters
    codec: CodecPool
    progress: list[int] = field(default_factory=list)

    async def put(
        self,
        holder: pb.Holder,
        data: bytearray,
        *,
        epoch: int = EPOCH,
        manifest: pb.ShardManifest | None = None,
    ) -> bytes:
        """Put raw, whole; the digest that the holder acknowledged."""
        manifest = manifest or manifest_of(len(data))
        source = source_of(data, manifest, self.codec)
        return (await self.send(holder, source, manifest, epoch=epoch)).digest

    async def send(
        self, holder: pb.Holder, source: ShardSource, manifest: pb.ShardManifest, *, epoch: int = EPOCH
    ) -> PutOutcome:
        return await self.client.put_shard(
            holder,
            epoch=epoch,
            owner=pb.NodeRef(node_id="owner", incarnation=1),
            manifest=manifest,
            source=source,
            progress=self.progress.append,
        )


@contextlib.asynccontextmanager
async def running_owner(
    *,
    streams: int = 2,
    timeout_s: float = 20.0,
    threads: int = 8,
    cluster_id: str = "fastcheck",
    decodes: bool = False,
    **client_options: Any,
) -> AsyncIterator[Owner]:
    counters = Counters()
    config = Config(
        cluster_id=cluster_id,
        node_id="owner",
        lane_streams=streams,
        chunk_bytes=CHUNK,
        transfer_timeout_s=timeout_s,
    )
    with ThreadPoolExecutor(threads) as executor, codec_pool() as codec:
        client = PeerClient(config, counters, executor, codec if decodes else None, **client_options)
        try:
            yield Owner(client, counters, codec)
        finally:
            await client.close()


class BadWire:
    """A TCP proxy in front of a lane that may flip a byte, hang up or go silent.

    Where is given by the offset in the bytes towards the server, or with `towards_client` in those back.
    """

    def __init__(self, target_port: int, *, towards_client: bool = False) -> None:
        self._target_port = target_port
        self._towards_client = towards_client
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = self._listener.getsockname()[1]
        #: Each is used once, by the first connection that comes so far.
        self.flip_at: list[int] = []
        self.cut_at: int | None = None
        self.stall_at: int | None = None
        self.stalled = threading.Event()
        self._end = threading.Event()

    def __enter__(self) -> BadWire:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets += [client, server]
            self._start(self._pump, client, server, not self._towards_client)
            self._start(self._pump, server, client, self._towards_client)

    def _pump(self, source: socket.socket, sink: socket.socket, bad: bool) -> None:
        offset = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                stop = offset + len(data)
                for place in [f for f in self.flip_at if bad and offset <= f < stop]:
                    self.flip_at.remove(place)
                    data[place - offset] ^= 0x10
                if bad and self.cut_at is not None and self.cut_at < stop:
                    break
                if bad and self.stall_at is not None and self.stall_at < stop:
                    self.stalled.set()
                    self._end.wait(30)
                    break
                sink.sendall(data)
                offset = stop
        except OSError:
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
