"""The agent: small and never busy. Keeps the registry informed of the node, and answers operators.

    wait until the data process answers → register → heartbeat
                                             ▲           │ fenced
                                             └───────────┘ a new life

It touches no state of the trainers, so that nothing it does can take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from fastcheck_proto.v1 import admin_pb2_grpc, node_pb2_grpc
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config, Voter
from ..counters import Counters
from ..dialer import Dialer
from ..durations import AGENT, Durations
from ..errors import FastCheckdError
from ..health.data_line import DataLine
from ..health.heartbeats import HeartbeatSender
from ..health.lease_clock import LeaseClock
from ..health.vitals import RESTART_AFTER
from ..observe.agent_metrics import NodeFacts, ProcessFacts
from ..registry.client import RegistryClient
from ..registry.known_voters import with_remembered_voters
from ..registry.raft.membership import voter_message
from ..rpc import server_options
from ..services.admin import AdminService
from ..services.admission import Admission
from ..services.node import NodeService
from ..transfer.client import PeerClient
from .drain import drain_until_told
from .health_ports import health_ports
from .runtime import (
    LIVENESS_INTERVAL_S,
    LivenessPipe,
    listen_tcp,
    listening,
    private_directory,
    stop_signal,
    watching_crowds,
)
from .supervisor import Supervisor
from .systemd import RelayedNotifier, report
from .voter_role import VoterRole

logger = logging.getLogger(__name__)

#: Whoever asks the agent names a job or a node, and at most seven voters.
REQUEST_BYTES_MAX = 1 << 20
#: How often the agent looks for other voters.
VOTERS_INTERVAL_S = 0.5
REGISTER_TIMEOUT_S = 5.0
REGISTER_PAUSE_S = 0.5
LEAVE_TIMEOUT_S = 1.0
#: Of what a heartbeat says about processes that do not run.
TROUBLE_CHARS_MAX = 300


class Agent:
    """Membership of one node, and what its processes are to be told."""

    def __init__(
        self, config: Config, registry: RegistryClient, dialer: Dialer, supervisor: Supervisor
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._dialer = dialer
        self._registry = registry
        self._incarnation = 0
        self._fenced = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.fatal: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._voters_changed = asyncio.Event()
        self.voter_role = VoterRole(config, supervisor, self._on_voters, self._on_fatal)
        self._lease: LeaseClock | None = None
        self.durations = Durations(AGENT)
        self._data = DataLine(
            config, lambda: supervisor.data_pid, supervisor.kill_data, lambda: self._incarnation
        )

    @property
    def incarnation(self) -> int:
        """This node's life; 0 before it is registered."""
        return self._incarnation

    @property
    def ready(self) -> asyncio.Event:
        """Set when the data process has answered: it has adopted its RAM, and serves."""
        return self._data.ready

    def stuck(self) -> list[str]:
        """The data process, if it has made no progress for so long that ending it has not helped either."""
        silent_s = asyncio.get_running_loop().time() - self._data.answered_at
        return ["data"] if silent_s > 2 * RESTART_AFTER * self._config.data_hung_after_s else []

    def summary(self) -> str:
        """One line for people."""
        life = f"incarnation {self._incarnation}" if self._incarnation else "not registered yet"
        data = rpb.DataHealth.Name(self._data.health).removeprefix("DATA_HEALTH_").lower()
        vote = ", votes" if self.voter_role.runs else ""
        troubles = "".join(f"; {trouble}" for trouble in self.facts().troubles)
        return f"node {self._config.node_id}: {life}, data process {data}{vote}{troubles}"

    def facts(self) -> NodeFacts:
        """How this node is, as far as the agent knows by itself: nobody is asked."""
        lease, now = self._lease, asyncio.get_running_loop().time()
        told = self._supervisor.processes
        processes = [ProcessFacts("agent", os.getpid(), told.agent.restarts, told.agent.start_failures)]
        processes += [
            ProcessFacts(name, state.pid or None, state.restarts, state.start_failures, state.trouble)
            for name, state in (("data", told.data), ("registry", self._supervisor.registry))
            if state is not None
        ]
        return NodeFacts(
            incarnation=self._incarnation,
            data=self._data.health,
            not_up=self._data.not_up,
            has_quorum=lease is not None and lease.has_quorum(now),
            processes=tuple(processes),
        )

    def _on_fatal(self, error: Exception) -> None:
        if not self.fatal.done():
            self.fatal.set_result(error)

    def _on_voters(self, voters: Sequence[Voter]) -> None:
        self._registry.use_voters(map(voter_message, voters))
        self._voters_changed.set()

    def start(self) -> None:
        """Begin to watch, to vote if this node is a voter, and to be a member."""
        self.voter_role.start()
        self._tasks = [
            asyncio.create_task(self._supervisor.run(), name="parent"),
            asyncio.create_task(self._data.run(), name="data line"),
            asyncio.create_task(self._follow_voters(), name="voters"),
            asyncio.create_task(self._membership(), name="membership"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the agent's %s task failed", task.get_name(), exc_info=error)
            self._on_fatal(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _follow_voters(self) -> None:
        """Go by whom the registry names, as the data process has noted it."""
        while True:
            await self.voter_role.look()
            await asyncio.sleep(VOTERS_INTERVAL_S)

    # --- membership ------------------------------------------------------------------------------

    async def _membership(self) -> None:
        """Live one life after the other."""
        await self._data.ready.wait()
        while True:
            await self._register()
            self._fenced.clear()
            while not self._fenced.is_set():
                self._voters_changed.clear()
                await self._beat()
            logger.warning(
                "the registry holds incarnation %d to be over; registering anew", self._incarnation
            )

    async def _beat(self) -> None:
        """Send signs of life, until this life is over or there are other voters to send them to."""
        voters = self.voter_role.config
        lease = LeaseClock([voter.node_id for voter in voters.effective_voters], voters.lease_s)
        self._lease = lease
        self._data.live(lease)
        sender = HeartbeatSender(
            voters,
            self._heartbeat,
            self._fenced.set,
            lease,
            self._data.lease_moved,
            self.durations,
            dialer=self._dialer,
        )
        tasks = [
            asyncio.create_task(sender.run(), name="heartbeats"),
            asyncio.create_task(self._fenced.wait()),
            asyncio.create_task(self._voters_changed.wait()),
        ]
        try:
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _register(self) -> None:
        request = rpb.RegisterRequest(
            cluster_id=self._config.cluster_id,
            node_id=self._config.node_id,
            agent_address=self._config.agent_address,
            data_address=self._config.data_address,
            lane_address=self._config.lane_address,
            voter=self.voter_role.is_voter,
            ram_budget_bytes=self._config.ram_budget_bytes,
            life_id=secrets.token_hex(16),
            labels=self._config.labels,
        )
        complained = False
        while True:
            try:
                response = await self._registry.register(request, timeout_s=REGISTER_TIMEOUT_S)
            except FastCheckdError as error:
                if not complained:
                    logger.warning("cannot register yet: %s", error)
                complained = True
                await asyncio.sleep(REGISTER_PAUSE_S)
                continue
            self._incarnation = response.incarnation
            logger.info(
                "node %s is incarnation %d in epoch %d",
                self._config.node_id,
                response.incarnation,
                response.epoch,
            )
            return

    def _heartbeat(self) -> rpb.HeartbeatRequest:
        return rpb.HeartbeatRequest(
            node=pb.NodeRef(node_id=self._config.node_id, incarnation=self._incarnation),
            ram_used_bytes=self._data.ram_used_bytes,
            data=self._data.health,
            trouble="; ".join(self.facts().troubles)[:TROUBLE_CHARS_MAX],
        )

    async def stop(self) -> None:
        """Leave the cluster."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._incarnation:
            request = rpb.LeaveRequest(
                node=pb.NodeRef(node_id=self._config.node_id, incarnation=self._incarnation)
            )
            with contextlib.suppress(FastCheckdError):  # the detector will find out
                await self._registry.leave(request, timeout_s=LEAVE_TIMEOUT_S)


async def run(
    config: Config, supervisor: Supervisor, notifier: RelayedNotifier, liveness: LivenessPipe
) -> None:
    """The agent; returns after SIGTERM."""
    stopping = stop_signal()
    beating = asyncio.create_task(_tell_liveness(liveness), name="signs of life")
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
        health_ports(config, agent.facts, agent.durations, registry, health, dialer.certificates),
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
                await drain_until_told(config, registry, notifier)
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


async def _tell_liveness(liveness: LivenessPipe) -> None:
    while True:
        liveness.write()
        await asyncio.sleep(LIVENESS_INTERVAL_S)
