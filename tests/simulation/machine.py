"""A node: a machine with a clock and memory, and up to three processes on it that start, stop and die."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.simulation import voter
from tests.simulation.consensus import Consensus
from tests.simulation.disk import Platter
from tests.simulation.network import Network, Servant
from tests.simulation.outward import NetworkOutward
from tests.simulation.sockets import Hosts
from tests.simulation.stubs import Stub
from tests.simulation.truth import Ram, Truth
from tests.simulation.virtual_time import Clock, Process, VirtualLoop

from fastcheckd.config import Config, Voter
from fastcheckd.counters import Counters
from fastcheckd.process.registry import RegistryServer, VoterEnvironment
from fastcheckd.registry.client import RegistryClient
from fastcheckd.registry.raft.adapter import Raft

#: A process that has ended by itself is started again after this long.
RESTART_S = 0.5
#: How often a voter looks whether its disk has room.
ROOM_PAUSE_S = 1.0


class World:
    """What all machines share."""

    def __init__(self, seed: int, tolerate: int, nodes: int, voters: int = 3) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.rng("network"))
        self.truth = Truth(lambda: self.loop.now, self.loop.stop, tolerate)
        self.consensus = Consensus(voters, self.truth.check)
        names = [f"node-{i}" for i in range(nodes)]
        self.hosts = Hosts(self.network, {f"10.0.0.{i}": n for i, n in enumerate(names[:voters])})
        self.config = Config(
            cluster_id="sim",
            node_id=names[0],
            host=names[0],
            voters=tuple(
                Voter(node_id=n, registry_address=f"{n}:7500", raft_address=f"10.0.0.{i}:7501")
                for i, n in enumerate(names[:voters])
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
        #: Of a voter: its disk, how often its process was started, and the entry that it applies.
        self.platter = Platter(world.rng(f"disk/{name}"))
        self.lives = 0
        self.applying = 0
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
        self.raft: Raft | None = None
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
        if part == "registry" and self.platter.full:
            # As the real process does before it opens anything.
            self.restart_registry(ROOM_PAUSE_S)
            return
        process = Process(self.world.loop, f"{self.name}.{part}", self.clock, self.name)
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

    def crash(self, *, wipe: bool, power_cut: bool = False) -> None:
        """All its processes end at once; with `wipe` what was in memory is lost, with `power_cut` what no disk has."""
        self.alive = False
        self.world.network.up.discard(self.name)
        for part in list(self.servants):
            self.kill_part(part)
        if wipe:
            self.ram.replicas.clear()
        if power_cut:
            self.platter.cut_power()

    def install_registry(self) -> None:
        """Make it a voter: the real server around the real engine, on the simulation's ground."""
        world = self.world

        def start(process: Process) -> tuple[str, Any]:
            self.lives += 1
            life = f"{self.name}/{self.lives}"
            voter.VoterProcess(self, process)

            def engine(config: Config, on_change: Callable[[], None]) -> Raft:
                self.raft = voter.make(self, config, on_change, life)
                return self.raft

            self.registry = RegistryServer(
                self.config,
                VoterEnvironment(
                    engine=engine,
                    outward=NetworkOutward(world.network, self.name),
                    stubs=lambda address: Stub(world.network, self.name, address),
                    draw=world.rng(f"askers/{self.name}"),
                    wall_ms=lambda: int(world.loop.now * 1000),
                ),
            )
            assert self.raft is not None and self.config.own_voter is not None
            self.raft.start()
            process.start(self.registry.lead())
            process.start(self._end(process, self.registry))
            return self.config.own_voter.registry_address, self.registry.service

        self.installs("registry", start)

    async def _end(self, process: Process, registry: RegistryServer) -> None:
        """A voter that can go on no more ends, and its agent starts it again."""
        failure = await registry.wait_failed()
        self.world.truth.note(f"{process.name} ends: {failure}")
        self.world.consensus.full_disks += 1
        self.world.loop.at(self.world.loop.now, self.kill_part, ("registry",), None)
        self.restart_registry()

    def restart_registry(self, seconds: float = RESTART_S) -> None:
        """As its agent does when the process has ended by itself."""
        self.world.loop.at(self.world.loop.now + seconds, self.start_part, ("registry",), None)
