"""A node's agent: registers through the real client, beats to every voter, keeps the real lease clock, tells its
data process who it is and for how long.

Heartbeats are the most frequent messages by far. They travel as bare callbacks into what the real servicer does with
one, and their answers into the real lease clock; there is no stream around them but its end, which voters hear of.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.simulation.machine import Machine
from tests.simulation.outward import NetworkOutward
from tests.simulation.virtual_time import Process

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import FastCheckdError
from fastcheckd.health.detector import Life
from fastcheckd.health.lease_clock import LeaseClock
from fastcheckd.health.probe import bounded_timeout_s, to_wire
from fastcheckd.services.registry import RegistryService

ASSUME_S = 0.5
DATA_SILENT_S = 2.0
HOLD_PAUSE_S = 0.1
REGISTER_TIMEOUT_S = 5.0
REGISTER_PAUSE_S = 0.5


class Agent:
    """One life of an agent process."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.client = machine.client()
        self.incarnation = 0
        self._outward = NetworkOutward(machine.world.network, machine.name)
        self._lives = 0
        self._fenced = asyncio.Event()
        self._reborn = asyncio.Event()
        self._data_heard_at = float("-inf")
        self._data_process: Process | None = None
        self._seq = 0
        self._lease = LeaseClock((), 1.0)
        self._lease_told = 0.0
        process.mourners["streams"] = self._streams_end

    async def run(self) -> None:
        """One life after the other."""
        self.process.start(self._assume())
        while not self._data_ready():
            await asyncio.sleep(0.05)
        self._beat()
        while True:
            await self._register()
            self._fenced.clear()
            await self._fenced.wait()
            self.machine.world.truth.note(f"{self.machine.name}#{self.incarnation} hears that it is over")

    async def _register(self) -> None:
        machine, config = self.machine, self.machine.config
        self._lives += 1
        request = rpb.RegisterRequest(
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            agent_address=config.agent_address,
            data_address=config.data_address,
            lane_address=config.lane_address,
            voter=machine.is_voter,
            ram_budget_bytes=config.ram_budget_bytes,
            life_id=f"{machine.boot}-{self.process.now:.6f}-{self._lives}",
        )
        while True:
            try:
                response = await self.client.register(request, timeout_s=REGISTER_TIMEOUT_S)
            except FastCheckdError:
                await asyncio.sleep(REGISTER_PAUSE_S)
                continue
            self.incarnation = response.incarnation
            self._lease = LeaseClock([v.node_id for v in config.effective_voters], config.lease_s)
            self._reborn.set()
            return

    # The data process

    def _data_ready(self) -> bool:
        return self.process.now - self._data_heard_at < DATA_SILENT_S

    async def _assume(self) -> None:
        while True:
            data = self.machine.process("data")
            if data is not self._data_process:
                self._data_process = data
                self._data_heard_at = float("-inf")
            if data is not None:
                data.call(self.machine.data.assume, self.incarnation, self._heard_data)
            try:
                async with asyncio.timeout(ASSUME_S if self._data_ready() else ASSUME_S / 5):
                    await self._reborn.wait()
            except TimeoutError:
                pass
            self._reborn.clear()

    def _heard_data(self) -> None:
        self.process.call(self._note_data)

    def _note_data(self) -> None:
        self._data_heard_at = self.process.now
        self._tell_lease()

    def _tell_lease(self) -> None:
        data, deadline = self.machine.process("data"), self._lease.deadline()
        self._lease_told = self.process.now
        if data is not None and deadline is not None:
            has_quorum = self._lease.has_quorum(self.process.now)
            data.call(self.machine.data.hold, self.incarnation, int(deadline * 1e9), has_quorum)

    # Signs of life

    def _beat(self) -> None:
        config, network = self.machine.config, self.machine.world.network
        if self.incarnation:
            self._seq += 1
            request = rpb.HeartbeatRequest(
                node=pb.NodeRef(node_id=config.node_id, incarnation=self.incarnation),
                data=rpb.DATA_HEALTH_OK if self._data_ready() else rpb.DATA_HEALTH_GONE,
                seq=self._seq,
            )
            now = self.process.now
            for voter in config.effective_voters:
                there = self.machine.world.machines[voter.node_id]
                registry = there.process("registry")
                self._lease.sent(voter.node_id, self._seq, now)
                if registry is not None:
                    network.post(
                        config.node_id, voter.node_id, registry, self._arrived, there, registry, request
                    )
        self.process.later(config.heartbeat_interval_s / self.process.clock.rate, self._beat)

    def _arrived(self, voter: Machine, registry: Process, request: rpb.HeartbeatRequest) -> None:
        """At the voter: the body of `RegistrySigns.Heartbeat`."""
        assert voter.registry is not None
        service = voter.registry.service
        life = (request.node.node_id, request.node.incarnation)
        now = registry.now
        over, _, _ = service._heard(life, request, now)
        if over and service._leader.ready:
            registry.start(self._sure(voter, service, life))
        lease_seq = 0 if over or not service._renews(life, now) else request.seq
        self.machine.world.network.post(
            voter.name, self.machine.name, self.process, self._answered, voter.name, life[1], lease_seq
        )

    async def _sure(self, voter: Machine, service: RegistryService, life: Life) -> None:
        if await service._sure_that_fenced(life):
            self.machine.world.network.post(voter.name, self.machine.name, self.process, self._over, life[1])

    def _answered(self, voter: str, incarnation: int, lease_seq: int) -> None:
        if incarnation == self.incarnation:
            self._lease.answered(voter, lease_seq, self.process.now)
            if self.process.now - self._lease_told >= HOLD_PAUSE_S:
                self._tell_lease()

    def _over(self, incarnation: int) -> None:
        if incarnation == self.incarnation and not self._fenced.is_set():
            self._fenced.set()

    def _streams_end(self) -> None:
        """This process has died: its machine, if it lives, closes the connections to the voters."""
        if not self.machine.alive or not self.incarnation:
            return
        for voter in self.machine.config.effective_voters:
            there = self.machine.world.machines[voter.node_id]
            registry = there.process("registry")
            if registry is not None:
                self.machine.world.network.post(
                    self.machine.name, voter.node_id, registry, _broke, there, registry,
                    (self.machine.name, self.incarnation),
                )  # fmt: skip

    # What it answers

    async def Probe(self, request: npb.ProbeRequest, context: Any) -> npb.ProbeResponse:
        return npb.ProbeResponse(node_id=self.machine.name, incarnation=self.incarnation)

    async def ProbeFor(self, request: npb.ProbeForRequest, context: Any) -> npb.ProbeForResponse:
        life = (request.node.node_id, request.node.incarnation)
        timeout_s = bounded_timeout_s(request.timeout_s)
        return npb.ProbeForResponse(
            finding=to_wire(await self._outward.probe(request.agent_address, life, timeout_s))
        )


def _broke(voter: Machine, registry: Process, life: Life) -> None:
    """At the voter: the end of `RegistrySigns.Heartbeat`."""
    assert voter.registry is not None
    voter.registry.service._detector.broke(life, registry.now)
    voter.registry.service._leader.arbiter.wake()


def install(machine: Machine) -> None:
    """Make the agent a part of a machine."""

    def start(process: Process) -> tuple[str, Any]:
        machine.agent = agent = Agent(machine, process)
        process.start(agent.run())
        return machine.config.agent_address, agent

    machine.installs("agent", start)
