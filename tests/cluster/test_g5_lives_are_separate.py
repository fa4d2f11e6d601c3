"""G5: trainer death loses nothing that was staged; a daemon's restart loses nothing that was held."""

import contextlib
import signal
import subprocess
import sys
import textwrap

from tests.cluster.harness import Job, counters, node_states, paused, process_of, until

from fastcheck import DaemonUnavailableError


def test_a_killed_and_restarted_node_adopts_its_ram_and_loads_from_it(shared_cluster):
    cluster = shared_cluster(3)
    job = Job(cluster, ["node-2"], "node")
    job.commit(1)
    job.commit(2)
    cluster.kill("node-2")
    cluster.start("node-2")
    job.start()
    assert job.load() == 2
    counted = counters(cluster, "node-2")
    assert counted["manifests_adopted"] >= 2 and counted["shards_fetched"] == 0


def test_a_killed_data_process_is_restarted(shared_cluster):
    cluster = shared_cluster(3)
    job = Job(cluster, ["node-2"], "data")
    job.commit(1)
    data = process_of(cluster, "node-2", "data")
    data.kill()
    data.wait(timeout=60)
    until(lambda: counters(cluster, "node-2").get("manifests_adopted"), "the data process to adopt its RAM")
    assert job.load() == 1
    job.commit(2)
    until(lambda: node_states(cluster, "node-2")["node-2"] == "UP", "node-2 to be UP again")


def test_a_killed_agent_is_restarted_alone(shared_cluster):
    """Neither a save that is under way on its node nor the node's vote goes with it."""
    cluster = shared_cluster(3)
    job = Job(cluster, ["node-1"], "agent")
    job.commit(1)
    agent, *others = (process_of(cluster, "node-1", kind) for kind in ("agent", "data", "registry"))
    (handle,) = job.save(2)
    agent.kill()
    handle.result(timeout=60)

    def another_agent() -> bool:
        with contextlib.suppress(AssertionError):
            return process_of(cluster, "node-1", "agent") != agent
        return False

    until(another_agent, "another agent")
    cluster.wait_up(["node-1"], timeout_s=60)
    assert [process_of(cluster, "node-1", kind) for kind in ("data", "registry")] == others
    job.commit(3)
    job.start()
    assert job.load() == 3


def test_a_trainer_killed_after_save_returned_has_lost_nothing(make_cluster):
    cluster = make_cluster(2)
    trainer = textwrap.dedent(
        """
        import os, signal, sys
        from fastcheck import Checkpointer
        from tests.cluster.harness import make_state
        ckpt = Checkpointer("gpt", rank=0, world_size=1, address=sys.argv[1])
        ckpt.save(1, make_state(7, 1, 0))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    with paused(process_of(cluster, "node-1", "data")):  # nothing can be replicated before it is dead
        done = subprocess.run(
            [sys.executable, "-c", trainer, cluster.address("node-0")],
            env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
            timeout=60,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
    job = Job(cluster, ["node-0"])
    until(lambda: job.ranks[0].steps() == [1], "the step of the dead trainer to be committed")
    assert job.load() == 1


def test_a_data_process_killed_before_the_commit_carries_on_after_its_restart(make_cluster):
    """Replicated and staged here, but the registry had no quorum: the next data process commits it."""
    cluster = make_cluster(4)
    job = Job(cluster, ["node-3"])
    job.commit(1)
    registries = [process_of(cluster, node, "registry") for node in ("node-0", "node-1", "node-2")]
    with paused(process_of(cluster, "node-0", "data")):
        pass
    (handle,) = job.save(2)
    with paused(*registries):
        process_of(cluster, "node-3", "data").kill()

    def newest():
        with contextlib.suppress(DaemonUnavailableError):  # it is just being started
            return job.ranks[0].steps()[-1:]

    until(lambda: handle.committed or handle.exception(), "an outcome of step 2")
    assert until(newest, "the daemon to answer") == ([2] if handle.committed else [1])
    assert [job.load()] == newest()
