"""The agent: keeps the registry informed of the node and answers operators."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from fastcheck_proto.v1 import admin_pb2_grpc, node_pb2_grpc

from ..agent import Agent
from ..beats import BEAT_INTERVAL_S, BeatGiver
from ..config import Config
from ..counters import Counters
from ..dialer import Dialer
from ..drain import drain
from ..registry.client import RegistryClient
from ..registry.known_voters import with_remembered_voters
from ..rpc import server_options
from ..services.admin import AdminService
from ..services.admission import Admission
from ..services.node import NodeService
from ..supervisor import Supervisor
from ..systemd import RelayedNotifier, one_line, report
from ..transfer.client import PeerClient
from .health_ports import health_ports
from .server import listen_tcp, listening, private_directory, stop_signal, watching_crowds

#: Whoever asks the agent names a job or a node, and at most seven voters.
REQUEST_BYTES_MAX = 1 << 20
#: To systemd, while a drain goes on: wait so much longer.
EXTENSION_USEC = str(30 * 10**6)


async def run(config: Config, supervisor: Supervisor, notifier: RelayedNotifier, giver: BeatGiver) -> None:
    """The agent; returns after SIGTERM."""
    stopping = stop_signal()
    beating = asyncio.create_task(_beat(giver), name="signs of life")
    private_directory(config.runtime_dir)
    dialer = Dialer.of(config)
    registry = RegistryClient(with_remembered_voters(config), Counters(), dialer=dialer)
    peers = PeerClient(config.transfer_timeout_s, dialer)
    agent = Agent(config, registry, dialer, supervisor)
    health = health_aio.HealthServicer()
    server = grpc.aio.server(
        options=server_options(REQUEST_BYTES_MAX), interceptors=[Admission(config.cluster_id)]
    )
    node_pb2_grpc.add_NodeServiceServicer_to_server(
        NodeService(config, lambda: agent.incarnation, agent.voter_role.become, dialer), server
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(config, registry, peers), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    listen_tcp(server, dialer, config.agent_address, "agent_port")
    async with (
        listening(server, config.agent_socket),
        health_ports(config, agent, registry, health, dialer.certificates),
        watching_crowds(),
    ):
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        agent.start()
        reporting = asyncio.create_task(
            report(notifier, agent.ready, agent.summary, agent.stuck), name="systemd"
        )
        try:
            ends: set[asyncio.Future[Any]] = {stopping, agent.fatal}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            reporting.cancel()
            if stopping.done() and config.drain_on_stop_s:
                await _drain(config, registry, notifier)
        finally:
            reporting.cancel()
            notifier.tell(STOPPING="1", STATUS="leaving the cluster")
            await health.enter_graceful_shutdown()
            await agent.stop()
            await peers.close()
            await registry.close()
            beating.cancel()
        if agent.fatal.done():
            raise agent.fatal.result()


async def _beat(giver: BeatGiver) -> None:
    while True:
        giver.give()
        await asyncio.sleep(BEAT_INTERVAL_S)


async def _drain(config: Config, registry: RegistryClient, notifier: RelayedNotifier) -> None:
    """As long as it may take, or until whoever stops this node says so once more."""
    at_once = stop_signal()
    draining = asyncio.create_task(
        drain(
            config.node_id,
            registry,
            within_s=config.drain_on_stop_s,
            # Each asks for so much more time than the unit allows for.
            going_on=lambda why: notifier.tell(
                STOPPING="1", STATUS=one_line(f"draining: {why}"), EXTEND_TIMEOUT_USEC=EXTENSION_USEC
            ),
        )
    )
    ends: set[asyncio.Future[Any]] = {draining, at_once}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
