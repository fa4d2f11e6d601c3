"""G2: every rank gets the same step, bit-identical, or a clear error. G8: a bad copy is never served."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
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

from fastcheck import (
    Checkpointer,
    FencedError,
    LostError,
    StateMismatchError,
    StepNotFoundError,
    WorldSizeError,
)


def test_nothing_committed_is_none_and_a_missing_step_is_an_error(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "empty")
    assert job.load() is None
    assert job.ranks[0].steps() == []
    for step in (1, 2, 3, 4):
        job.commit(step)
    assert job.ranks[0].steps() == [3, 4]
    assert job.load(step=3) == 3
    with pytest.raises(StepNotFoundError, match="3, 4"):
        job.load(step=1)


def test_another_world_size_is_a_clear_error(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0", "node-1"], "world")
    job.commit(1)
    with (
        Checkpointer("world", rank=0, world_size=3, address=cluster.address("node-0")) as other,
        pytest.raises(WorldSizeError, match="2 ranks"),
    ):
        other.load(make_state(1, 1, 0))


def test_a_state_that_does_not_fit_is_named_and_left_alone(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "fit")
    job.commit(1)
    state = make_state(5, 0, 0)
    before = make_state(5, 0, 0)
    state["model"]["layer2"] = before["model"]["layer2"] = torch.zeros(3, dtype=torch.float64)
    del state["bits"]
    with pytest.raises(StateMismatchError) as error:
        job.ranks[0].load(state)
    assert "layer2" in str(error.value) and "bits" in str(error.value)
    state["bits"] = before["bits"]
    assert_same(state, before)


def flip_a_byte(manifest: Path) -> None:
    """Damage the replica that a manifest names."""
    chunks = chunks_on_disk(manifest)
    path, offset, length = chunks[len(chunks) // 2]
    flip_byte(path, offset + length // 2)


def test_a_flipped_byte_at_the_owner_is_found_and_the_copy_used(make_cluster):
    cluster = make_cluster(3)
    job = Job(cluster, ["node-0"])
    job.commit(1)
    flip_a_byte(next(p for p in replicas_on_disk(cluster, "node-0") if p.name.endswith("-owner.replica")))
    job.start()
    assert job.load() == 1
    assert counters(cluster, "node-0")["corrupt_found"] == 1


def test_a_flipped_byte_at_a_holder_is_found_and_the_next_copy_used(make_cluster):
    cluster = make_cluster(4, tolerate=2, spread=2)
    job = Job(cluster, ["node-3"], megabytes=16)
    job.commit(1)
    holders = [n for n in ("node-0", "node-1", "node-2") if replicas_on_disk(cluster, n)]
    damaged = replicas_on_disk(cluster, holders[0])
    for manifest in damaged:
        flip_a_byte(manifest)
    cluster.kill("node-3", wipe=True)
    spare = next(n for n in ("node-0", "node-1", "node-2") if n not in holders)
    job.start([spare])
    with ThreadPoolExecutor(1) as thread:
        # Whoever is faster brings more, and the good holder might bring all.
        with paused(process_of(cluster, holders[1], "data")):
            loading = thread.submit(job.load)
            until(lambda: not all(p.exists() for p in damaged), "the holder to drop its copy")
        assert loading.result() == 1
    assert counters(cluster, spare)["corrupt_reported"] >= 1
    assert counters(cluster, holders[0])["corrupt_found"] >= 1


def test_when_all_copies_are_bad_an_older_step_is_offered(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "bad")
    job.commit(1)
    job.commit(2)
    for node in ("node-0", "node-1"):
        for manifest in replicas_on_disk(cluster, node):
            if manifest.name.startswith("2-"):
                flip_a_byte(manifest)
    with pytest.raises(LostError, match=r"load\(state, step=1\)"):
        job.load()
    assert job.load(step=1) == 1
    job.commit(3)


def test_a_restarted_rank_voids_what_its_earlier_life_had_not_committed(make_cluster):
    """Rank 0 loads step 1; a late report of step 2 from its first life must not make rank 1 load step 2."""
    cluster = make_cluster(3)
    job = Job(cluster, ["node-0", "node-1"])
    job.commit(1)
    early = job.ranks[0].save(2, job.state(2, 0))  # rank 1 has not saved it yet
    first_life, job.ranks[0] = job.ranks[0], job.trainer(0)
    state = make_state(99, 0, 0)
    assert job.ranks[0].load(state) == 1
    late = job.ranks[1].save(2, job.state(2, 1))
    with pytest.raises(FencedError):
        early.result(timeout=30)
    assert not late.committed
    assert job.load() == 1
    first_life.close()
