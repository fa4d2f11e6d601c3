"""Nodes in this process that are all real: stores, lanes, gRPC. And a wire between them that can be made to fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

import grpc.aio
from tests.eventually import eventually

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc
from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.chunk_plan import ChunkPlan, opaque
from fastcheckd.config import Config
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.health.lease import LeaseHolder
from fastcheckd.identity import NodeLife
from fastcheckd.rpc import server_options
from fastcheckd.services.peer import PeerService
from fastcheckd.store.replica import Replica
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import staging_pool
from fastcheckd.transfer.client import PeerClient
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.encoder_cache import EncoderCache
from fastcheckd.transfer.fetch import Failures, Fetcher
from fastcheckd.transfer.lane_tls import LaneTls
from fastcheckd.transfer.outgoing import OutgoingShard
from fastcheckd.transfer.pacing import ChunkGate, Gate, Pacer
from fastcheckd.transfer.policy import RestorePolicy
from fastcheckd.transfer.reader import FairTurns, FetchProgress
from fastcheckd.transfer.receiver import Receiver
from fastcheckd.transfer.scheduler import WantedChunks
from fastcheckd.transfer.server import TransferServer
from fastcheckd.transfer.target import MemoryTarget
from fastcheckd.transfer.tickets import TicketOffice

CLUSTER = "fastcheck"
CHUNK = 64 << 10
INCARNATION = 7
EPOCH = 3
BUDGET = 16 << 20
LEASE_FOR_EVER_NS = 2**62
#: Of a raw chunk that travels: its frame's header and its bytes.
FRAME = 64 + CHUNK

P = ParamSpec("P")


def in_a_loop(story: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine."""

    @functools.wraps(story)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(story(*args, **kwargs), 60))

    return test


