"""One bad thing after the other, at random from a seed: no committed step is ever lost, and every load is exact.

`FASTCHECK_CHAOS_SEED` and `FASTCHECK_CHAOS_FAULTS` replay a failure or run for longer.
"""

import os
import random
import time

import pytest
from tests.cluster.harness import DEADLINE_S, Job, node_states, paused, process_of, until

NODES = [f"node-{i}" for i in range(5)]
VOTERS = NODES[:3]
FAULTS = int(os.environ.get("FASTCHECK_CHAOS_FAULTS", "5"))
SEED = int(os.environ.get("FASTCHECK_CHAOS_SEED", str(random.randrange(10**6))))


class Story:
    """A job of four ranks on five nodes, and what is known to be committed."""

    def __init__(self, cluster, seed):
        self.random = random.Random(seed)
        self.cluster = cluster
        self.job = Job(cluster, NODES[:4], megabytes=8)
        self.step = 0
        self.newest = 0

    def save(self):
        self.step += 1
        return self.job.save(self.step)

    def settle(self, handles):
        """Wait until the step is committed, or a rank's save has failed: then the others may wait for it for long."""
        until(
            lambda: all(h.done for h in handles) or any(h.exception() for h in handles),
            f"step {self.step} to end",
        )
        if all(h.committed for h in handles):
            self.newest = self.step

    def commit(self):
        """Steps go on being committed, now or with one of the next saves."""
        give_up_at = time.monotonic() + DEADLINE_S
        while True:
            self.settle(self.save())
            if self.newest == self.step:
                return
            if time.monotonic() > give_up_at:
                pytest.fail(f"nothing is committed any more; the last try was step {self.step}")
            time.sleep(0.1)  # a training step

    def resume(self):
        """All trainers start anew and load: at least what was known, exactly what was saved."""
        self.job.start()
        loaded = self.job.load()
        assert loaded >= self.newest
        self.newest = loaded
        self.step = max(self.step, loaded)
        for _ in range(2):  # so that the next loss finds as many copies as are tolerated
            self.commit()

    # What may happen.

    def lose_a_machine(self, node):
        self.cluster.kill(node, wipe=True)
        self.cluster.start(node)
        self.resume()

    def lose_a_machine_in_the_middle_of_a_save(self, node):
        self.save()
        time.sleep(self.random.random() * 0.05)  # not a wait: the moment of the fault is what is drawn
        self.lose_a_machine(node)

    def restart_a_node(self, node):
        self.cluster.kill(node)
        self.cluster.start(node)
        self.resume()

    def kill_a_data_process(self, node):
        handles = self.save()
        process_of(self.cluster, node, "data").kill()
        self.settle(handles)
        until(lambda: node_states(self.cluster, node).get(node) == "UP", f"{node} to be UP")
        self.commit()

    def kill_a_registry_process(self, node):
        node = self.random.choice(VOTERS)
        handles = self.save()
        process_of(self.cluster, node, "registry").kill()
        self.settle(handles)
        self.commit()

    def freeze_a_process(self, node):
        kind = "registry" if node in VOTERS and self.random.random() < 0.5 else "data"
        with paused(process_of(self.cluster, node, kind)):
            handles = self.save()
            time.sleep(self.random.random() * 2)  # as above: how long it is frozen is drawn
        self.settle(handles)
        self.commit()


@pytest.mark.long  # in the gate test_kills.py kills at random, and test_detection.py freezes processes
@pytest.mark.timeout(60 + 30 * FAULTS)
@pytest.mark.parametrize(
    "codec", ["auto", "always"]
)  # whole puts for the most part; and replicas changed in place
def test_no_committed_step_is_lost_whatever_happens(make_cluster, codec):
    cluster = make_cluster(5, codec=codec)
    story = Story(cluster, SEED)
    faults = [
        story.lose_a_machine, story.lose_a_machine_in_the_middle_of_a_save, story.restart_a_node,
        story.kill_a_data_process, story.kill_a_registry_process, story.freeze_a_process,
    ]  # fmt: skip
    story.commit()
    story.commit()
    print(f"FASTCHECK_CHAOS_SEED={SEED}")
    for _ in range(FAULTS):
        for kind in ("data", "registry"):
            for node in NODES if kind == "data" else VOTERS:
                until(lambda node=node, kind=kind: runs(cluster, node, kind), f"the {kind} process of {node}")
        fault, node = story.random.choice(faults), story.random.choice(NODES)
        print(f"{fault.__name__}({node}) after step {story.newest}", flush=True)
        fault(node)
        steps = story.job.ranks[0].steps()
        assert steps[-1] >= story.newest, steps
        story.newest = steps[-1]
        story.step = max(story.step, story.newest)
    assert story.job.load() == story.newest


def runs(cluster, node, kind):
    try:
        return process_of(cluster, node, kind)
    except AssertionError:
        return None
