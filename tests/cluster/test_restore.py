"""A restore from several holders: a bad chunk at one, another one that does not answer, what the trainer is told."""

import pytest
from tests.cluster.harness import (
    Job,
    assert_same,
    chunks_on_disk,
    counters,
    flip_byte,
    make_state,
    paused,
    process_of,
    replicas_on_disk,
    until,
)

from fastcheck import LoadProgress

LOST = "node-4"
MEGABYTES = 32


def lose(cluster):
    """A job whose only rank's machine comes back empty; each shard has two holders."""
    job = Job(cluster, [LOST], megabytes=MEGABYTES)
    job.commit(1)
    cluster.kill(LOST, wipe=True)
    job.stop()
    cluster.start(LOST)
    return job


def load(job, **options):
    with job.trainer(0) as trainer:
        state = make_state(99, 0, 0, MEGABYTES)
        assert trainer.load(state, **options) == 1
        assert_same(state, job.state(1, 0))
        return dict(trainer.load_stats)


def test_a_bad_chunk_comes_from_elsewhere_and_its_holder_drops_the_copy(make_cluster):
    cluster = make_cluster(5, tolerate=2)
    job = lose(cluster)
    rotten = next(n for n in cluster.node_ids if n != LOST and replicas_on_disk(cluster, n))
    for manifest in replicas_on_disk(cluster, rotten):
        path, offset, _ = chunks_on_disk(manifest)[0]
        flip_byte(path, offset)
    stats = load(job)
    assert stats["fetched_bytes"] == stats["bytes"]
    # Whoever is faster brings more, and the good holders may bring all: that a bad chunk is met is seen to in
    # test_g2_one_step_exact.
    told = counters(cluster, LOST).get("corrupt_reported", 0)
    until(
        lambda: counters(cluster, rotten).get("corrupt_found", 0) >= told,
        "the holder to drop what it was told of",
    )
    assert stats["bad_copies"] >= told
    # The bytes that were brought serve the next load, which finds nothing bad.
    stats = load(job)
    assert (stats["local_bytes"], stats["fetched_bytes"], stats["bad_copies"]) == (stats["bytes"], 0, 0)


def test_the_only_good_copy_of_some_chunks_is_found(make_cluster):
    """One holder has lost the first chunk of each of its shards, the other one the last: together they have all."""
    cluster = make_cluster(3, tolerate=2, spread=2)
    job = Job(cluster, ["node-2"], megabytes=MEGABYTES)
    job.commit(1)
    cluster.kill("node-2", wipe=True)
    job.stop()
    cluster.start("node-2")
    for node, at_end in (("node-0", False), ("node-1", True)):
        for manifest in replicas_on_disk(cluster, node):
            path, offset, _ = chunks_on_disk(manifest)[-1 if at_end else 0]
            flip_byte(path, offset)
    stats = load(job)
    assert (stats["fetched_bytes"], stats["holders"]) == (stats["bytes"], 2)


def test_a_holder_that_does_not_answer_costs_no_timeout(make_cluster):
    cluster = make_cluster(5, tolerate=2, transfer_timeout_s=120.0)
    job = lose(cluster)
    stopped = next(n for n in cluster.node_ids if n != LOST and replicas_on_disk(cluster, n))
    with paused(process_of(cluster, stopped, "data")):
        stats = load(job)
    assert stats["fetched_bytes"] == stats["bytes"]
    assert stats["restore_s"] < 60


def test_a_load_tells_how_far_it_is_and_a_callback_may_end_it(make_cluster):
    cluster = make_cluster(3)
    job = Job(cluster, ["node-2"], megabytes=MEGABYTES)
    job.commit(1)
    heard = []
    load(job, progress=heard.append)
    assert heard[-1].bytes_done == heard[-1].bytes_total >= MEGABYTES << 18
    assert all(isinstance(p, LoadProgress) for p in heard)

    class EnoughError(Exception):
        pass

    def enough(progress):
        raise EnoughError

    with job.trainer(0) as trainer:
        state = make_state(99, 0, 0, MEGABYTES)
        with pytest.raises(EnoughError):
            trainer.load(state, progress=enough)
        assert_same(state, make_state(99, 0, 0, MEGABYTES))
        assert not trainer.load_stats
        assert trainer.load(state) == 1
        assert_same(state, job.state(1, 0))
