"""A node's agent: registers through the real client, beats to every voter, tells its data process who it is.

Heartbeats are the most frequent messages by far and travel as bare callbacks into what the real servicer does with
one; there is no stream around them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.simulation.machine import Machine
from tests.simulation.virtual_time import Process

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import FastCheckdError
from fastcheckd.services.registry import RegistryService

ASSUME_S = 0.5
DATA_SILENT_S = 2.0
REGISTER_TIMEOUT_S = 5.0
REGISTER_PAUSE_S = 0.5


class Agent:
    """One life of an agent process."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.client = machine.client()
        self.incarnation = 0
        self._lives = 0
        self._fenced = asyncio.Event()
        self._reborn = asyncio.Event()
        self._data_heard_at = float("-inf")
        self._seq = 0

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
            life_id=f"{machine.boot}-{machine.disk.starts}-{self.process.now:.6f}-{self._lives}",
        )
        while True:
            try:
                response = await self.client.register(request, timeout_s=REGISTER_TIMEOUT_S)
            except FastCheckdError:
                await asyncio.sleep(REGISTER_PAUSE_S)
                continue
            self.incarnation = response.incarnation
            self._reborn.set()
            return

    # The data process

    def _data_ready(self) -> bool:
        return self.process.now - self._data_heard_at < DATA_SILENT_S

    async def _assume(self) -> None:
        while True:
            data = self.machine.process("data")
            if data is not None:
                data.call(self.machine.data.assume, self.incarnation, self._heard_data)
            else:
                self._data_heard_at = float("-inf")
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

    # Signs of life

    def _beat(self) -> None:
        config, network = self.machine.config, self.machine.world.network
        if self.incarnation:
            self._seq += 1
            ready = self._data_ready()
            request = rpb.HeartbeatRequest(
                node=pb.NodeRef(node_id=config.node_id, incarnation=self.incarnation),
                data=rpb.DATA_HEALTH_OK if ready else rpb.DATA_HEALTH_GONE,
                seq=self._seq,
            )
            for voter in config.effective_voters:
                there = self.machine.world.machines[voter.node_id]
                registry = there.process("registry")
                if registry is not None and there.registry is not None:
                    service = there.registry.service
                    network.post(
                        config.node_id,
                        voter.node_id,
                        registry,
                        self._arrived,
                        there,
                        registry,
                        service,
                        request,
                    )
        self.process.later(config.heartbeat_interval_s / self.process.clock.rate, self._beat)

    def _arrived(
        self, voter: Machine, registry: Process, service: RegistryService, request: rpb.HeartbeatRequest
    ) -> None:
        """At the voter."""
        news = service._heard(request)
        if news[0]:
            registry.start(self._sure(voter, service, request))

    async def _sure(self, voter: Machine, service: RegistryService, request: rpb.HeartbeatRequest) -> None:
        news = await service._sure_that_fenced(request)
        if news[0] and news[2] == voter.name:
            self.machine.world.network.post(
                voter.name, self.machine.name, self.process, self._over, request.node.incarnation
            )

    def _over(self, incarnation: int) -> None:
        if incarnation == self.incarnation and not self._fenced.is_set():
            self._fenced.set()

    # What it answers

    async def Probe(self, request: npb.ProbeRequest, context: Any) -> npb.ProbeResponse:
        return npb.ProbeResponse(node_id=self.machine.name, incarnation=self.incarnation)


def install(machine: Machine) -> None:
    """Make the agent a part of a machine."""

    def start(process: Process) -> tuple[str, Any]:
        machine.agent = agent = Agent(machine, process)
        process.start(agent.run())
        return machine.config.agent_address, agent

    machine.installs("agent", start)
