"""What was deleted is gone: from the registry, from every node's memory, also of a node that was away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.cluster.harness import Job, node_states, replicas_on_disk, run_module, until

from fastcheck import FastCheckError, FencedError, SaveHandle, StepNotFoundError
from fastcheck.admin import AdminClient
from fastcheck.errors import UnsafeError
from fastcheck.local import LocalCluster

NODES = ("node-0", "node-1", "node-2")


def on_disk(cluster: LocalCluster, *nodes: str, job: str = "gpt") -> dict[str, set[int]]:
    """Steps of which a node has any replica."""
    return {
        node: {
            int(path.name.split("-")[0])
            for path in replicas_on_disk(cluster, node)
            if path.parent.name == job
        }
        for node in nodes
    }


def everywhere(*steps: int) -> dict[str, set[int]]:
    return {node: set(steps) for node in NODES}


def held_bytes(cluster: LocalCluster) -> int:
    """Memory that all nodes' replicas take, as the nodes say."""
    with AdminClient(cluster.address("node-0"), timeout_s=10) as admin:
        return sum(int(row["stored_bytes"]) for row in admin.replicas("gpt")["replicas"])


def test_memory_falls_and_what_was_deleted_is_not_loaded_nor_brought_back(
    make_cluster: Callable[..., Any],
) -> None:
    cluster = make_cluster(3, keep_steps=3)
    job = Job(cluster, list(NODES), megabytes=2)
    for step in (1, 2, 3):
        job.commit(step)
    admin = AdminClient(cluster.address("node-1"), timeout_s=15)
    before = held_bytes(cluster)
    assert on_disk(cluster, *NODES) == everywhere(1, 2, 3)

    # An older step, while the job runs: each holder gives its memory back, and training goes on.
    done = admin.delete("gpt", 2)
    assert done["deleted_steps"] == [2] and done["kept_steps"] == [1, 3] and not done["ends_sessions"]
    assert {node["node_id"] for node in done["nodes"]} == set(NODES) and done["stored_bytes"] > 0
    until(lambda: on_disk(cluster, *NODES) == everywhere(1, 3), "step 2 to go")
    assert held_bytes(cluster) < before
    with pytest.raises(StepNotFoundError):
        job.load(2)
    job.commit(4)
    assert job.load(1) == 1 and job.load() == 4, "what is had through the deleted step's bytes is exact"

    # What it would be restored from goes only when its trainers are gone, or with a word.
    for step, everything in ((4, False), (None, True)):
        with pytest.raises(UnsafeError, match="seems to be running"):
            admin.delete("gpt", step, everything=everything)
    late = job.ranks[0]
    assert admin.delete("gpt", 4, even_if_running=True)["ends_sessions"]
    with pytest.raises(FencedError):
        late.save(5, job.state(5, 0)).result(timeout=60)
    job.stop()

    # The rest goes while a holder is away; it returns with its memory and drops it.
    cluster.kill("node-2")
    until(lambda: node_states(cluster, "node-0")["node-2"] == "DOWN", "the loss to be noticed")
    job.start(["node-0", "node-1", "node-0"])
    assert job.load() == 3, "back to the step before"
    job.stop()
    assert 3 in on_disk(cluster, "node-2")["node-2"]
    done = admin.delete("gpt", everything=True)  # its trainers have closed: no word is needed
    assert done["unreachable"] == ["node-2"] and done["kept_steps"] == []
    until(lambda: on_disk(cluster, "node-0", "node-1") == {"node-0": set(), "node-1": set()}, "all to go")
    assert on_disk(cluster, "node-2")["node-2"], "it knows of nothing yet"
    cluster.start("node-2")
    until(lambda: on_disk(cluster, "node-2") == {"node-2": set()}, "the returned node to drop its copies")
    assert admin.delete("gpt", everything=True)["deleted_steps"] == [], "again is no error"
    assert admin.jobs()["jobs"] == []

    # The name is free: a new run begins with any step, and keeps what it saves.
    job.start()
    assert job.load() is None
    job.commit(1)
    assert job.load() == 1
    assert on_disk(cluster, "node-0", "node-1") == {"node-0": {1}, "node-1": {1}}
    job.stop()
    admin.close()


def delete_all(cluster: LocalCluster, job: str) -> None:
    """As an operator does it, whether the job runs or not."""
    done = run_module(
        "fastcheck",
        "delete",
        job,
        "--all",
        "--even-if-running",
        "--yes",
        "--address",
        cluster.address("node-2"),
    )
    assert done.returncode == 0, done.stderr


def committed(*handles: SaveHandle) -> bool:
    """Whether all of these saves end well; what one fails with otherwise is a matter of the step."""
    errors = 0
    for handle in handles:
        try:
            handle.result(timeout=60)
        except FastCheckError:
            errors += 1
    return not errors


def test_trainers_whose_steps_are_deleted_as_they_start_save_on_with_new_sessions(
    standing_cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = standing_cluster
    job = Job(cluster, ["node-0", "node-1"], "restarted")
    job.commit(1)
    job.start()
    assert job.load() == 1  # both ranks have their sessions
    delete_all(cluster, job.name)

    tries = 0
    for step in range(2, 6):
        tries += 1
        if committed(*job.save(step)):
            break
    else:
        pytest.fail("no step is committed any more")
    assert tries <= 2, "only saves that a deletion met may fail"
    job.commit(10)
    told = [r.getMessage() for r in caplog.records if "has a new session" in r.getMessage()]
    assert len(told) == 2 and all("restarted" in line for line in told), told  # once per rank

    # Not only at a start, and the session that a deletion has ended commits nothing: all begins anew.
    delete_all(cluster, job.name)
    until(lambda: committed(*job.save(3)), "a commit")
    assert job.ranks[0].steps() == [3]
    job.start()
    assert job.load() == 3
    job.stop()


def test_a_process_whose_rank_was_taken_over_stays_fenced_whatever_is_deleted(
    standing_cluster: LocalCluster,
) -> None:
    cluster = standing_cluster
    job = Job(cluster, ["node-0"], "overtaken")
    old = job.ranks[0]
    job.commit(1)
    new = job.trainer(0, "node-1")
    assert new.load(job.state(0, 0)) == 1
    for number in (2, 3):
        with pytest.raises(FencedError):
            old.save(number, job.state(number, 0)).result(timeout=60)
    new.save(4, job.state(4, 0)).result(timeout=60)

    delete_all(cluster, job.name)
    for number in (5, 6):
        with pytest.raises(FencedError):
            old.save(number, job.state(number, 0)).result(timeout=60)
    until(lambda: committed(new.save(7, job.state(7, 0))), "the newer process to save on")
    with pytest.raises(FencedError):
        old.save(8, job.state(8, 0)).result(timeout=60)
    assert new.steps() == [7]
    new.close()
    job.stop()
