"""G4: a failing daemon, peer or registry never raises inside the training loop, and never holds it up for long."""

import threading
import time

import pytest
from tests.cluster.harness import Job, counters, make_state, paused, process_of, until

from fastcheck import Checkpointer, DaemonUnavailableError, FastCheckError, OutOfMemoryError, SupersededError
from fastcheck.admin import AdminClient


def test_the_daemon_dies_during_a_save_and_training_goes_on(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "dies")
    job.commit(1)
    with paused(process_of(cluster, "node-1", "data")):  # so that the save is under way for long
        (under_way,) = job.save(2)
        cluster.kill("node-0")
        started = time.monotonic()
        after = [job.save(step)[0] for step in (3, 4, 5)]
        assert time.monotonic() - started < 10
    for handle in after:
        assert isinstance(handle.exception(), DaemonUnavailableError)
    cluster.start("node-0")
    # Its bytes are in memory that outlives the daemon, which carries on with the step if it had its manifest.
    committed = under_way.exception(timeout=60) is None
    job.start()
    assert job.load() == (2 if committed else 1)
    job.commit(6)


def test_a_third_step_in_flight_waits_and_is_counted(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "third")
    job.commit(1)
    until(lambda: len(job.ranks[0]._session._lent.held) == 2, "memory for two saves")
    waits = counters(cluster, "node-0")["save_waits"]
    with paused(process_of(cluster, "node-1", "data")):
        first, second = job.save(2)[0], job.save(3)[0]
        assert first.stats["waited_s"] == second.stats["waited_s"] == 0
        third: list = []
        saving = threading.Thread(target=lambda: third.append(job.save(4)[0]))
        saving.start()
        saving.join(timeout=1.0)
        assert saving.is_alive()
    saving.join(timeout=60)
    assert third[0].result(timeout=60) is not None or third[0].committed
    assert third[0].stats["waited_s"] > 0.5
    assert counters(cluster, "node-0")["save_waits"] == waits + 1


def test_a_trainer_without_a_daemon_of_its_own(shared_cluster):
    cluster = shared_cluster(2)
    with AdminClient(cluster.address("node-0"), timeout_s=5) as admin:
        far = next(n["address"] for n in admin.nodes()["nodes"] if n["node_id"] == "node-0")
    assert not far.startswith("unix:")
    with Checkpointer("far", rank=0, world_size=1, address=far) as ckpt:
        for step in (1, 2):
            ckpt.save(step, make_state(3, step, 0)).result(timeout=60)
        state = make_state(99, 0, 0)
        assert ckpt.load(state) == 2
    with Checkpointer("far", rank=0, world_size=1, address=cluster.address("node-1")) as near:
        assert near.load(state) == 2


def test_a_dead_daemon_on_one_node_does_not_hold_the_other_ranks_up(shared_cluster):
    cluster = shared_cluster(4)
    job = Job(cluster, ["node-2", "node-3"], "dead")
    job.commit(1)
    cluster.kill("node-3")
    started = time.monotonic()
    handles = [job.ranks[0].save(step, job.state(step, 0)) for step in range(2, 10)]
    assert time.monotonic() - started < 20
    with pytest.raises(SupersededError, match="rank 1"):
        handles[0].result(timeout=30)
    assert not any(h.committed for h in handles)
    cluster.start("node-3")
    job.start()
    assert job.load() == 1
    job.commit(10)


def test_without_a_quorum_training_goes_on_and_nothing_is_called_committed(shared_cluster):
    cluster = shared_cluster(4)
    job = Job(cluster, ["node-3"], "quorum")
    job.commit(1)
    cluster.kill("node-0")
    cluster.kill("node-1")
    handles = [job.save(step)[0] for step in (2, 3, 4, 5, 6)]
    assert not any(h.committed for h in handles)
    cluster.start("node-0")
    handles[-1].result(timeout=60)
    assert isinstance(handles[0].exception(), FastCheckError)
    assert job.load() == 6


def test_over_budget_is_an_early_clear_refusal_and_loses_nothing(make_cluster):
    cluster = make_cluster(2, ram_budget="64MiB")
    job = Job(cluster, ["node-0"])
    job.commit(1)
    too_much = {"weights": make_state(1, 2, 0, megabytes=100)["model"]}
    handle = job.ranks[0].save(2, too_much)
    with pytest.raises(OutOfMemoryError, match="ram_budget_bytes"):
        handle.result(timeout=30)
    assert job.load() == 1
    job.commit(3)


def test_a_data_process_that_is_stopped_holds_no_save_up(shared_cluster):
    """A save takes memory that it has and posts that it is done: its handle waits, training does not."""
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "stopped")
    job.commit(1)
    state = job.state(2, 0)
    until(lambda: len(job.ranks[0]._session._lent.held) == 2, "memory for two saves")
    with paused(process_of(cluster, "node-0", "data")):
        started = time.monotonic()
        handle = job.ranks[0].save(2, state)
        assert time.monotonic() - started < 0.3
        time.sleep(1.0)
        assert handle.staged and not handle.done
    handle.result(timeout=60)
    assert job.load() == 2


def test_a_data_process_that_dies_while_a_state_is_copied_costs_that_step_alone(shared_cluster):
    cluster = shared_cluster(2)
    job = Job(cluster, ["node-0"], "dies-in-copy")
    job.commit(1)
    (ckpt,) = job.ranks
    copier = ckpt._transport._copier
    copy, data = copier.copy, process_of(cluster, "node-0", "data")

    def dies(flat, segment, **rest):
        copy(flat, segment, **rest)
        data.kill()
        data.wait(timeout=60)
        until(lambda: not ckpt._session.is_open, "the stream to break")

    copier.copy = dies
    (handle,) = job.save(2)
    copier.copy = copy
    with pytest.raises(DaemonUnavailableError, match="while the state was copied"):
        handle.result(timeout=30)
    step = 2

    def saved() -> bool:
        nonlocal step
        step += 1
        return job.save(step)[0].exception(timeout=60) is None

    until(saved, "a later save to be committed")
    assert job.load() == step
