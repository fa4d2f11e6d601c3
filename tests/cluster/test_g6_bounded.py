"""G6: memory, queues and waits have limits; the only copy of a newest committed step is never evicted."""

from pathlib import Path

import pytest
from tests.cluster.harness import Job, counters, replicas_on_disk, until

from fastcheck import OutOfMemoryError


def ram(cluster, node):
    directory = next(n["ram_dir"] for n in cluster.status()["nodes"] if n["node_id"] == node)
    return sum(p.stat().st_size for p in Path(directory).glob("segments/*"))


@pytest.mark.parametrize("codec", ["auto", "always"])
def test_steps_come_and_go_but_memory_stays_the_same(make_cluster, codec):
    cluster = make_cluster(2, codec=codec)
    job = Job(cluster, ["node-0"], megabytes=4)

    def commit(step):
        job.commit(step)
        # A step that comes before an old one is dropped needs memory of its own.
        until(
            lambda: len({p.name.split("-")[0] for p in replicas_on_disk(cluster, "node-1")}) <= 2,
            "the holder to drop the oldest step",
        )

    for step in range(1, 13):
        commit(step)
    owner, holder = ram(cluster, "node-0"), ram(cluster, "node-1")
    for step in range(13, 25):
        commit(step)
    assert ram(cluster, "node-0") <= owner + (5 << 20)
    assert ram(cluster, "node-1") <= holder + (5 << 20)
    until(
        lambda: {p.name.split("-")[0] for p in replicas_on_disk(cluster, "node-1")} == {"23", "24"},
        "the holder to keep the newest two steps",
    )


def test_a_second_job_cannot_push_out_the_first_ones_newest_step(make_cluster):
    cluster = make_cluster(2, ram_budget="48MiB")
    first = Job(cluster, ["node-0"], name="first", megabytes=8)
    first.commit(1)
    second = Job(cluster, ["node-0"], name="second", megabytes=8)
    failures = 0
    for step in range(1, 9):
        handle = second.save(step)[0]
        until(lambda handle=handle: handle.done, "the save to end")
        failures += handle.exception() is not None
    first.start()
    assert first.load() == 1
    cluster.kill("node-0", wipe=True)
    cluster.start("node-0")
    first.start()
    assert first.load() == 1


def test_a_job_gets_its_part_of_a_node_and_another_goes_on(make_cluster):
    cluster = make_cluster(2, ram_budget="96MiB", job_budget_bytes="16MiB")
    greedy = Job(cluster, ["node-0"], name="greedy", megabytes=20)
    modest = Job(cluster, ["node-0"], name="modest")
    for step in (1, 2, 3):
        with pytest.raises(
            OutOfMemoryError, match=f"one job may have {16 << 20} on this node.*job_budget_bytes"
        ):
            greedy.save(step)[0].result(timeout=60)
        modest.commit(step)
    assert counters(cluster, "node-0")["job_budget_refused"] == 3
    greedy.megabytes = 2
    greedy.commit(4)
