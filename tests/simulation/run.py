"""One seed from start to end: a cluster is drawn, runs under faults, is repaired, and has to be well again."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from tests.simulation import agent, data
from tests.simulation.deciding import LeaderCalls
from tests.simulation.faults import Faults
from tests.simulation.machine import World
from tests.simulation.training import Job
from tests.simulation.truth import QUEUE_MAX
from tests.simulation.virtual_time import StuckError
from tests.simulation.voter import grounded

from fastcheckd.registry.model import UP

TROUBLE_S = (8.0, 16.0)
QUIET_S_MAX = 8.0
#: A cluster that nothing is wrong with any more is well again by then: the leader asks every node what it holds each
#: 30 s, and makes what is not there anew.
RECOVERY_S = 75.0
#: Reports of one rank that may wait at a voter at once: of what it has under way, and of what it gave up just now.
WAITING_MAX = 8


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    seed: int
    violation: str | None
    trace: tuple[str, ...]
    digest: str
    virtual_s: float
    callbacks: int
    commits: int
    loads: int
    puts: int
    lookups: int
    repairs: int
    deletions: int
    elections: int
    cuts: int
    snapshots: int
    full_disks: int


@contextmanager
def left_alone() -> Iterator[None]:
    """What a killed process left behind is nobody's any more: it is collected after the run, and may complain."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable(logging.CRITICAL)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # "never awaited": killed before its first step
            yield
            gc.collect()
    finally:
        if collecting:
            gc.enable()
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)


def run_seed(seed: int, plant: Callable[[], AbstractContextManager[object]] | None = None) -> Outcome:
    """Run one seed; `plant` returns a context manager that breaks something first."""
    with left_alone():
        random.seed(seed)
        with nullcontext() if plant is None else plant():
            return _run(seed)


def _run(seed: int) -> Outcome:
    draw = random.Random(f"{seed}/cluster")
    tolerate = draw.choice((1, 1, 2))
    world = World(seed, tolerate, nodes=draw.randint(tolerate + 3, 6))
    machines = list(world.machines.values())
    jobs = [
        Job(world, f"job-{number}", draw.sample(machines, draw.randint(2, min(4, len(machines)))))
        for number in range(draw.choice((1, 1, 2)))
    ]
    for machine in machines:
        data.install(machine)
        agent.install(machine)
        if machine.is_voter:
            machine.install_registry()
    story = _Story(world, jobs, draw.uniform(*TROUBLE_S), draw.random() < 0.5)
    truth = world.truth
    stack = ExitStack()
    stack.enter_context(grounded(world.loop, world.hosts, world.rng("challenges")))
    truth.note(
        f"seed {seed}: {len(machines)} nodes, tolerate {tolerate}, jobs {[len(j.seats) for j in jobs]}"
    )
    asyncio.set_event_loop(world.loop)
    try:
        telling = world.loop.create_task(story.run())
        telling.add_done_callback(lambda _: world.loop.stop())
        try:
            world.loop.run_forever()
        except StuckError as error:
            truth.check(False, "life", str(error))
        if telling.done() and (failure := telling.exception()) is not None:
            raise failure
        for error in world.loop.errors:
            truth.check(False, "defect", error)
        return Outcome(
            seed,
            truth.violation,
            tuple(truth.trace),
            truth.digest,
            world.loop.now,
            world.loop.callbacks,
            truth.commits,
            truth.loads,
            truth.puts,
            truth.lookups,
            truth.repairs,
            truth.deletions.total(),
            world.consensus.elections,
            world.consensus.cuts,
            world.consensus.snapshots,
            world.consensus.full_disks,
        )
    finally:
        stack.close()
        asyncio.set_event_loop(None)
        world.loop.close()


class _Story:
    """What happens in a run."""

    def __init__(self, world: World, jobs: list[Job], trouble_s: float, trains_on: bool) -> None:
        self.world = world
        self.jobs = jobs
        self.faults = Faults(world, jobs)
        self.trouble_s = trouble_s
        self.trains_on = trains_on

    async def run(self) -> None:
        world = self.world
        for machine in world.machines.values():
            machine.start()
        working = [asyncio.ensure_future(job.run()) for job in self.jobs]
        # Before anything is committed there is little to lose.
        while len(world.truth.newest) < len(self.jobs) and world.loop.now < QUIET_S_MAX:
            await asyncio.sleep(0.25)
        breaking = asyncio.ensure_future(self.faults.run())
        watching = asyncio.ensure_future(self._watch_bounds())
        deciding = asyncio.ensure_future(LeaderCalls(world).watch())
        await asyncio.sleep(self.trouble_s)
        breaking.cancel()
        self.faults.heal()
        ending = asyncio.ensure_future(self.faults.end_drains())
        if not self.trains_on:
            world.truth.note("no more training: what is short has to be repaired")
            for task in working:
                task.cancel()
        before = dict(world.truth.commits_of)
        give_up_at = world.loop.now + RECOVERY_S
        while (missing := self._missing(before)) is not None:
            if world.loop.now > give_up_at:
                world.truth.check(
                    False,
                    "recovery",
                    f"{missing}, {RECOVERY_S:g} s after the last fault; the leader says: {self._opinion()}",
                )
                return
            await asyncio.sleep(0.25)
        for task in (breaking, ending, watching, deciding, *working):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _watch_bounds(self) -> None:
        """G6: nothing that waits or is under way piles up."""
        world, check = self.world, self.world.truth.check
        ranks = sum(len(job.seats) for job in self.jobs)
        while True:
            check(world.network.in_flight < QUEUE_MAX, "G6", f"{world.network.in_flight} calls are under way")
            for name, machine in world.machines.items():
                if machine.registry is not None and machine.process("registry") is not None:
                    reports = machine.registry._reports
                    waiting = sum(map(len, reports._waiters.values()))
                    # A rank's steps under way, each with one report that waits.
                    check(waiting <= ranks * WAITING_MAX, "G6", f"{waiting} reports wait at {name}")
                    check(
                        len(reports.collector.jobs()) <= len(self.jobs), "G6", f"{name} collects for no job"
                    )
            await asyncio.sleep(1.0)

    def _opinion(self) -> str:
        """What the leader thinks of it all, for people."""
        for machine in self.world.machines.values():
            if machine.registry is not None and machine.registry._leader.ready:
                leader = machine.registry._leader
                redundancy = str(leader.repairs.redundancy()).replace("\n", ", ")
                return f"{machine.name}: suspects {sorted(leader.suspects)}, {redundancy}"
        return "there is none"

    def _missing(self, before: dict[str, int]) -> str | None:
        """What is not well yet."""
        state = self.world.truth.state
        for name, machine in self.world.machines.items():
            node = state.nodes.get(name)
            if node is None or node.state != UP or node.incarnation != machine.agent.incarnation:
                return f"node {name} is not UP"
        for job in self.jobs if self.trains_on else ():
            if self.world.truth.commits_of[job.name] <= before.get(job.name, 0):
                return f"{job.name} has not committed a step since its commit {before.get(job.name, 0)}"
        for name in self.world.machines:
            if (key := self.world.truth.unwanted(name)) is not None:
                return f"{name} holds {key}, which was deleted"
        for name, step, rank, shard, wanted, live in self.world.truth.claims():
            digest = self.world.truth.committed[(name, step)][rank][1][shard]
            held = self.world.truth.holders(name, step, rank, shard, digest)
            if len({node for node, _ in live} & set(held)) < wanted:
                return f"{name}/{step} rank {rank} shard {shard} is recorded at {live} and held at {held}"
        return None
