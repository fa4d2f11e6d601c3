"""G1: with `tolerate = f`, a committed step survives the loss of any f nodes at once, owner included."""

import pytest
from tests.cluster.harness import Job, counters, paused, process_of

from fastcheck import FastCheckError


def test_a_lost_machine_comes_back_empty_and_every_rank_resumes(make_cluster):
    cluster = make_cluster(4)
    job = Job(cluster, ["node-0", "node-1", "node-2", "node-3"], megabytes=16)
    for step in (1, 2, 3):
        job.commit(step)
    cluster.kill("node-1", wipe=True)
    job.stop()
    cluster.start("node-1")
    job.start()
    assert job.load() == 3
    assert counters(cluster, "node-1")["shards_fetched"] == 3  # from all three others at once
    job.commit(4)


def test_a_replacement_under_a_new_name(make_cluster):
    cluster = make_cluster(3)
    job = Job(cluster, ["node-0", "node-1", "node-2"])
    job.commit(1)
    cluster.kill("node-2", wipe=True)
    cluster.start("node-7")
    job.start(["node-0", "node-1", "node-7"])
    assert job.load() == 1
    job.commit(2)


def test_two_copies_survive_any_two_losses_owner_included(make_cluster):
    cluster = make_cluster(5, tolerate=2)
    job = Job(cluster, ["node-3", "node-4"], megabytes=4)
    job.commit(1)
    # The owner of rank 0 and, with it, a holder of its shards.
    cluster.kill("node-3", wipe=True)
    cluster.kill("node-4", wipe=True)
    job.start(["node-0", "node-1"])
    assert job.load() == 1


def test_a_step_is_not_committed_before_its_copies_exist(make_cluster):
    cluster = make_cluster(2)
    job = Job(cluster, ["node-0"])
    job.commit(1)
    with paused(process_of(cluster, "node-1", "data")):
        (handle,) = job.save(2)
        assert handle.staged
        with pytest.raises(TimeoutError):
            handle.result(timeout=1.0)
        assert not handle.committed and job.ranks[0].steps() == [1]
    handle.result(timeout=60)
    assert job.ranks[0].steps() == [1, 2]


def test_an_owner_that_dies_after_staging_leaves_no_step(make_cluster):
    cluster = make_cluster(4)
    job = Job(cluster, ["node-3"])
    job.commit(1)
    with paused(*(process_of(cluster, node, "data") for node in ("node-0", "node-1", "node-2"))):
        (handle,) = job.save(2)
        assert handle.staged
        cluster.kill("node-3", wipe=True)
    job.start(["node-0"])
    assert job.load() == 1
    assert not handle.committed
    job.commit(3)


def test_a_single_node_never_calls_a_step_committed(make_cluster):
    cluster = make_cluster(1, commit_timeout_s=2.0)
    job = Job(cluster, ["node-0"])
    (handle,) = job.save(1)
    with pytest.raises(FastCheckError, match="node"):
        handle.result(timeout=30)
    assert not handle.committed
    assert job.load() is None


def test_a_holder_killed_in_mid_transfer_is_replaced(make_cluster):
    cluster = make_cluster(4, spread=1)
    job = Job(cluster, ["node-0"], megabytes=16)
    job.commit(1)
    holder = next(n for n in ("node-1", "node-2", "node-3") if counters(cluster, n)["shards_received"])
    with paused(process_of(cluster, holder, "data")):
        (handle,) = job.save(2)
        assert not handle.committed
        cluster.kill(holder, wipe=True)
    handle.result(timeout=60)
    assert handle.stats["resent_shards"] >= 1
    job.start()
    assert job.load() == 2


def test_a_step_that_one_rank_gave_up_keeps_that_ranks_copies_when_it_is_committed_late(make_cluster):
    cluster = make_cluster(3, rank_wait_timeout_s=1.0)
    job = Job(cluster, ["node-0", "node-1"])
    job.commit(1)
    early = job.ranks[0].save(2, job.state(2, 0))
    with pytest.raises(FastCheckError, match="other ranks"):
        early.result(timeout=60)
    job.ranks[1].save(2, job.state(2, 1)).result(timeout=60)
    assert job.load() == 2
    assert counters(cluster, "node-0")["shards_fetched"] == 0
    # The only copy on another node goes: the owner's must still be there.
    for node in ("node-1", "node-2"):
        cluster.kill(node, wipe=True)
        cluster.start(node)
        job.start()
        assert job.load() == 2
