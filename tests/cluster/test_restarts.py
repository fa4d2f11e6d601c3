"""Restarts of every node, one after the other and all at once: what RAM still holds is not lost, and jobs go on."""

import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.cluster.harness import Job, counters, node_states, until

NODES = [f"node-{i}" for i in range(4)]
#: What goes on in good order is seen with every upgrade as well (`test_upgrading.py`).
in_good_order_or_not = pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.long, id="SIGTERM"),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)


def stop(cluster, node, how):
    """End a node's agent in good order, or all of its processes at once; returns when nothing of it runs."""
    if how is signal.SIGKILL:
        cluster.kill(node)
    else:
        psutil.Process(cluster.pids(node)[0]).send_signal(how)
        until(lambda: not cluster.pids(node), f"{node} to end")


def all_up(cluster):
    until(lambda: set(node_states(cluster, "node-0").values()) == {"UP"}, "all nodes to be UP")


def test_every_node_is_restarted_in_turn_while_nothing_is_saved(shared_cluster):
    """In good order, so each is DOWN at once. No newer step replaces what it had: that has to be its own again."""
    cluster = shared_cluster(4)
    job = Job(cluster, NODES, "in-turn")
    for step in (1, 2):
        job.commit(step)
    for node in NODES:
        stop(cluster, node, signal.SIGTERM)
        cluster.start(node)
    job.start()
    assert job.ranks[0].steps() == [1, 2]
    for step in (1, 2):
        assert job.load(step) == step
    assert [counters(cluster, node)["shards_fetched"] for node in NODES] == [0] * 4, (
        "each has its own copy still"
    )
    job.commit(3)
    # And the copies on other nodes count as well: the owner's may be lost now.
    cluster.kill("node-3", wipe=True)
    job.start(["node-0", "node-1", "node-2", "node-0"])
    assert job.load() == 3
    assert job.load(2) == 2


@in_good_order_or_not
def test_the_whole_cluster_is_restarted_at_once_in_the_middle_of_a_save(shared_cluster, how):
    cluster = shared_cluster(4)
    job = Job(cluster, NODES, "at-once", megabytes=4)
    for step in (1, 2):
        job.commit(step)
    handles = job.save(3)
    with ThreadPoolExecutor(len(NODES)) as hands:
        list(hands.map(lambda node: stop(cluster, node, how), NODES))
        list(hands.map(cluster.start, NODES))
    all_up(cluster)
    # Where one rank's part is lost, the others wait for it until they save a newer step.
    until(lambda: all(h.done for h in handles) or any(h.exception() for h in handles), "an end of step 3")
    job.start()
    newest = job.load()
    assert newest in {2, 3}
    assert newest == 3 or not any(handle.committed for handle in handles)
    assert job.load(2) == 2
    job.commit(newest + 2)
    assert job.load() == newest + 2
