"""Kills of random processes under a job that saves without pause: no committed step is lost, loads are exact.

Nobody waits for anybody:
the moment of each kill is drawn from the seed, and falls where it falls in a save. Machines that lose their memory too
are at most as many at once as the cluster tolerates. `FASTCHECK_KILLS_SEED` replays a failure.
"""

import contextlib
import os
import random
import time

import psutil
import pytest
from tests.cluster.harness import Job, leader, process_of, until
from tests.cluster.training import Training

from fastcheck import FastCheckError

NODES = [f"node-{i}" for i in range(5)]
VOTERS = NODES[:3]
SEED = int(os.environ.get("FASTCHECK_KILLS_SEED", str(random.randrange(10**6))))


class Murders:
    """Who is killed, and what has to hold afterwards."""

    def __init__(self, cluster, rng):
        self.cluster, self.random = cluster, rng
        self.job = Job(cluster, NODES[:4], megabytes=2)
        self.training = None

    def train(self, after=0):
        self.training = Training(self.job, after)
        self.training.start()
        self.training.goes_on(2)

    def parent(self, node):
        psutil.Process(self.cluster.pids(node)[0]).kill()
        until(lambda: not self.cluster.pids(node), f"the processes of {node} to end with their parent")
        self.cluster.start(node)

    def agent(self, node):
        process_of(self.cluster, node, "agent").kill()

    def data(self, node):
        process_of(self.cluster, node, "data").kill()

    def registry(self, node):
        process_of(self.cluster, node if node in VOTERS else self.random.choice(VOTERS), "registry").kill()

    def leaders_registry(self, node):
        process_of(self.cluster, until(lambda: leader(self.cluster, node), "a leader"), "registry").kill()

    def node(self, node):
        self.cluster.kill(node)
        self.cluster.start(node)

    def machine(self, node):
        """With its memory: the job starts anew, and loads at least what it was told is committed."""
        self.cluster.kill(node, wipe=True)
        self.training.end()
        told = self.training.newest
        self.cluster.start(node)
        self.job.start()
        loaded = self.job.load()
        assert loaded >= told, f"step {told} was committed, and {loaded} is the newest now"
        # What the next machine may take with it must have its copies again: those of all steps that are kept.
        self.train(max(loaded, self.training.step))

    def everybody_runs(self):
        for kind, nodes in (("data", NODES), ("registry", VOTERS)):
            for node in nodes:
                until(lambda kind=kind, node=node: self.runs(node, kind), f"the {kind} process of {node}")

    def runs(self, node, kind):
        with contextlib.suppress(AssertionError):
            return process_of(self.cluster, node, kind)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [12, pytest.param(60, marks=pytest.mark.long)])
def test_kills_under_load_lose_no_committed_step(make_cluster, kills):
    print(f"FASTCHECK_KILLS_SEED={SEED}")
    murders = Murders(make_cluster(5), random.Random(SEED))
    rng = murders.random
    ways = [
        murders.parent,
        murders.agent,
        murders.data,
        murders.registry,
        murders.leaders_registry,
        murders.node,
        murders.machine,
    ]
    murders.train()
    for number in range(kills):
        murders.everybody_runs()
        way, node = rng.choice(ways), rng.choice(NODES)
        time.sleep(rng.random() * 0.2)  # not a wait: the moment of the kill is what is drawn
        told = murders.training.newest
        print(f"{number + 1}: {way.__name__} of {node} after step {told}", flush=True)
        way(node)
        murders.training.goes_on()
        with contextlib.suppress(FastCheckError):  # the node that was asked may be the one that starts
            assert murders.job.ranks[0].steps()[-1] >= told
    murders.everybody_runs()
    murders.training.goes_on(2)
    murders.training.end()
    told = murders.training.newest
    murders.job.start()
    assert murders.job.load() >= told
    for step in murders.job.ranks[0].steps():
        assert murders.job.load(step) == step
