"""G6, after an outage that ends: commits go on within seconds, however long it was and however little memory there is.

While a rank's node is away, the other ranks go on saving steps that nobody can commit. Those must give way to newer
ones, at their owners and at their holders, before memory is full of them.
"""

import pytest
from tests.cluster.harness import process_of, until
from tests.cluster.lockstep import LockstepJob

#: Commits are wanted again this long after the node is back: its trainer's SDK looks for it every 8 s at least.
GOES_ON_S = 25.0


@pytest.mark.parametrize(
    ("nodes", "away", "settings"),
    [
        (5, "node-4", {}),
        pytest.param(2, "node-0", {}, marks=pytest.mark.long),
        pytest.param(2, "node-1", {"codec": "always"}, marks=pytest.mark.long),
        pytest.param(3, "node-2", {"codec": "never"}, marks=pytest.mark.long),
        pytest.param(8, "node-7", {"tolerate": 2}, marks=pytest.mark.long),
    ],
)
def test_commits_go_on_after_an_outage_longer_than_the_memory_lasts(make_cluster, nodes, away, settings):
    megabytes = 16
    cluster = make_cluster(nodes, ram_budget=str(round(6.7 * megabytes * 2**20)), **settings)
    other = next(n for n in reversed(cluster.node_ids) if n != away)
    with LockstepJob(cluster, [other, away], megabytes=megabytes, pause_s=0.25) as job:
        job.goes_on(3)
        cluster.kill(away)
        begun = len(job.events[0])
        until(lambda: len(job.events[0]) >= begun + 14, "rank 0 to train on alone", 60)
        assert not any("OutOfMemory" in f["error"] for f in job.failures(0)), job.failures(0)
        cluster.start(away)
        job.goes_on(5, GOES_ON_S)


def test_a_node_that_restarts_in_the_middle_of_a_step_holds_the_others_up_for_seconds_only(make_cluster):
    """What it had staged and not yet sent is gone with its data process: the others need not wait for that step."""
    cluster = make_cluster(5)
    with LockstepJob(cluster, ["node-3", "node-4"], megabytes=16, pause_s=0.25) as job:
        job.goes_on(3)
        for whole in (True, False):
            if whole:
                cluster.kill("node-4")
                cluster.start("node-4")
            else:
                process_of(cluster, "node-4", "data").kill()
            job.goes_on(2, GOES_ON_S)
