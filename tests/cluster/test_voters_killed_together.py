"""All voters are killed at once, again and again, while steps are committed and sessions are opened.

Every voter restarts with what lies in its log and nothing else, so an acknowledged entry that any of them has dropped
may be lost for good. `make test` has a few rounds; `make test-long` has fifty.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tests.cluster import session_flood
from tests.cluster.harness import leader, paused, process_of, until

from fastcheck import Checkpointer, FastCheckError
from fastcheck.local import LocalCluster

NODES = ["node-0", "node-1", "node-2"]
#: So that a lost step is missed even where later ones were committed after it.
KEEP_STEPS = 30
#: What one node may log for one round: restarts of a process, elections, calls that found no leader.
LINES_PER_ROUND_MAX = 150
SEED = int(os.environ.get("FASTCHECK_KILLS_SEED", str(random.randrange(10**6))))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("killed") / "cluster") as cluster:
        cluster.up(3, ram_budget="256MiB", tls=True, settings={"keep_steps": KEEP_STEPS})
        yield cluster


class Saver(threading.Thread):
    """A job of one rank that commits step after step, and knows which commits it was told of."""

    def __init__(self, cluster: LocalCluster, node: str) -> None:
        super().__init__(name=f"saver of {node}", daemon=True)
        self.ckpt = Checkpointer(f"job-{node}", rank=0, world_size=1, address=cluster.address(node))
        self.told = self.ckpt.steps()
        self.going = threading.Event()
        self.ending = False

    def run(self) -> None:
        step = max(self.told, default=0)
        while not self.ending:
            self.going.wait()
            step += 1
            with contextlib.suppress(FastCheckError):  # not known to be committed
                self.ckpt.save(step, {"x": torch.full((4,), float(step))}).result(timeout=30)
                self.told.append(step)

    def missing(self) -> list[int]:
        """Steps that this job was told of, that would be kept, and that the registry does not know."""
        told = self.told[-KEEP_STEPS // 2 :]
        known = self.ckpt.steps()
        newer = [step for step in known if step > told[-1]]
        assert len(newer) < KEEP_STEPS // 2
        return sorted(set(told) - set(known))


@contextlib.contextmanager
def flooded(cluster: LocalCluster) -> Iterator[None]:
    sockets = [str(Path(cluster.address(n).removeprefix("unix://")).with_name("data.sock")) for n in NODES]
    command = [sys.executable, "-P", str(Path(session_flood.__file__)), *sockets]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(command, env=environment) as flood:
        try:
            yield
        finally:
            flood.kill()


def registry_of(cluster: LocalCluster, node: str) -> psutil.Process | None:
    with contextlib.suppress(AssertionError):
        return process_of(cluster, node, "registry")
    return None


def lines(cluster: LocalCluster) -> dict[str, int]:
    return {node: len(cluster.log_file(node).read_text().splitlines()) for node in NODES}


@pytest.fixture
def savers(cluster: LocalCluster) -> Iterator[list[Saver]]:
    made = [Saver(cluster, node) for node in NODES]
    for saver in made:
        saver.start()
    yield made
    for saver in made:
        saver.ending = True
        saver.going.set()
    for saver in made:
        saver.join(60)
        saver.ckpt.close()


def commit_for_a_while(savers: list[Saver], seconds: float) -> None:
    """Every job commits, and goes on."""
    counts = [len(saver.told) for saver in savers]
    for saver in savers:
        saver.going.set()
    until(
        lambda: all(len(s.told) > count for s, count in zip(savers, counts, strict=True)),
        "commits of every job",
    )
    time.sleep(seconds)  # not a wait: the moment of what happens next is drawn


def nothing_is_lost(savers: list[Saver]) -> None:
    for saver in savers:
        saver.going.clear()
    for saver in savers:
        lost = until(lambda saver=saver: [saver.missing()], "the registry to answer")[0]
        assert lost == [], f"{saver.name} was told that steps {lost} are committed; they are gone"


def voters_of(cluster: LocalCluster) -> dict[str, psutil.Process]:
    return {
        node: until(lambda node=node: registry_of(cluster, node), f"{node}'s registry process")
        for node in NODES
    }


def parent_of(cluster: LocalCluster, node: str) -> psutil.Process:
    return psutil.Process(cluster.pids(node)[0])


def signal_to(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1, marks=pytest.mark.timeout(300)),
        pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
    ],
)
def test_g3_no_committed_step_is_lost_when_all_voters_are_killed_at_once(cluster, savers, rounds):
    print(f"FASTCHECK_KILLS_SEED={SEED}")
    rng = random.Random(SEED)
    with flooded(cluster):
        for number in range(rounds):
            before = lines(cluster)
            commit_for_a_while(savers, rng.uniform(0.0, 1.5))
            voters = voters_of(cluster)
            leads = until(lambda: leader(cluster, NODES[0]), "a leader")
            others = [node for node in NODES if node != leads]
            # One of them misses the last steps; and the leader, who has all of them, comes back after the others.
            behind = rng.choice(others)
            with paused(parent_of(cluster, leads)):
                signal_to(voters[behind], signal.SIGSTOP)
                time.sleep(rng.uniform(0.2, 0.6))  # not a wait, as above
                for saver in savers:
                    saver.going.clear()
                for voter in voters.values():
                    signal_to(voter, signal.SIGKILL)
                told = [saver.told[-1] for saver in savers]
                print(f"round {number}: {leads} led, {behind} stood still; told {told}", flush=True)
                until(lambda others=others: leader(cluster, others[0]) in others, "a leader among those two")
            nothing_is_lost(savers)
            wrote = {node: count - before[node] for node, count in lines(cluster).items()}
            print(f"lines in the logs: {wrote}", flush=True)
            assert max(wrote.values()) <= LINES_PER_ROUND_MAX, wrote


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1, marks=pytest.mark.timeout(300)),
        pytest.param(30, marks=[pytest.mark.long, pytest.mark.timeout(2000)]),
    ],
)
def test_g3_the_leader_dies_while_a_voter_that_was_away_catches_up(cluster, savers, rounds):
    with flooded(cluster):
        for _ in range(rounds):
            commit_for_a_while(savers, 0.0)
            voters = voters_of(cluster)
            leads = until(lambda: leader(cluster, NODES[0]), "a leader")
            away = next(node for node in NODES if node != leads)
            log = cluster.dir / away / "state" / "registry" / "log"
            with paused(parent_of(cluster, away)):
                signal_to(voters[away], signal.SIGKILL)
                size = log.stat().st_size
                commit_for_a_while([s for s in savers if away not in s.name], 1.5)
            # Its agent starts it again, and the leader sends what it has missed, while more is coming.
            until(lambda log=log, size=size: log.stat().st_size != size, f"{away} to catch up")
            # The dead leader stays away until there is another: back within the others' election timeout, it may win.
            with paused(parent_of(cluster, leads)):
                signal_to(voters[leads], signal.SIGKILL)
                until(
                    lambda away=away, leads=leads: leader(cluster, away) not in {"", leads}, "another leader"
                )
            nothing_is_lost(savers)
