"""A node: a machine with a clock and memory, and up to three processes on it that start, stop and die."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.simulation.network import Network, Servant
from tests.simulation.outward import NetworkOutward
from tests.simulation.stubs import Stub
from tests.simulation.truth import Ram, Truth
from tests.simulation.virtual_time import Clock, Process, VirtualLoop

from fastcheckd.config import Config, Voter
from fastcheckd.counters import Counters
from fastcheckd.registry.client import RegistryClient
from fastcheckd.registry.inprocess import Disk, InProcessRaft, Message
from fastcheckd.registry_server import RegistryServer, Surroundings


class World:
    """What all machines share."""

    def __init__(self, seed: int, tolerate: int, nodes: int, voters: int = 3) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.rng("network"))
        self.truth = Truth(lambda: self.loop.now, self.loop.stop, tolerate)
        names = [f"node-{i}" for i in range(nodes)]
        self.config = Config(
            cluster_id="sim",
            node_id=names[0],
            host=names[0],
            voters=tuple(
                Voter(node_id=n, registry_address=f"{n}:7500", raft_address=f"{n}:7501")
                for n in names[:voters]
            ),
            raft_key_file=Path("not-read"),
            ram_dir=Path("not-used"),
            runtime_dir=Path("not-used"),
            state_dir=Path("not-used"),
            ram_budget_bytes=1 << 30,
            chunk_bytes=64 << 10,
            tolerate=tolerate,
            worker_threads=1,
            codec_threads=1,
            heartbeat_interval_s=0.2,
            suspect_after_s=0.6,
            down_after_s=1.2,
            lease_s=0.9,
        )
        clocks = self.rng("clocks")
        self.machines = {
            name: Machine(self, name, Clock(clocks.uniform(0.95, 1.05), clocks.uniform(0, 1e5)))
            for name in names
        }

    def rng(self, concern: str) -> random.Random:
        """Chance for one concern, so that a change in one leaves the others' alone."""
        return random.Random(f"{self.seed}/{concern}")


class Machine:
    """One node and what runs on it."""

    def __init__(self, world: World, name: str, clock: Clock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.config = replace(world.config, node_id=name, host=name)
        self.is_voter = self.config.own_voter is not None
        self.disk = Disk()
        self.ram = Ram()
        world.truth.rams[name] = self.ram
        self.alive = False
        #: Counts starts of the machine; a life_id names it.
        self.boot = 0
        #: No memory for new copies.
        self.full = False
        self.servants: dict[str, tuple[str, Servant]] = {}
        self.agent: Any = None
        self.data: Any = None
        self.registry: RegistryServer | None = None
        self.raft: InProcessRaft | None = None
        self._parts: dict[str, Callable[[Process], tuple[str, Any]]] = {}

    def installs(self, part: str, starts: Callable[[Process], tuple[str, Any]]) -> None:
        """How a process of this machine is started: it returns its address and what answers there."""
        self._parts[part] = starts

    @property
    def parts(self) -> list[str]:
        return list(self._parts)

    def client(self) -> RegistryClient:
        network = self.world.network
        return RegistryClient(
            self.config, Counters(), stubs=lambda address: Stub(network, self.name, address)
        )

    def process(self, part: str) -> Process | None:
        """The living process of that kind."""
        entry = self.servants.get(part)
        return None if entry is None else entry[1].process

    def start(self) -> None:
        """Boot."""
        self.alive = True
        self.boot += 1
        self.world.network.up.add(self.name)
        for part in self._parts:
            self.start_part(part)

    def start_part(self, part: str) -> None:
        if not self.alive or part in self.servants:
            return
        process = Process(self.world.loop, f"{self.name}.{part}", self.clock)
        process.context.run(self._start_in, part, process)

    def _start_in(self, part: str, process: Process) -> None:
        address, target = self._parts[part](process)
        servant = Servant(self.name, process, target)
        self.servants[part] = (address, servant)
        self.world.network.listen(address, servant)

    def kill_part(self, part: str) -> None:
        """kill -9."""
        if part in self.servants:
            address, servant = self.servants.pop(part)
            servant.process.kill()
            self.world.network.gone(servant, address, self.alive)

    def crash(self, *, wipe: bool) -> None:
        """Power off; with `wipe` what was in memory is lost."""
        self.alive = False
        self.world.network.up.discard(self.name)
        for part in list(self.servants):
            self.kill_part(part)
        if wipe:
            self.ram.replicas.clear()

    def install_registry(self) -> None:
        """Make it a voter: the real server around the simulation's engine."""
        world, rng = self.world, self.world.rng(f"raft/{self.name}")

        def start(process: Process) -> tuple[str, Any]:
            life = f"{self.name}/{self.disk.starts}"

            def engine(config: Config, on_change: Callable[[], None]) -> InProcessRaft:
                self.raft = InProcessRaft(
                    config,
                    on_change,
                    disk=self.disk,
                    wire=self,
                    rng=rng,
                    on_applied=lambda *entry: world.truth.applied(life, *entry),
                )
                return self.raft

            self.registry = RegistryServer(
                self.config,
                Surroundings(
                    engine=engine,
                    outward=NetworkOutward(world.network, self.name),
                    stubs=lambda address: Stub(world.network, self.name, address),
                    draw=world.rng(f"askers/{self.name}"),
                    wall_ms=lambda: int(world.loop.now * 1000),
                ),
            )
            assert self.raft is not None and self.config.own_voter is not None
            process.call(self.raft.start)
            process.start(self.registry.lead())
            return self.config.own_voter.registry_address, self.registry.service

        self.installs("registry", start)

    def send(self, sender: str, receiver: str, message: Message) -> None:
        """The wire of this machine's engine."""
        there = self.world.machines[receiver]
        process = there.process("registry")
        if process is not None and there.raft is not None:
            network = self.world.network
            network.post(sender, receiver, process, there.raft.receive, message)
            if network.weather.repeats and network.rng.random() < network.weather.repeats:
                process.later(network.rng.random(), there.raft.receive, message)
