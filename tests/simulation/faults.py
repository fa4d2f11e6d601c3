"""What goes wrong, drawn from a seed, and how much of it the guarantees still cover.

Memory is taken away only as far as the registry's own words allow: `tolerate` times since it last said of every
newest committed step that all its copies live, none of them one that was taken. The truth is not asked, so a
registry that says more than it has is found out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import product

from tests.simulation.machine import Machine, World
from tests.simulation.training import Job
from tests.simulation.truth import COPY, OWNER

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import FastCheckdError
from fastcheckd.registry.client import RegistryClient
from fastcheckd.registry.model import DOWN


@dataclass(frozen=True)
class Damage:
    """Memory that was taken: all that a machine had up to a boot, or one shard's replica."""

    node: str
    boot: int
    shard: tuple[str, int, int, int] | None = None


class Faults:
    """The injector."""

    def __init__(self, world: World, jobs: list[Job]) -> None:
        self.world = world
        self.jobs = jobs
        self.rng = world.rng("faults")
        self.machines = list(world.machines.values())
        self.damages: list[Damage] = []
        self.over = False
        kinds: dict[Callable[[Machine], None], int] = {
            self._lose: 5,
            self._crash: 3,
            self._kill: 4,
            self._pause: 4,
            self._partition: 3,
            self._isolate: 2,
            self._one_link: 2,
            self._bad_links: 2,
            self._fill: 1,
            self._restart_job: 2,
            self._take_over: 1,
            self._corrupt: 2,
            self._drain: 1,
            self._leave: 1,
            self._delete: 2,
            self._kill_within: 3,
            self._kill_voters: 2,
            self._fill_disk: 2,
            self._slow_disk: 1,
        }
        self.voters = [m for m in self.machines if m.is_voter]
        self._kinds, self._weights = list(kinds), list(kinds.values())
        #: Some seeds are quiet, some are not.
        self._pause_s = self.rng.choice((0.5, 1.0, 2.0))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self._pause_s))
            fault = self.rng.choices(self._kinds, self._weights)[0]
            fault(self.rng.choice(self.machines))

    def heal(self) -> None:
        """Everything is repaired, once and for all."""
        self.over = True
        self.world.network.weather.clear()
        for machine in self.machines:
            machine.full = machine.platter.full = False
            machine.platter.sync_s = 0.0
            self._start(machine)
            for _, servant in machine.servants.values():
                servant.process.resume()
                if servant.process.voter is not None:
                    servant.process.voter.fuse = None
            self._scrub(machine)
        for job in self.jobs:
            job.restart = True
        self._note("all is healed")

    async def end_drains(self) -> None:
        """An operator undoes every drain, again if one that was asked for comes late."""
        while True:
            for name, node in list(self.world.truth.state.nodes.items()):
                if node.draining:
                    self._set_draining(name, False)
            await asyncio.sleep(1.0)

    def _note(self, what: str) -> None:
        self.world.truth.note(f"** {what}")

    def _after(self, seconds: float, work: Callable[..., object], *args: object) -> None:
        """Later, unless all has been repaired by then."""
        self.world.loop.at(
            self.world.loop.now + seconds, lambda: None if self.over else work(*args), (), None
        )

    # Memory

    def _budget(self) -> bool:
        """Whether memory may be taken away once more.

        Not before the registry knows of the last time: until then it may commit a step that was replicated before,
        and nodes that are lost within that time are lost at once.
        """
        if self.damages and all(map(self._noticed, self.damages)) and self._all_live():
            self.damages.clear()
        return len(self.damages) < self.world.config.tolerate

    def _noticed(self, damage: Damage) -> bool:
        node = self.world.truth.state.nodes.get(damage.node)
        if damage.shard is not None or node is None or node.state == DOWN:
            return True
        return int(node.life_id.split("-")[0]) > damage.boot

    def _all_live(self) -> bool:
        return all(
            sum(not self._damaged(ref, (job, step, rank, shard)) for ref in live) >= wanted
            for job, step, rank, shard, wanted, live in self.world.truth.claims()
        )

    def _damaged(self, ref: tuple[str, int], shard: tuple[str, int, int, int]) -> bool:
        boot = int(self.world.truth.state.nodes[ref[0]].life_id.split("-")[0])
        return any(
            damage.node == ref[0] and (boot <= damage.boot if damage.shard is None else damage.shard == shard)
            for damage in self.damages
        )

    def _lose(self, machine: Machine) -> None:
        if not machine.alive or not self._budget():
            return
        self.damages.append(Damage(machine.name, machine.boot))
        down_s = self.rng.uniform(0.3, 4)
        self._note(f"{machine.name} is lost with its memory, back in {down_s:.1f} s")
        machine.crash(wipe=True, power_cut=True)
        self.world.truth.check_survival(f"the loss of {machine.name}")
        self._after(down_s, self._start, machine)

    def _corrupt(self, machine: Machine) -> None:
        newest = self.world.truth.newest
        keys = [k for k, r in machine.ram.replicas.items() if r.intact and newest.get(k[1]) == k[2]]
        if not keys or not self._budget():
            return
        kind, *shard = self.rng.choice(keys)
        self.damages.append(Damage(machine.name, machine.boot, (shard[0], shard[1], shard[2], shard[3])))
        self._note(f"{machine.name}: {'owner' if kind == OWNER else 'copy'} of {shard} goes bad")
        for bad in (OWNER, COPY):
            if (replica := machine.ram.replicas.get((bad, *shard))) is not None:  # type: ignore[arg-type]
                replica.intact = False
        self.world.truth.check_survival(f"a replica at {machine.name} went bad")
        self._after(self.rng.uniform(0.5, 4), self._scrub, machine)

    def _scrub(self, machine: Machine) -> None:
        process = machine.process("data")
        if process is not None:
            process.call(machine.data.scrub)

    def _fill(self, machine: Machine) -> None:
        machine.full = True
        self._note(f"{machine.name} has no memory left")
        self._after(self.rng.uniform(0.5, 4), setattr, machine, "full", False)

    # Processes

    def _start(self, machine: Machine) -> None:
        if not machine.alive:
            machine.start()
            self._note(f"{machine.name} boots")
        for part in machine.parts:
            machine.start_part(part)

    def _crash(self, machine: Machine) -> None:
        """All processes ended, or power off and on at once: memory stays, what was on its way to the disk may not."""
        if machine.alive:
            down_s, power_cut = self.rng.uniform(0.2, 4), self.rng.random() < 0.5
            self._note(
                f"{machine.name} crashes{' without power' if power_cut else ''}, back in {down_s:.1f} s"
            )
            machine.crash(wipe=False, power_cut=power_cut)
            self._after(down_s, self._start, machine)

    def _kill(self, machine: Machine) -> None:
        part = self.rng.choice(machine.parts)
        if not machine.alive:
            return
        # An agent's children die with it.
        parts = machine.parts if part == "agent" else [part]
        self._note(f"{machine.name}: kill {' '.join(parts)}")
        for one in parts:
            machine.kill_part(one)
        self._after(self.rng.uniform(0.1, 1.5), self._start, machine)

    def _kill_within(self, machine: Machine) -> None:
        """A voter dies in the middle of what it handles."""
        voter = self.rng.choice(self.voters)
        self._within(voter)

    def _within(self, machine: Machine) -> None:
        process = machine.process("registry")
        if process is not None:
            process.voter.fuse = self.rng.randint(1, 80)

    def _kill_voters(self, machine: Machine) -> None:
        """All voters at once, or within a few operations of each; the room that they are in may lose its power."""
        power_cut, at_once = self.rng.random() < 0.4, self.rng.random() < 0.5
        self._note(
            f"all voters die {'at once' if at_once else 'soon'}{', without power' if power_cut else ''}"
        )
        for voter in self.voters:
            if not at_once:
                self._within(voter)
            self._after(0.0 if at_once else 0.05, self._end_voter, voter, power_cut)
            self._after(self.rng.uniform(0.2, 2), self._start, voter)

    def _end_voter(self, machine: Machine, power_cut: bool) -> None:
        machine.kill_part("registry")
        if power_cut:
            machine.platter.cut_power()

    def _fill_disk(self, machine: Machine) -> None:
        """A voter's state directory is full, more often than not the leader's."""
        leading = [
            v for v in self.voters if v.process("registry") and v.raft is not None and v.raft.is_leader
        ]
        voter = self.rng.choice([*self.voters, *leading, *leading])
        seconds = self.rng.uniform(0.3, 8)
        self._note(f"{voter.name}'s disk is full for {seconds:.1f} s")
        voter.platter.full = True
        self._after(seconds, setattr, voter.platter, "full", False)

    def _slow_disk(self, machine: Machine) -> None:
        voter = self.rng.choice(self.voters)
        seconds, sync_s = self.rng.uniform(0.5, 4), self.rng.choice((0.005, 0.05, 0.2))
        self._note(f"{voter.name}'s disk takes {sync_s} s for a sync, for {seconds:.1f} s")
        voter.platter.sync_s = sync_s
        self._after(seconds, setattr, voter.platter, "sync_s", 0.0)

    def _pause(self, machine: Machine) -> None:
        part = self.rng.choice([*machine.parts, "all"])
        seconds = self.rng.uniform(0.2, 3)
        processes = [p for name in machine.parts if part in (name, "all") and (p := machine.process(name))]
        self._note(f"{machine.name}: {part} stands still for {seconds:.1f} s")
        for process in processes:
            process.pause()
            self._after(seconds, process.resume)

    def _leave(self, machine: Machine) -> None:
        """SIGTERM: the node leaves in good order, and comes back."""
        agent, process = machine.agent, machine.process("agent")
        if not machine.alive or process is None:
            return

        async def leave() -> None:
            ref = pb.NodeRef(node_id=machine.name, incarnation=agent.incarnation)
            with contextlib.suppress(FastCheckdError):
                await agent.client.leave(rpb.LeaveRequest(node=ref), timeout_s=1.0)
            for part in machine.parts:
                machine.kill_part(part)
            if self.over:
                self._start(machine)

        self._note(f"{machine.name} leaves")
        process.start(leave())
        self._after(self.rng.uniform(1.5, 4), self._start, machine)

    def _drain(self, machine: Machine) -> None:
        if not any(node.draining for node in self.world.truth.state.nodes.values()):
            self._note(f"{machine.name} is drained")
            self._set_draining(machine.name, True)
            self._after(self.rng.uniform(1, 5), self._set_draining, machine.name, False)

    def _set_draining(self, name: str, draining: bool) -> None:
        request = rpb.SetDrainingRequest(node_id=name, draining=draining)
        self._ask(lambda client: client.set_draining(request, timeout_s=3.0))

    def _ask(self, question: Callable[[RegistryClient], Awaitable[object]]) -> None:
        """Somebody asks the registry, from anywhere."""
        there = [m for m in self.machines if m.process("agent") is not None]
        if not there:
            return
        desk = self.rng.choice(there)
        process = desk.process("agent")
        assert process is not None

        async def ask() -> None:
            with contextlib.suppress(FastCheckdError):
                await question(desk.agent.client)

        process.start(ask())

    def _delete(self, machine: Machine) -> None:
        """An operator deletes an older step, the newest or all of a job, whose trainers may be running."""
        job = self.rng.choice(self.jobs).name
        kept = self.world.truth.kept.get(job) or [-1]
        step = self.rng.choice((kept[0], kept[0], kept[-1], None))
        if step == -1:
            return
        word = self.rng.random() < 0.7
        self._note(
            f"somebody deletes {job}/{'all' if step is None else step}{', though it runs' if word else ''}"
        )
        request = rpb.DeleteStepsRequest(job=job, step=step, even_if_running=word)
        self._ask(lambda client: client.delete_steps(request, timeout_s=3.0))

    # Links

    def _partition(self, machine: Machine) -> None:
        side = {m.name for m in self.machines if m is machine or self.rng.random() < 0.4}
        both = self.rng.random() < 0.7
        self._cut(
            (
                link
                for link in self._links()
                if (link[0] in side) != (link[1] in side) and (both or link[0] in side)
            ),
            f"{sorted(side)} {'and the others are apart' if both else 'are not heard by the others'}",
        )

    def _isolate(self, machine: Machine) -> None:
        self._cut((link for link in self._links() if machine.name in link), f"{machine.name} is cut off")

    def _one_link(self, machine: Machine) -> None:
        other = self.rng.choice(self.machines)
        both = self.rng.random() < 0.5
        links = [(machine.name, other.name)] + ([(other.name, machine.name)] if both else [])
        self._cut((link for link in links if link[0] != link[1]), f"{machine.name} to {other.name} is cut")

    def _links(self) -> Iterator[tuple[str, str]]:
        names = self.world.machines
        return ((a, b) for a, b in product(names, names) if a != b)

    def _cut(self, links: Iterator[tuple[str, str]], what: str) -> None:
        cut = sorted(links)
        seconds = self.rng.uniform(0.3, 4)
        self._note(f"{what} for {seconds:.1f} s")
        self.world.network.weather.cut.update(cut)
        self._after(seconds, self.world.network.weather.cut.difference_update, cut)

    def _bad_links(self, machine: Machine) -> None:
        weather = self.world.network.weather
        links = [link for link in self._links() if self.rng.random() < 0.4]
        loss, slow_s = self.rng.uniform(0, 0.4), self.rng.choice((0.0, 0.02, 0.2, 0.8))
        weather.repeats = self.rng.choice((0.0, 0.05))
        seconds = self.rng.uniform(0.5, 4)
        self._note(f"{len(links)} links lose {loss:.2f} and take up to {slow_s} s for {seconds:.1f} s")
        weather.lossy = dict.fromkeys(links, loss)
        weather.slow = dict.fromkeys(links, slow_s)
        self._after(seconds, self._good_links)

    def _good_links(self) -> None:
        weather = self.world.network.weather
        weather.lossy, weather.slow, weather.repeats = {}, {}, 0.0

    # Trainers

    def _restart_job(self, machine: Machine) -> None:
        job = self.rng.choice(self.jobs)
        self._note(f"all trainers of {job.name} start anew")
        job.restart = True

    def _take_over(self, machine: Machine) -> None:
        job = self.rng.choice(self.jobs)
        job.takeover = self.rng.randrange(len(job.seats))
        self._note(f"rank {job.takeover} of {job.name} starts anew")
