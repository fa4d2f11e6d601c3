"""Nodes and trainers as the registry sees them, for tests: small, real gRPC, no store behind them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import grpc.aio

from fastcheck_proto.v1 import common_pb2, node_pb2, node_pb2_grpc, registry_pb2
from fastcheckd.config import Config
from fastcheckd.counters import Counters
from fastcheckd.dialer import Dialer
from fastcheckd.errors import NoQuorumError
from fastcheckd.health.heartbeats import HeartbeatSender
from fastcheckd.health.probe import probe, to_wire
from fastcheckd.registry.client import RegistryClient

CHUNK_BYTES = 4096


async def eventually(condition, deadline_s=60.0, what="it"):
    """Wait for `condition()` (may be a coroutine function) to be true; returns its value.

    A registry that does not answer yet is none that says so.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    last = ""
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            try:
                value = await value
            except NoQuorumError as error:
                value, last = None, f"; last: {error}"
        if value:
            return value
        assert loop.time() < end, f"{what} did not come true within {deadline_s} s{last}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def connected(config: Config) -> AsyncIterator[RegistryClient]:
    client = RegistryClient(config, Counters())
    try:
        yield client
    finally:
        await client.close()


async def leader_of(client: RegistryClient) -> str:
    """Node id of the registry's leader, as soon as there is one."""

    async def known() -> str | None:
        view = await client.view(5)
        return view.leader if view.has_leader else None

    found: str = await eventually(known)
    return found


class Node(node_pb2_grpc.NodeServiceServicer):
    """An agent: registers, sends heartbeats, answers probes. Each of the three can be stopped."""

    def __init__(self, config: Config, node_id: str) -> None:
        self.config = config
        self.node_id = node_id
        self.incarnation = 0
        self.fenced = asyncio.Event()
        self.data = registry_pb2.DATA_HEALTH_OK
        self._lives = 0

    async def Probe(self, request, context):
        return node_pb2.ProbeResponse(node_id=self.node_id, incarnation=self.incarnation)

    async def ProbeFor(self, request, context):
        life = (request.node.node_id, request.node.incarnation)
        finding = await probe(request.agent_address, life, request.timeout_s)
        return node_pb2.ProbeForResponse(finding=to_wire(finding))

    async def start(self, client: RegistryClient) -> Node:
        self._server = grpc.aio.server()
        self.port = Dialer.of(self.config).listen(self._server, "127.0.0.1:0")
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        await self._server.start()
        await self.register(client)
        self.start_heartbeats()
        return self

    async def register(self, client: RegistryClient) -> None:
        self._lives += 1
        request = registry_pb2.RegisterRequest(
            cluster_id=self.config.cluster_id,
            node_id=self.node_id,
            agent_address=f"127.0.0.1:{self.port}",
            data_address=f"{self.node_id}:1",
            lane_address=f"{self.node_id}:2",
            ram_budget_bytes=1 << 30,
            life_id=f"{self.node_id}-{id(self)}-{self._lives}",
        )
        self.incarnation = (await client.register(request, timeout_s=15)).incarnation

    def start_heartbeats(self) -> None:
        sender = HeartbeatSender(self.config, self._beat, self.fenced.set)
        self.heartbeats = asyncio.create_task(sender.run())

    def _beat(self) -> registry_pb2.HeartbeatRequest:
        return registry_pb2.HeartbeatRequest(node=self.ref, ram_used_bytes=77, data=self.data)

    @property
    def ref(self) -> common_pb2.NodeRef:
        return common_pb2.NodeRef(node_id=self.node_id, incarnation=self.incarnation)

    async def stop_heartbeats(self) -> None:
        self.heartbeats.cancel()
        await asyncio.wait([self.heartbeats])

    async def stop(self) -> None:
        await self.stop_heartbeats()
        await self._server.stop(None)


@contextlib.asynccontextmanager
async def nodes(client: RegistryClient, config: Config, count: int) -> AsyncIterator[list[Node]]:
    started = [await Node(config, f"n{i}").start(client) for i in range(count)]
    try:
        yield started
    finally:
        await asyncio.gather(*(node.stop() for node in started))


class Rank:
    """One rank's trainer and owner: opens, places, reports."""

    def __init__(self, client: RegistryClient, owner: Node, rank: int, world_size: int, *, job="gpt") -> None:
        self.client, self.owner, self.rank, self.world_size, self.job = client, owner, rank, world_size, job
        self.session = 0

    async def open(self, client_id: str) -> int:
        request = registry_pb2.OpenRankRequest(
            job=self.job, rank=self.rank, world_size=self.world_size, client_id=client_id, node=self.owner.ref
        )
        self.session = (await self.client.open_rank(request, timeout_s=15)).session
        return self.session

    async def place(self, step: int, avoid=()) -> registry_pb2.PlaceResponse:
        request = registry_pb2.PlaceRequest(
            job=self.job,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            session=self.session,
            owner=self.owner.ref,
            state_bytes=10 * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            avoid=avoid,
        )
        return await self.client.place(request, timeout_s=15)

    def digest(self, step: int) -> bytes:
        return hashlib.md5(f"{self.job} {self.rank} {step}".encode()).digest()

    def request(self, step: int, placement: registry_pb2.PlaceResponse) -> registry_pb2.ReportRequest:
        request = registry_pb2.ReportRequest(
            job=self.job, step=step, world_size=self.world_size, epoch=placement.epoch, wait_s=1.0
        )
        request.record.rank = self.rank
        request.record.session = self.session
        request.record.owner.CopyFrom(self.owner.ref)
        request.record.state_bytes = 10 * CHUNK_BYTES
        for shard in placement.shards:
            request.record.shards.add(
                shard=shard.shard,
                offset=shard.offset,
                bytes=shard.bytes,
                digest=self.digest(step),
                holders=[holder.node for holder in shard.holders],
            )
        return request

    async def report(self, step: int, placement=None, wait_s=1.0) -> registry_pb2.ReportResponse:
        request = self.request(step, placement or await self.place(step))
        request.wait_s = wait_s
        return await self.client.report(request, timeout_s=15)

    async def save(self, step: int) -> registry_pb2.ReportResponse:
        """Place and report until the step is committed or refused."""
        request = self.request(step, await self.place(step))
        while True:
            response = await self.client.report(request, timeout_s=15)
            if response.state != registry_pb2.REPORT_STATE_WAITING:
                return response
