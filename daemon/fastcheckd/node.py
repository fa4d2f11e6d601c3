"""Wires the rooms into the three processes of a node. The only place that knows all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from fastcheck_proto.v1 import (
    admin_pb2_grpc,
    node_pb2_grpc,
    peer_pb2_grpc,
    registry_pb2,
    trainer_pb2_grpc,
)

from .agent import Agent
from .codec.planner import Planner
from .config import Config
from .counters import Counters
from .errors import (
    ConfigError,
    NotHeldError,
    OverBudgetError,
    RegistryError,
    StoreError,
    StoreFullError,
)
from .health.lease import LeaseHolder
from .identity import Identity
from .last_view import LastView
from .registry import wire
from .registry.client import RegistryClient
from .registry.remembered import remember, with_remembered_voters
from .registry_server import RegistryServer
from .restore.room import RestoreRoom
from .rpc import SERVER_OPTIONS
from .saving.replicate import Replicator
from .saving.room import SavingRoom
from .services.admin import AdminService
from .services.node import DataControlService, NodeService
from .services.peer import PeerService
from .services.trainer import TrainerService
from .store.manifests import replica_id
from .store.ram_store import HeldShard, RamStore
from .store.retention import what_to_drop
from .transfer.codec_pool import CodecPool
from .transfer.lane_server import LaneServer
from .transfer.peer_client import PeerClient
from .transfer.put_desk import PutDesk
from .transfer.tickets import TicketOffice
from .upkeep.room import UpkeepRoom
from .view import ViewFollower

logger = logging.getLogger(__name__)

#: How long a data process that was just started tries to get its RAM directory.
STORE_PATIENCE_S = 2.0


# --- the three processes ----------------------------------------------------------------------------


async def run_agent(config: Config) -> None:
    """The `fastcheckd` process itself; returns after SIGTERM or SIGINT."""
    stopping = _stop_signal()
    _private_directory(config.runtime_dir)
    registry = RegistryClient(with_remembered_voters(config), Counters())
    peers_pool = ThreadPoolExecutor(1, thread_name_prefix="admin")
    peers = PeerClient(config, Counters(), peers_pool)
    agent = Agent(config, registry)
    health = health_aio.HealthServicer()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    node_pb2_grpc.add_NodeServiceServicer_to_server(
        NodeService(config, lambda: agent.incarnation, agent.voting.become), server
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(config, registry, peers), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    _listen_tcp(server, config.agent_address, "agent_port")
    async with _listening(server, config.agent_socket):
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        agent.start()
        try:
            ends: set[asyncio.Future[Any]] = {stopping, agent.fatal}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await health.enter_graceful_shutdown()
            await agent.stop()
            await peers.close()
            await registry.close()
            peers_pool.shutdown(wait=False)
        if agent.fatal.done():
            raise agent.fatal.result()


class _DataRooms:
    """The rooms of a data process, joined."""

    def __init__(self, config: Config, store: RamStore, counters: Counters) -> None:
        self._config = config
        self.identity = identity = Identity(config.node_id)
        self.lease = LeaseHolder(config.node_id, lambda: identity.incarnation)
        self.store = store
        self.hashing = ThreadPoolExecutor(config.worker_threads, thread_name_prefix="hash")
        # Lane threads mostly wait for the network: room for several ranks' steps at full spread.
        self.lanes = ThreadPoolExecutor(4 * config.spread * config.lane_streams, thread_name_prefix="lane")
        self.codec = CodecPool(config.codec_threads, config.codec_nice)
        self.registry = registry = RegistryClient(with_remembered_voters(config), counters)
        self.view = view = ViewFollower(registry, identity, LastView(config))
        self.peers = peers = PeerClient(config, counters, self.lanes)
        tickets = TicketOffice()
        self.lane = LaneServer(
            config.host, config.lane_port, tickets, counters, config.transfer_timeout_s,
            pool=self.codec, congestion=config.lane_congestion,
        )  # fmt: skip
        self.desk = PutDesk(
            cluster_id=config.cluster_id, node_id=config.node_id, store=store, tickets=tickets,
            counters=counters, incarnation=lambda: identity.incarnation, epoch=lambda: identity.epoch,
            require_lease=self.lease.require,
            budget_bytes=config.ram_budget_bytes, transfer_timeout_s=config.transfer_timeout_s,
        )  # fmt: skip
        replicator = Replicator(
            config=config, identity=identity, store=store, registry=registry, peers=peers, view=view,
            counters=counters, executor=self.hashing, codec=self.codec,
            planner=Planner(config.codec, config.codec_threads),
        )  # fmt: skip
        self.saving = SavingRoom(
            config=config, identity=identity, store=store, registry=registry, view=view,
            counters=counters, replicator=replicator,
        )  # fmt: skip
        restore = RestoreRoom(
            config=config, store=store, registry=registry, peers=peers, view=view,
            counters=counters, executor=self.hashing, on_brought=self._brought,
        )  # fmt: skip
        self.upkeep = UpkeepRoom(
            config=config, identity=identity, store=store, registry=registry, peers=peers, view=view,
            counters=counters, executor=self.hashing, require_lease=self.lease.require,
            busy=lambda: self.saving.replicating or self.desk.transfers > 0 or restore.bringing,
        )  # fmt: skip
        self.peer_service = PeerService(
            cluster_id=config.cluster_id, desk=self.desk, store=store, tickets=tickets, counters=counters,
            upkeep=self.upkeep,
            lease=self.lease,
        )  # fmt: skip
        self.trainer_service = TrainerService(config, self.saving, restore, registry)
        self._resumed = False
        view.on_change(self._on_view)

    async def _on_view(self, seen: registry_pb2.ClusterView) -> None:
        """Free what the registry no longer keeps."""
        self.assumed()
        self.registry.use_voters(seen.voter_records)
        await asyncio.to_thread(self._remember_voters, seen)
        await asyncio.to_thread(_prune, self.store, self.view.kept_steps())

    def _brought(self, shards: Sequence[HeldShard]) -> None:
        self.upkeep.brought(shards)

    def assumed(self) -> None:
        """There is a new life of this node, or a new view."""
        self.resume()
        self.upkeep.changed()

    def _remember_voters(self, seen: registry_pb2.ClusterView) -> None:
        """Keep the voters for the agent, which starts and stops by them, and for the next start."""
        try:
            remember(self._config, [wire.voter(record) for record in seen.voter_records], seen.version)
        except (OSError, ConfigError) as error:
            logger.warning("the registry's voters cannot be kept in state_dir: %s", error)

    def resume(self) -> None:
        """Carry on, once, with what an earlier life had staged; needs to know the view and who this node is."""
        if self._resumed or not self.identity.incarnation or not self.view.view.version:
            return
        self._resumed = True
        if count := self.saving.resume():
            logger.info("carrying on with %d staged steps of an earlier life", count)

    async def close(self) -> None:
        """Let go of everything but the bytes."""
        await asyncio.to_thread(self.desk.close)
        await asyncio.to_thread(self.lane.stop)
        await self.peers.close()
        await self.registry.close()
        self.hashing.shutdown(wait=False, cancel_futures=True)
        self.lanes.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.codec.close)
        self.store.close()


async def run_data(config: Config) -> None:
    """The data process; returns after SIGTERM."""
    stopping = _stop_signal()
    counters = Counters()
    store = await _open_store(config, counters)
    rooms = _DataRooms(config, store, counters)
    far = grpc.aio.server(options=SERVER_OPTIONS)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(rooms.peer_service, far)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(rooms.trainer_service, far)
    _listen_tcp(far, config.data_address, "data_port")
    near = grpc.aio.server(options=SERVER_OPTIONS)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(rooms.trainer_service, near)
    control = DataControlService(rooms.identity, rooms.lease, store, on_assume=rooms.assumed)
    node_pb2_grpc.add_DataControlServiceServicer_to_server(control, near)
    rooms.lane.start()
    rooms.desk.start()
    try:
        async with _listening(far), _listening(near, config.data_socket):
            following = asyncio.create_task(rooms.view.run(), name="view")
            rooms.upkeep.start()
            logger.info("%d shards adopted from %s", len(store.held()), config.ram_dir)
            await asyncio.wait({stopping, following}, return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            await rooms.upkeep.stop()
            await rooms.saving.stop()
            await asyncio.gather(following, return_exceptions=True)
    finally:
        await rooms.close()


async def _open_store(config: Config, counters: Counters) -> RamStore:
    """Take over the RAM directory, giving a process that is just ending a moment to let go of it."""
    give_up_at = time.monotonic() + STORE_PATIENCE_S
    while True:
        try:
            return await asyncio.to_thread(
                RamStore.open, config.ram_dir, budget_bytes=config.ram_budget_bytes, counters=counters
            )
        except StoreError as error:
            if time.monotonic() > give_up_at:
                raise ConfigError(str(error)) from error
        await asyncio.sleep(STORE_PATIENCE_S / 10)


async def run_registry(config: Config) -> None:
    """The registry process of a voter; returns after SIGTERM, raises when this voter can go on no more."""
    stopping = _stop_signal()
    server = RegistryServer(config)
    await server.start()
    failing = asyncio.create_task(server.wait_failed(), name="registry-failure")
    try:
        ends: set[asyncio.Future[Any]] = {stopping, failing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise RegistryError(f"this voter stops, to be started anew: {failing.result()}")
    finally:
        failing.cancel()
        await server.stop()


PROCESSES: dict[str, Callable[[Config], Coroutine[None, None, None]]] = {
    "agent": run_agent,
    "data": run_data,
    "registry": run_registry,
}


# --- what they share --------------------------------------------------------------------------------


def _prune(store: RamStore, kept_steps: dict[str, list[int]]) -> None:
    """Drop replicas of steps that the registry no longer keeps, the oldest first: they need the newer ones."""
    held = {shard.id: shard for shard in store.held()}
    drop = what_to_drop([(s.kind, s.key) for s in held.values()], kept_steps)
    for kind, key in sorted(drop, key=lambda entry: entry[1].step):
        try:
            store.drop(held[replica_id(key, kind)])
        except (NotHeldError, OverBudgetError, StoreFullError) as error:
            # Older steps need its bytes, and they are being read: the next view brings it up again.
            logger.info("cannot drop step %d of job %r yet: %s", key.step, key.job, error)


def _stop_signal() -> asyncio.Future[None]:
    """A future that SIGTERM or SIGINT completes."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


def _private_directory(path: Path) -> None:
    """Make a directory that only this user may enter, or refuse one that others can."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{path} must be a directory of this user that nobody else may write to; fix it or set runtime_dir"
        )


def _listen_tcp(server: grpc.aio.Server, address: str, key: str) -> None:
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the address is not of this machine; "
            f"change {key} or host"
        )


@contextlib.asynccontextmanager
async def _listening(server: grpc.aio.Server, socket: Path | None = None) -> AsyncIterator[None]:
    """Serve while the context lasts, on a Unix socket too if one is given."""
    if socket is not None:
        if len(str(socket)) > 100:
            raise ConfigError(
                f"the socket path {socket} is too long for the kernel; set a shorter runtime_dir"
            )
        # Left by an earlier life; whether one still runs, the TCP port has told.
        socket.unlink(missing_ok=True)  # noqa: ASYNC240  before serving, nobody waits
        server.add_insecure_port(f"unix://{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=0.2)
