"""Several data processes on each node: workers encode and decode, and may die at any moment."""

import os
import signal
from pathlib import Path

import psutil
from tests.cluster.harness import DEADLINE_S, counters, process_of, until
from tests.cluster.test_codec import Training, assert_bits, checkpointer, load, save

NODES = ("node-0", "node-1", "node-2")
WORKERS = 2


def workers_of(cluster, node):
    """The node's worker processes, when all are there."""
    data = process_of(cluster, node, "data")

    def found():
        running = [p for p in data.children() if "fastcheckd.workers.process" in p.cmdline()]
        return running if len(running) == WORKERS else None

    return until(found, f"the worker processes of {node}")


def scratch_of(workers):
    """What lies in the memory where workers find what they are given (`workers.crew`), as far as it says what."""
    found = []
    for worker in workers:
        for link in Path(f"/proc/{worker.pid}/fd").iterdir():
            if "memfd:fastcheck-worker" in str(link.readlink()):
                with link.open("rb") as memory:
                    found.append(memory.read(4096))
    assert len(found) >= len(workers)
    return found


def kill_while_they_have_work(ckpt, training, step, workers):
    """SIGKILL all of them while chunks of a save are with them; the save's outcome."""
    for worker in workers:
        worker.suspend()
        until(lambda worker=worker: worker.status() == psutil.STATUS_STOPPED, "a worker to stand still")
    before = scratch_of(workers)
    training.step()
    handle = ckpt.save(step, training.state)
    until(lambda: scratch_of(workers) != before, "the workers to be given chunks")
    assert not handle.committed, "nobody can have worked on it"
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    return handle.result(timeout=DEADLINE_S)


def test_workers_are_killed_in_the_middle_of_saves_and_nothing_is_lost(make_cluster):
    # Two copies: both others hold it, also one that is slow to answer when it is placed.
    cluster = make_cluster(3, tolerate=2, codec="always", data_processes=1 + WORKERS)
    training = Training()
    workers = {node: workers_of(cluster, node) for node in NODES}
    with checkpointer(cluster) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, training, step)
        for node in NODES:  # the owner encodes, the holders decode
            told = counters(cluster, node)
            assert told["chunks_by_workers"] > 0 and told["workers_lost"] == 0, (node, told)

        kill_while_they_have_work(ckpt, training, 4, workers["node-0"])
        kill_while_they_have_work(ckpt, training, 5, workers["node-1"] + workers["node-2"])
        for node in NODES:
            fresh = workers_of(cluster, node)
            assert not {p.pid for p in fresh} & {p.pid for p in workers[node]}
        lost = {node: counters(cluster, node) for node in NODES}
        assert lost["node-0"]["workers_lost"] >= WORKERS and lost["node-0"]["chunks_not_by_workers"] > 0, lost
        assert sum(lost[node]["chunks_not_by_workers"] for node in NODES[1:]) > 0, lost

        before = counters(cluster, "node-0")["chunks_by_workers"]
        stats = save(ckpt, training, 6)
        assert stats["ratio"] > 2
        until(lambda: counters(cluster, "node-0")["chunks_by_workers"] > before, "the new workers to work")
    cluster.kill("node-0", wipe=True)
    cluster.start("node-0")
    assert_bits(load(cluster, 6), training.bits())
    for node in NODES[1:]:
        told = counters(cluster, node)
        assert not [name for name in told if name.startswith("corrupt_") and told[name]]


def test_workers_end_with_the_node(make_cluster):
    cluster = make_cluster(2, data_processes=1 + WORKERS)
    workers = workers_of(cluster, "node-1")
    process_of(cluster, "node-1", "data").kill()
    _, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert not alive
    workers = workers_of(cluster, "node-1")  # of the data process that came instead
    cluster.kill("node-1")
    _, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert not alive
