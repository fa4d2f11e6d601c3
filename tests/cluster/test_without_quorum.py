"""The registry loses its quorum under a running job: steps become provisional, and nothing is called committed."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.cluster.harness import Job, assert_same, make_state, run_module, until

from fastcheck import (
    DaemonUnavailableError,
    InvalidArgumentError,
    StepNotFoundError,
    SupersededError,
)
from fastcheck.admin import AdminClient
from fastcheck.local import LocalClusterError
from fastcheckd.store.retention import PROVISIONAL_KEPT

VOTERS = ("node-0", "node-1", "node-2")
LOST = ("node-1", "node-2")
#: The newest steps that nobody heard of, and as many that may have been reported to a leader that had not noticed
#: yet that it is alone: those cannot be given up.
KEPT = 2 * PROVISIONAL_KEPT
NEWEST = 1 + KEPT + 2


def lose_quorum(cluster, nodes=LOST):
    for node in nodes:
        cluster.kill(node)


def start_without_quorum(cluster, node):
    with contextlib.suppress(LocalClusterError):  # it cannot become UP
        cluster.start(node, timeout_s=2)


def wait_provisional(handles):
    until(lambda: all(h.provisional for h in handles), "steps to be provisional")


def listed(cluster, node, job="gpt"):
    done = run_module("fastcheck", "checkpoints", job, "-o", "json", "--address", cluster.address(node))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_steps_become_provisional_and_the_newest_commits_when_the_voters_are_back(make_cluster):
    cluster = make_cluster(6)
    job = Job(cluster, ["node-3", "node-4"])
    job.commit(1)
    lose_quorum(cluster)
    saved = []
    for step in range(2, NEWEST + 1):
        started = time.monotonic()
        saved.append(job.save(step))
        assert time.monotonic() - started < 15
    wait_provisional(saved[-1])
    assert not any(h.committed for handles in saved for h in handles)
    assert all(h.replicated and not h.done and h.stats["provisional"] for h in saved[-1])
    for mine in zip(*saved, strict=True):
        until(lambda mine=mine: sum(not h.done for h in mine) <= KEPT, "older steps to be given up")
        assert all(isinstance(h.exception(timeout=1), SupersededError) for h in mine if h.done)

    found, said = listed(cluster, "node-3")
    states = {c["step"]: c["state"] for c in found["checkpoints"]}
    assert found["registry_answered"] is False and "registry" in said
    assert states[NEWEST] == "provisional" and "committed" not in {states[s] for s in states if s > 1}

    for node in LOST:
        cluster.start(node)
    for handle in saved[-1]:
        assert handle.result(timeout=60).committed and not handle.provisional
    found, said = listed(cluster, "node-3")
    assert found["registry_answered"] is True and not said
    assert {c["step"]: c["state"] for c in found["checkpoints"]}[NEWEST] == "committed"
    job.commit(NEWEST + 1)
    assert job.load() == NEWEST + 1
    assert not job.ranks[0].loaded_provisional


def test_a_provisional_step_is_restored_elsewhere_when_it_is_asked_for(make_cluster):
    cluster = make_cluster(6)
    job = Job(cluster, ["node-3", "node-4"])
    job.commit(1)
    lose_quorum(cluster)
    handles = job.save(2)
    wait_provisional(handles)
    job.stop()
    cluster.kill("node-4", wipe=True)

    job.start(["node-5", "node-0"])
    # Each is an answer once the registry has given none for long; what a load says that does not ask for it, and
    # waits for longer, is tested without a cluster.
    with ThreadPoolExecutor(2) as threads:
        newest = threads.submit(job.ranks[1].load, make_state(99, 0, 1), allow_provisional=True)
        absent = threads.submit(job.ranks[0].load, make_state(99, 0, 0), step=77, allow_provisional=True)
        with pytest.raises(InvalidArgumentError, match=r"Complete steps.*2"):
            newest.result()
        with pytest.raises(StepNotFoundError, match="2"):
            absent.result()
    states = [make_state(99, 0, rank) for rank in range(job.world_size)]
    with ThreadPoolExecutor(job.world_size) as threads:
        loads = [
            threads.submit(ckpt.load, state, step=2, allow_provisional=True)
            for ckpt, state in zip(job.ranks, states, strict=True)
        ]
        assert [load.result() for load in loads] == [2] * job.world_size
    for rank, (ckpt, state) in enumerate(zip(job.ranks, states, strict=True)):
        assert ckpt.loaded_provisional
        assert_same(state, job.state(2, rank))


def test_a_single_rank_gets_the_newest_step_also_after_its_daemon_restarted(make_cluster):
    cluster = make_cluster(6)
    job = Job(cluster, ["node-3"])
    job.commit(1)
    lose_quorum(cluster, VOTERS)
    for step in (2, 3):
        wait_provisional(job.save(step))
    job.stop()
    cluster.kill("node-3", wipe=True)
    cluster.kill("node-5")
    start_without_quorum(cluster, "node-5")  # it knows the nodes from its state_dir alone
    job.start(["node-5"])
    state = make_state(99, 0, 0)

    def loaded():
        with contextlib.suppress(DaemonUnavailableError):  # the data process is just starting
            return job.ranks[0].load(state, allow_provisional=True)

    assert until(loaded, "the data process to answer") == 3
    assert_same(state, job.state(3, 0))
    # A registry that answers is asked, whatever is allowed.
    start_without_quorum(cluster, "node-0")
    for node in LOST:
        cluster.start(node)
    with AdminClient(cluster.address("node-0"), timeout_s=5) as admin:
        until(lambda: admin.status()["leader"], "a leader")
    assert job.ranks[0].load(state, allow_provisional=True) == 1
    assert not job.ranks[0].loaded_provisional


def test_what_was_given_up_in_one_outage_says_nothing_of_a_later_process_steps(make_cluster):
    """The same numbers are saved anew after a restart, committed, and stay where they are in the next outage."""
    cluster = make_cluster(4)
    job = Job(cluster, ["node-3", "node-0"])
    job.commit(1)
    lose_quorum(cluster)
    alone = [job.ranks[0].save(step, job.state(step, 0)) for step in range(2, NEWEST + 6)]
    wait_provisional(alone[-1:])
    until(lambda: sum(not h.done for h in alone) <= KEPT, "older steps to be given up")
    # Not reported: neither one of the first, which went to a leader that had not noticed yet, nor one that waits.
    again = 2 + next(index for index, handle in reversed(list(enumerate(alone))) if handle.done)
    for node in LOST:
        cluster.start(node)
    job.start()
    assert job.load() == 1

    lose_quorum(cluster)
    wait_provisional(
        job.save(again - 1)
    )  # by this one the nodes notice; the next one is placed by themselves
    second = job.save(again)
    wait_provisional(second)
    for node in LOST:
        cluster.start(node)
    for handle in second:
        handle.result(timeout=60)

    lose_quorum(cluster)
    for step in range(again + 1, again + KEPT + 3):
        wait_provisional([job.ranks[0].save(step, job.state(step, 0))])
    cluster.kill("node-3", wipe=True)
    for node in LOST:
        cluster.start(node)
    job.start(["node-1", "node-0"])
    assert job.load() == again
