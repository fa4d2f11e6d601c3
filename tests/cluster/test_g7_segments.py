"""G7: memory that a stopped process may still write to is nobody else's.

A trainer is stopped while it copies a step, another process takes its rank over on the same node, and then the first
one goes on: its copy ends in memory that no step of the second one uses.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np
import pytest
from tests.cluster.harness import counters, paused, process_of
from tests.cluster.steered import SteeredRank

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

MEGABYTES = 256
#: More than a rank has segments.
STEPS = 8


def ram_dir(cluster, node):
    return Path(next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == node))


def marks(path, mark):
    """At places in a segment's data, a MiB apart: whether they have the mark."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        data = np.frombuffer(mapping, np.uint8)
        found = data[1 << 20 :: 1 << 20][:-1] == mark
        del data
        return found


def half_copied(cluster, node, mark):
    """The segment that has the mark at some places, and not at all."""
    for path in ram_dir(cluster, node).glob("segments/*.seg"):
        found = marks(path, mark)
        if found.any() and not found.all():
            return path
    return None


def stop_in_mid_copy(cluster, trainer, node, step):
    """Have a trainer save step after step until it is stopped in one's copy; the step and its segment."""
    for attempt in range(80):
        mark = 100 + attempt
        trainer.tell(save=step, mark=mark)
        assert trainer.hear() == {"saving": step}
        time.sleep(0.003 * (attempt % 40))  # another moment each time, until one falls into the copy
        trainer.stop()
        if segment := half_copied(cluster, node, mark):
            return step, segment
        trainer.proceed()
        assert trainer.hear() == {"saved": step}
        assert trainer.error_of(step) is None
        step += 1
    pytest.fail("the trainer was never stopped in mid-copy")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with LocalCluster(tmp_path_factory.mktemp("segments") / "cluster") as cluster:
        cluster.up(2, ram_budget="2GiB", settings={"codec": "never"})
        yield cluster


@pytest.fixture(autouse=True)
def room_for_one_job(cluster):
    """The others' steps would take the memory."""
    yield
    with AdminClient(cluster.address("node-0"), timeout_s=10) as admin:
        for job in admin.jobs()["jobs"]:
            admin.delete(job["job"], everything=True, even_if_running=True)


@pytest.mark.parametrize("hashed", [False, True], ids=["before hashing", "after the commit"])
def test_a_trainer_stopped_in_mid_copy_changes_nothing_of_its_successors_steps(cluster, hashed):
    job = f"taken-over-{hashed}"
    with (
        SteeredRank(cluster, "node-0", job, megabytes=MEGABYTES) as first,
        SteeredRank(cluster, "node-0", job, megabytes=MEGABYTES) as second,
    ):
        first.commit(1, mark=1)
        step, segment = stop_in_mid_copy(cluster, first, "node-0", 2)
        newest, _ = second.load()
        assert newest == step - 1
        before = counters(cluster, "node-0")["corrupt_found"]
        # Whatever of the first one's memory might be used again is, within a few steps.
        for mark in range(1, STEPS + 1):
            # Nobody has hashed the step's bytes before its holder answers.
            with paused(*([] if hashed else [process_of(cluster, "node-1", "data")])):
                second.save(step, mark)
                if hashed:
                    assert second.error_of(step) is None
                reused = segment.exists() and marks(segment, mark).all()
                if reused or mark == STEPS:
                    first.proceed()
                    assert "saved" in first.hear()
                    break
            assert hashed or second.error_of(step) is None
            step += 1
        assert hashed or second.error_of(step) is None
        assert second.load() == (step, mark)
        with SteeredRank(cluster, "node-1", job, megabytes=MEGABYTES) as reader:
            assert reader.load() == (step, mark)
        assert counters(cluster, "node-0")["corrupt_found"] == before, "its own copy is as it was"


def test_a_trainer_killed_in_mid_copy_leaves_the_step_before(cluster):
    with SteeredRank(cluster, "node-0", "killed", megabytes=MEGABYTES) as first:
        first.commit(1, mark=1)
        step, segment = stop_in_mid_copy(cluster, first, "node-0", 2)
        first.kill()
    with SteeredRank(cluster, "node-0", "killed", megabytes=MEGABYTES) as second:
        newest, _ = second.load()
        assert newest == step - 1
        second.commit(step, mark=7)
        assert second.load() == (step, 7)
        assert not segment.exists(), "its memory is not used again"
