"""A node's data process with records for replicas: takes puts by the real checks, serves reads, prunes by the view.

A put and a fetch keep the real one's order of checks and effects; bytes are digests, and transferring takes time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.machine import Machine
from tests.simulation.truth import COPY, OWNER, QUEUE_MAX, Key, Replica
from tests.simulation.virtual_time import Process

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import FencedError, NotHeldError, StoreFullError
from fastcheckd.identity import Identity
from fastcheckd.rpc import answers
from fastcheckd.store.retention import what_to_drop
from fastcheckd.transfer import put_checks
from fastcheckd.view import ViewFollower

#: Copies that a node takes when it is not made to be full.
REPLICAS_MAX = 400
TRANSFERS_MAX = 64


@dataclass
class _Transfer:
    request: peer_pb2.BeginPutRequest
    incarnation: int


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
        self.identity = Identity(machine.name)
        self.view = ViewFollower(self.client, self.identity)
        self.view.on_change(self._prune)
        self._transfers: dict[str, _Transfer] = {}
        self._by_key: dict[Key, str] = {}
        self._number = 0

    def assume(self, incarnation: int, heard: Callable[[], None]) -> None:
        """The agent says who this is and hears that it lives."""
        self.identity.assume(incarnation)
        heard()

    async def _prune(self, view: rpb.ClusterView) -> None:
        held = [
            (kind, pb.ShardKey(job=job, step=step, rank=rank, shard=shard))
            for kind, job, step, rank, shard in self.replicas
        ]
        drop = what_to_drop(held, self.view.kept_steps())  # type: ignore[arg-type]
        for kind, key in drop:
            del self.replicas[(int(kind), key.job, key.step, key.rank, key.shard)]
        if drop:
            self.truth.check_survival(f"retention at {self.machine.name}")

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

    # Puts

    @answers
    async def BeginPut(self, request: peer_pb2.BeginPutRequest, context: Any) -> peer_pb2.BeginPutResponse:
        incarnation = self.identity.incarnation
        put_checks.check_put(
            request,
            cluster_id=self.machine.config.cluster_id,
            node_id=self.machine.name,
            incarnation=incarnation,
            epoch=self.identity.epoch,
            budget_bytes=self.machine.config.ram_budget_bytes,
        )
        key = request.manifest.key
        own: Key = (COPY, key.job, key.step, key.rank, key.shard)
        self._check_session(own, request.manifest.session)
        if self.machine.full or len(self.replicas) > REPLICAS_MAX or len(self._transfers) > TRANSFERS_MAX:
            raise StoreFullError("no memory")
        self._number += 1
        transfer_id = f"{self.process.name}-{self._number}"
        if (older := self._by_key.pop(own, None)) is not None:
            del self._transfers[older]
        self._transfers[transfer_id] = _Transfer(request, incarnation)
        self._by_key[own] = transfer_id
        return peer_pb2.BeginPutResponse(transfer_id=transfer_id)

    @answers
    async def FinishPut(self, request: peer_pb2.FinishPutRequest, context: Any) -> peer_pb2.FinishPutResponse:
        transfer = self._transfers.pop(request.transfer_id, None)
        if transfer is None:
            raise NotHeldError("no such transfer here")
        key = transfer.request.manifest.key
        own: Key = (COPY, key.job, key.step, key.rank, key.shard)
        del self._by_key[own]
        put_checks.check_life(transfer.incarnation, self.identity.incarnation)
        self._check_session(own, transfer.request.manifest.session)
        self.truth.check(
            transfer.request.holder_incarnation == self.identity.incarnation,
            "G7",
            f"{self.machine.name}#{self.identity.incarnation} took a put for "
            f"#{transfer.request.holder_incarnation}",
        )
        self.truth.puts += 1
        self.keep(own, request.digest, transfer.request.manifest.session)
        return peer_pb2.FinishPutResponse(digest=request.digest)

    def _check_session(self, key: Key, session: int) -> None:
        held = self.replicas.get(key)
        if held is not None and held.session > session:
            raise FencedError("a newer session's copy is here")

    # Reads

    @answers
    async def Fetch(self, request: FetchRequest, context: Any) -> Replica:
        replica = self.find(request.key, request.digest)
        if replica is None:
            raise NotHeldError("no such replica here")
        return replica


def install(machine: Machine) -> None:
    """Make the data process a part of a machine."""

    def start(process: Process) -> tuple[str, Any]:
        machine.data = data = Data(machine, process)
        process.start(data.view.run())
        return machine.config.data_address, data

    machine.installs("data", start)


async def transfer_time(data: Data) -> None:
    """What moving a shard's bytes takes."""
    await asyncio.sleep(0.005 + 0.06 * data.rng.random())