def some_bytes(size: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def manifest_of(
    data: bytes | bytearray,
    *,
    shard: int = 0,
    owner: str = "owner",
    step: int = 5,
    session: int = 1,
    lengths: Sequence[int] = (),
    job: str = "job",
) -> pb.ShardManifest:
    """An owner's replica of one shard of one rank, as its save describes it."""
    manifest = pb.ShardManifest(
        key=pb.ShardKey(job=job, step=step, rank=0, shard=shard),
        shard_count=16,
        world_size=1,
        owner=owner,
        session=session,
        state_bytes=len(data),
        bytes=len(data),
        chunk_bytes=CHUNK,
        chunk_lengths=lengths,
        kind=pb.REPLICA_KIND_OWNER,
    )
    table = ChunkTable.of(manifest)
    pieces = (bytes(data[slice(*table.range(index))]) for index in range(len(table)))
    manifest.chunk_digests = b"".join(map(chunk_digest, pieces))
    manifest.digest = shard_digest(manifest.chunk_digests)
    return manifest


@contextlib.contextmanager
def codec_pool(threads: int = 2) -> Iterator[CodecPool]:
    pool = CodecPool(threads, 1)
    try:
        yield pool
    finally:
        pool.close()


async def idle(node: Node) -> None:
    """Wait until nobody reads from a node any more: what it sent is counted by then."""
    await eventually(lambda: node.server.connections == 0)


def open_gate() -> Gate:
    """Holds up nobody."""
    return Gate(Pacer(math.inf, burst_bytes=CHUNK, trickle_s=3600.0), lambda: False)


@dataclass
class Wanted:
    """A shard, or a part of it, that is fetched into memory; see `fetch.Wanted`."""

    manifest: pb.ShardManifest
    part: WantedChunks | None = None
    purpose: peer_pb2.Purpose.ValueType = peer_pb2.PURPOSE_RESTORE
    into: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.into = bytearray(self.manifest.bytes)
        self.key = self.manifest.key
        self.digest = self.manifest.digest
        self.bytes = self.manifest.bytes
        self.chunk_count = len(ChunkTable.of(self.manifest)) if self.part is None else len(self.part.chunks)

    def bases(self) -> list[peer_pb2.Base]:
        return []

    async def target(
        self, manifest: pb.ShardManifest, table: ChunkTable, base_step: int | None
    ) -> MemoryTarget:
        return MemoryTarget(memoryview(self.into), table)

    def missing(self) -> None:
        return None


@dataclass
class Fetch:
    """One fetch, and what became of it."""

    wanted: Wanted
    progress: FetchProgress
    came: dict[str, int]
    failures: Failures = field(default_factory=Failures)
    bad_copies: int = 0


@dataclass
class Node:
    """The parts of a data process that move shards. All real; what a test changes, it changes while they run."""

    config: Config
    counters: Counters
    identity: NodeLife
    lease: LeaseHolder
    store: ReplicaStore
    tickets: TicketOffice
    pool: CodecPool
    encoders: EncoderCache
    server: TransferServer
    client: PeerClient
    fetcher: Fetcher
    receiver: Receiver
    kept_steps: dict[str, list[int]] = field(default_factory=dict)

    def ref(self, lane_port: int | None = None, incarnation: int = INCARNATION) -> pb.Holder:
        """As others name it."""
        return pb.Holder(
            node=pb.NodeRef(node_id=self.config.node_id, incarnation=incarnation),
            data_address=self.config.data_address,
            lane_address=f"127.0.0.1:{lane_port or self.server.port}",
        )

    @property
    def reserved_bytes(self) -> int:
        """Memory in use, without what is free for recycling."""
        usage = self.store.usage()
        return usage.used_bytes - usage.free_bytes

    @property
    def data_address(self) -> str:
        """Where it is asked."""
        return self.config.data_address

    # As an owner.

    def publish(self, data: bytes | bytearray, **changes: Any) -> pb.ShardManifest:
        """What a save does before it makes offers: the owner's own replica, published."""
        manifest = manifest_of(data, owner=self.config.node_id, **changes)
        key = manifest.key
        segment = self.store.allocate(len(data), staging_pool(key.job, key.rank, manifest.session))
        segment.view[: len(data)] = data
        self.store.publish(manifest, segment, 0, verified=True)
        self.store.release(segment)
        return manifest

    @contextlib.contextmanager
    def announced(
        self,
        manifest: pb.ShardManifest,
        plans: Sequence[ChunkPlan] = (),
        *,
        fraction: float = 1.0,
        **how: Any,
    ) -> Iterator[OutgoingShard]:
        """While a save is under way: its shard is encoded as its plans say."""
        plans = plans or [opaque(length) for length in ChunkTable.of(manifest).lengths]
        shard = OutgoingShard(plans, fraction=fraction, **how)
        with self.encoders.outgoing(manifest.key, manifest.digest, shard):
            yield shard

    def request(
        self, manifest: pb.ShardManifest, *, sources: Iterable[pb.Holder] = (), **changes: Any
    ) -> peer_pb2.ReplicateRequest:
        """An offer, by this node if no other sources are named."""
        request = peer_pb2.ReplicateRequest(
            cluster_id=CLUSTER,
            epoch=EPOCH,
            holder_incarnation=INCARNATION,
            key=manifest.key,
            digest=manifest.digest,
            bytes=manifest.bytes,
            sources=list(sources) or [self.ref()],
        )
        request.MergeFrom(peer_pb2.ReplicateRequest(**changes))
        return request

    async def offer(self, to: Node, manifest: pb.ShardManifest, **changes: Any) -> peer_pb2.ReplicateResponse:
        """Have another node pull a copy."""
        return await self.client.replicate(to.ref(), self.request(manifest, **changes), 60.0)

    # As a reader and holder.

    def copy(self, manifest: pb.ShardManifest) -> Replica:
        found = self.store.find(manifest.key, pb.REPLICA_KIND_COPY)
        assert found is not None, "there is no copy"
        return found

    def read(self, replica: Replica) -> bytes:
        into = bytearray(replica.manifest.bytes)
        self.store.copy_to(replica, memoryview(into))
        return bytes(into)

    def has_exactly(self, manifest: pb.ShardManifest, data: bytes | bytearray) -> bool:
        """Whether there is a good copy with these bytes."""
        return self.read(self.copy(manifest)) == data

    def begin_fetch(self, manifest: pb.ShardManifest, **wanted: Any) -> Fetch:
        """A fetch into memory that has not begun."""
        came: dict[str, int] = {}

        def on_bytes(node_id: str, count: int) -> None:
            came[node_id] = came.get(node_id, 0) + count

        made = Wanted(manifest, **wanted)
        shard = manifest.key.shard
        parts = {} if made.part is None else {shard: made.part}
        return Fetch(made, FetchProgress([shard], FairTurns(), on_bytes, parts=parts), came)

    async def run(self, fetch: Fetch, sources: Sequence[pb.Holder], **how: Any) -> pb.ShardManifest | None:
        """Do it."""

        def bad() -> None:
            fetch.bad_copies += 1

        return await self.fetcher.fetch(
            fetch.wanted, sources, fetch.progress, fetch.failures, on_bad_copy=bad, **how
        )

    async def fetch(self, manifest: pb.ShardManifest, *sources: pb.Holder, **how: Any) -> Fetch:
        """Fetch a whole shard into memory; all of it has to come."""
        fetch = self.begin_fetch(manifest)
        assert await self.run(fetch, sources, **how) is not None, fetch.failures.told
        return fetch


def damage(replica: Replica, at: int) -> None:
    """Flip a bit of a replica's byte in the memory that it lies in."""
    for number in range(len(replica.chunks)):
        start, stop = replica.chunks.range(number)
        if start <= at < stop:
            place = replica.content[number].form.place
            place.file.view[place.offset + at - start] ^= 1
            return
    raise AssertionError("no such byte")


@contextlib.asynccontextmanager
async def running_node(
    directory: Path,
    node_id: str,
    *,
    streams: int = 2,
    timeout_s: float = 20.0,
    threads: int = 8,
    budget_bytes: int = BUDGET,
    job_budget_bytes: int = 0,
    codec: str = "auto",
    keep_steps: int = 2,
    settings: Mapping[str, object] | None = None,
    gate: ChunkGate | None = None,
    incoming: ChunkGate | None = None,
    gates: Mapping[peer_pb2.Purpose.ValueType, ChunkGate] | None = None,
    tls: LaneTls | None = None,
    **server_settings: Any,
) -> AsyncIterator[Node]:
    counters = Counters()
    tickets = TicketOffice()
    server = TransferServer(
        "127.0.0.1", 0, tickets, counters, timeout_s, gates=gates, tls=tls, **server_settings
    )
    server.start()
    control = grpc.aio.server(options=server_options())
    config = Config(
        **{
            "cluster_id": CLUSTER,
            "node_id": node_id,
            "lane_port": server.port,
            "data_port": control.add_insecure_port("127.0.0.1:0"),
            "lane_streams": streams,
            "chunk_bytes": CHUNK,
            "transfer_timeout_s": timeout_s,
            "ram_budget_bytes": budget_bytes,
            "codec": codec,
            "codec_threads": 2,
            "keep_steps": keep_steps,
            **(settings or {}),
        }  # type: ignore[arg-type]
    )
    store = ReplicaStore.open(
        directory / node_id, budget_bytes=budget_bytes, job_budget_bytes=job_budget_bytes, counters=counters
    )
    identity = NodeLife(node_id)
    identity.assume(INCARNATION)
    identity.saw_epoch(EPOCH)
    lease = LeaseHolder(node_id, lambda: identity.incarnation)
    lease.renew(INCARNATION, LEASE_FOR_EVER_NS, has_quorum=True)
    pool = CodecPool(2, 1)
    encoders = EncoderCache(store, pool, RestorePolicy(codec, 2), counters)
    kept_steps: dict[str, list[int]] = {}
    with ThreadPoolExecutor(threads) as executor:
        client = PeerClient(timeout_s)
        fetcher = Fetcher(config, client, counters, executor, pool, tls=tls)
        receiver = Receiver(
            config, identity, lease, store, fetcher, counters,
            kept_steps=lambda job: kept_steps.get(job, ()),
            gate=gate or open_gate(), incoming=incoming or open_gate(),
        )  # fmt: skip
        service = PeerService(
            cluster_id=CLUSTER, receiver=receiver, store=store, encoders=encoders, tickets=tickets,
            counters=counters,
        )  # fmt: skip
        peer_pb2_grpc.add_PeerServiceServicer_to_server(service, control)
        await control.start()
        node = Node(
            config, counters, identity, lease, store, tickets, pool, encoders, server, client, fetcher,
            receiver, kept_steps,
        )  # fmt: skip
        try:
            yield node
        finally:
            await receiver.stop()
            await control.stop(0)
            await asyncio.to_thread(server.stop)
            await client.close()
            pool.close()
            store.close()


@contextlib.asynccontextmanager
async def running_nodes(directory: Path, *node_ids: str, **settings: Any) -> AsyncIterator[list[Node]]:
    """Nodes with these names, all alike."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running_node(directory, node_id, **settings))
            for node_id in node_ids
        ]


class BadWire:
    """A TCP proxy in front of a lane that may flip bits, slow down, hang up or go silent.

    Where is given by the offset in the bytes towards the reader, or without `towards_reader` in those to the source.
    """

    def __init__(self, target_port: int, *, towards_reader: bool = True) -> None:
        self._target_port = target_port
        self._towards_reader = towards_reader
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = self._listener.getsockname()[1]
        #: Each is used once, by the first connection that comes so far.
        self.flip_at: list[int] = []
        #: A bit of every raw chunk is flipped.
        self.flips_all = False
        self.cut_at: int | None = None
        self.was_cut = threading.Event()
        self.stall_at: int | None = None
        self.stalled = threading.Event()
        #: Before each piece of at most 64 KiB.
        self.pause_s = 0.0
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
            self._start(self._pump, client, server, not self._towards_reader)
            self._start(self._pump, server, client, self._towards_reader)

    def _pump(self, source: socket.socket, sink: socket.socket, bad: bool) -> None:
        offset = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                stop = offset + len(data)
                if bad:
                    self._flip(data, offset)
                    if self.pause_s:
                        self._end.wait(self.pause_s)
                    if self.cut_at is not None and self.cut_at < stop:
                        self.was_cut.set()
                        break
                    if self.stall_at is not None and self.stall_at < stop:
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

    def _flip(self, data: bytearray, offset: int) -> None:
        stop = offset + len(data)
        places = [at for at in self.flip_at if offset <= at < stop]
        for at in places:
            self.flip_at.remove(at)
        if self.flips_all:
            first = offset - offset % FRAME + 70
            places += [at for at in range(first, stop, FRAME) if at >= offset]
        for at in places:
            data[at - offset] ^= 0x10
