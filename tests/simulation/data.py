"""A node's data process with records for replicas: takes offers by the real checks, serves reads, prunes by the view.

A copy keeps the real one's order of checks and effects; bytes are digests, and transferring takes time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import grpc.aio
from tests.simulation.machine import Machine
from tests.simulation.truth import COPY, OWNER, QUEUE_MAX, Key, Replica
from tests.simulation.virtual_time import Process

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.counters import Counters
from fastcheckd.errors import FencedError, NoLeaseError, NotHeldError, PeerError, StoreFullError
from fastcheckd.health.lease import LeaseHolder
from fastcheckd.identity import NodeLife
from fastcheckd.maintenance.inventory import Inventory
from fastcheckd.rpc import answers
from fastcheckd.store.retention import what_to_drop
from fastcheckd.transfer import checks
from fastcheckd.view import ViewFollower

#: Copies that a node takes when it is not made to be full.
REPLICAS_MAX = 400
COPIES_MAX = 64
REPAIRS_MAX = 2
#: More often than the real one, since runs are short.
PRUNE_S = 2.0
PEER_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class FetchRequest:
    """By kind of neither: whichever replica has the digest."""

    key: tuple[str, int, int, int]
    digest: bytes


class Data:
    """One life of a data process. Its memory is the machine's and survives it."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.truth = machine.world.truth
        self.rng = machine.world.rng(f"data/{machine.name}")
        self.replicas = machine.ram.replicas
        self.client = machine.client()
        self.identity = NodeLife(machine.name)
        self.lease = LeaseHolder(
            machine.name, lambda: self.identity.incarnation, lambda: int(process.now * 1e9)
        )
        self.view = ViewFollower(self.client, self.identity)
        self.view.on_change(self._prune)
        self.books = Books(self)
        self.inventory = Inventory(
            identity=self.identity,
            store=self.books,  # type: ignore[arg-type]
            registry=self.client,
            checker=self.books,  # type: ignore[arg-type]
            counters=Counters(),
            kept_steps=lambda: self.view.kept_steps() if self.view.view.version else None,
        )
        self._making: set[Key] = set()

    def assume(self, incarnation: int, heard: Callable[[], None]) -> None:
        """The agent says who this is and hears that it lives."""
        if self.identity.assume(incarnation):
            self.inventory.changed()
        heard()

    def hold(self, incarnation: int, deadline_ns: int, has_quorum: bool) -> None:
        """The agent says for how long this node may act as a holder."""
        self.lease.renew(incarnation, deadline_ns, has_quorum=has_quorum)

    async def _prune(self, view: rpb.ClusterView) -> None:
        self.inventory.changed()
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        held = [
            (kind, pb.ShardKey(job=job, step=step, rank=rank, shard=shard), replica.session)
            for (kind, job, step, rank, shard), replica in self.replicas.items()
        ]
        drop = what_to_drop(held, self.view.retention())  # type: ignore[arg-type]
        for kind, key, _ in drop:
            del self.replicas[(int(kind), key.job, key.step, key.rank, key.shard)]
        if drop:
            self.truth.check_survival(f"retention at {self.machine.name}")

    def drop_own(
        self, job: str, rank: int, session: int, below_step: int, kept_steps: Collection[int]
    ) -> None:
        """What this node's trainer of a rank made of steps that were ruled out goes at once."""
        for key, replica in list(self.replicas.items()):
            kind, of_job, step, of_rank, _ = key
            own = (kind, of_job, of_rank) == (OWNER, job, rank) and replica.session <= session
            if own and step < below_step and step not in kept_steps:
                del self.replicas[key]
        self.truth.check_survival(f"{job} below {below_step} was ruled out at {self.machine.name}")

    async def prune(self) -> None:
        """Now and then, as the real one: copies may arrive after the view that they are not needed by."""
        while True:
            await asyncio.sleep(PRUNE_S)
            self._drop_unwanted()

    def keep(self, key: Key, digest: bytes, session: int) -> None:
        """Make a replica visible."""
        before = self.replicas.get(key)
        self.replicas[key] = Replica(digest, session)
        if before is not None and before.digest != digest:
            self.truth.check_survival(f"{key} was replaced at {self.machine.name}")
        self.truth.check(
            len(self.replicas) <= QUEUE_MAX, "G6", f"{self.machine.name} holds too many replicas"
        )

    def find(self, key: tuple[str, int, int, int], digest: bytes) -> Replica | None:
        """A replica that says it has the digest, good or not."""
        for kind in (OWNER, COPY):
            replica = self.replicas.get((kind, *key))
            if replica is not None and replica.digest == digest:
                return replica
        return None

    def condemn(self, key: tuple[str, int, int, int], digest: bytes) -> None:
        """Drop replicas of a shard that were found to be bad."""
        for kind in (OWNER, COPY):
            replica = self.replicas.get((kind, *key))
            if replica is not None and replica.digest == digest and not replica.intact:
                del self.replicas[(kind, *key)]
                self.inventory.lost(Held((kind, *key), replica))  # type: ignore[arg-type]

    def scrub(self) -> None:
        """Find every bad replica."""
        bad = {(k[1:], r.digest): None for k, r in self.replicas.items() if not r.intact}
        for key, digest in bad:
            self.condemn(key, digest)

    # Copies, in the order of `transfer.receiver`

    @answers
    async def Replicate(self, request: peer_pb2.ReplicateRequest, context: Any) -> peer_pb2.ReplicateResponse:
        checks.check_offer(
            request,
            cluster_id=self.machine.config.cluster_id,
            incarnation=self.identity.incarnation,
            epoch=self.identity.epoch,
            budget_bytes=self.machine.config.ram_budget_bytes,
        )
        await self._require_lease()
        name = (request.key.job, request.key.step, request.key.rank, request.key.shard)
        own: Key = (COPY, *name)
        here = self.find(name, request.digest) if request.repair else self.replicas.get(own)
        if here is not None and here.digest == request.digest and (here.checked or here.intact):
            here.checked = True
            return peer_pb2.ReplicateResponse(digest=request.digest, was_here=True)
        most = REPAIRS_MAX if request.repair else COPIES_MAX
        if self.machine.full or len(self._making) >= most or len(self.replicas) > REPLICAS_MAX:
            raise StoreFullError("no memory")
        self._making.add(own)
        try:
            wanted = FetchRequest(name, request.digest)
            got = None
            for source in request.sources:
                if source.node.node_id != self.machine.name and got is None:
                    got = await self.pull(source.data_address, wanted)
            if got is None:
                raise PeerError("none of the sources gave it")
            mine = (OWNER, *name) in self.replicas and not request.repair
            owner = self.machine.name if mine else request.sources[0].node.node_id
            checks.check_copy(self._manifest(request.key, owner), self.machine.name)
            checks.check_life(request.holder_incarnation, self.identity.incarnation)
            await self._require_lease()
            checks.check_life(request.holder_incarnation, self.identity.incarnation)
            self._check_session(own, got.session)
            self.truth.took(self.machine.name, self.identity.incarnation, request.holder_incarnation)
            self.truth.repairs += request.repair
            self.truth.puts += not request.repair
            self.keep(own, request.digest, got.session)
        finally:
            self._making.discard(own)
        return peer_pb2.ReplicateResponse(digest=request.digest)

    @staticmethod
    def _manifest(key: pb.ShardKey, owner: str) -> pb.ShardManifest:
        return pb.ShardManifest(key=key, shard_count=key.shard + 1, world_size=key.rank + 1, owner=owner)

    async def _require_lease(self) -> None:
        with contextlib.suppress(NoLeaseError):
            await self.lease.until_held()
        self.lease.require()

    def _check_session(self, key: Key, session: int) -> None:
        held = self.replicas.get(key)
        if held is not None and held.session > session:
            raise FencedError("a newer session's copy is here")

    @answers
    async def ListReplicas(
        self, request: peer_pb2.ListReplicasRequest, context: Any
    ) -> peer_pb2.ListReplicasResponse:
        replicas = [
            peer_pb2.Replica(key=held.key, kind=held.kind, digest=held.manifest.digest)
            for held in self.books.held()
        ]
        return peer_pb2.ListReplicasResponse(replicas=replicas)

    async def pull(self, address: str, request: FetchRequest) -> Replica | None:
        """Get a replica from somewhere, checked."""
        network = self.machine.world.network
        try:
            replica: Replica = await network.call(
                self.machine.name, address, "Fetch", request, PEER_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return None
        await transfer_time(self)
        return replica if replica.intact and replica.digest == request.digest else None

    # Reads

    @answers
    async def Fetch(self, request: FetchRequest, context: Any) -> Replica:
        replica = self.find(request.key, request.digest)
        if replica is None:
            raise NotHeldError("no such replica here")
        return replica


class Held:
    """A replica as the daemon's own books show one, as far as reporting it goes."""

    def __init__(self, key: Key, replica: Replica) -> None:
        kind, job, step, rank, shard = key
        self.id = key
        self.kind = kind
        self.key = pb.ShardKey(job=job, step=step, rank=rank, shard=shard)
        self.replica = replica
        self.verified_at_ms = int(replica.checked)
        self.manifest = pb.ShardManifest(digest=replica.digest)


class Books:
    """What the real inventory asks of the store, and of who checks it."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def held(self) -> list[Held]:
        return [Held(key, replica) for key, replica in self._data.replicas.items()]

    def find(self, key: pb.ShardKey, kind: int) -> Held | None:
        own: Key = (kind, key.job, key.step, key.rank, key.shard)
        replica = self._data.replicas.get(own)
        return None if replica is None else Held(own, replica)

    async def check(self, held: Held) -> bool | None:
        await asyncio.sleep(0.002)
        if self._data.replicas.get(held.id) is not held.replica:
            return None
        if not held.replica.intact:
            self._data.condemn(held.id[1:], held.replica.digest)
            return False
        held.replica.checked = True
        return True


def install(machine: Machine) -> None:
    """Make the data process a part of a machine."""

    def start(process: Process) -> tuple[str, Any]:
        machine.data = data = Data(machine, process)
        for replica in machine.ram.replicas.values():
            replica.checked = False  # adopted
        process.start(data.view.run())
        process.start(data.prune())
        process.start(data.inventory.run())
        return machine.config.data_address, data

    machine.installs("data", start)


async def transfer_time(data: Data) -> None:
    """What moving a shard's bytes takes."""
    await asyncio.sleep(0.005 + 0.06 * data.rng.random())
