"""G3: the newest committed step never goes backwards, through any failover. G7: stale lives are refused."""

import psutil
import pytest
from tests.cluster.harness import Job, leader, node_states, paused, process_of, until

from fastcheck import FencedError, NotNewerError


def test_an_older_step_is_refused(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "older")
    job.commit(5)
    (handle,) = job.save(5)
    with pytest.raises(NotNewerError, match="5"):
        handle.result(timeout=30)
    assert job.load() == 5


def test_two_processes_claim_the_same_rank_the_newer_one_gets_it(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "claims")
    job.commit(1)
    with job.trainer(0) as newer:
        newer.save(2, job.state(2, 0)).result(timeout=60)
        (handle,) = job.save(3)
        with pytest.raises(FencedError):
            handle.result(timeout=60)
        newer.save(4, job.state(4, 0)).result(timeout=60)


def test_the_leader_dies_again_and_again_while_steps_are_committed(shared_cluster):
    cluster = shared_cluster(4)
    job = Job(cluster, ["node-3"], "leaders")
    newest = 0
    for kill_at in (3, 6):
        for step in range(newest + 1, kill_at + 1):
            job.commit(step)
        newest = kill_at
        dying = until(lambda: leader(cluster, "node-3"), "a leader")
        (handle,) = job.save(newest + 1)
        cluster.kill(dying)
        handle.result(timeout=60)
        newest += 1
        assert job.ranks[0].steps()[-1] == newest
        cluster.start(dying)
    assert job.load() == newest
    assert job.ranks[0].steps() == [newest - 1, newest]


def test_a_paused_node_is_down_and_comes_back_as_another_life(shared_cluster):
    cluster = shared_cluster(4)
    job = Job(cluster, ["node-0"], "paused")
    everything = [psutil.Process(pid) for pid in cluster.pids("node-3")]
    with paused(*everything):
        until(lambda: node_states(cluster, "node-0")["node-3"] == "DOWN", "node-3 to be DOWN")
        job.commit(1)  # placed elsewhere
    until(lambda: node_states(cluster, "node-0")["node-3"] == "UP", "node-3 to be UP again")
    job.commit(2)


def test_a_frozen_leader_neither_blocks_nor_decides(shared_cluster):
    cluster = shared_cluster(4)
    job = Job(cluster, ["node-3"], "frozen")
    job.commit(1)
    frozen = until(lambda: leader(cluster, "node-3"), "a leader")
    with paused(process_of(cluster, frozen, "registry")):
        job.commit(2)
    until(lambda: leader(cluster, "node-3") not in {"", frozen}, "another leader")
    assert job.load() == 2
    job.commit(3)
