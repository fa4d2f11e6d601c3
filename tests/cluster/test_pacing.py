"""Making copies keeps to the operator's cap, and a restore goes before it, at both ends."""

import time

from tests.cluster.harness import Job, counters, until

from fastcheck.admin import AdminClient

MB = 1_000_000


def lane_of(cluster, node):
    with AdminClient(cluster.address(node), timeout_s=5) as admin:
        return next(n for n in admin.nodes()["nodes"] if n["node_id"] == node)["lane"]


def test_copies_take_no_more_than_the_cap(make_cluster):
    settings = {"replicate_bytes_per_s": 5 * MB, "spread": 1, "chunk_bytes": 262144, "codec": "never"}
    cluster = make_cluster(2, **settings)
    job = Job(cluster, ["node-0"], megabytes=32)
    (handle,) = job.save(1)
    seen = []
    while not handle.committed:
        seen.append((time.monotonic(), counters(cluster, "node-0")["bytes_sent"]))
        time.sleep(0.1)
        assert len(seen) < 600
    moved = seen[-1][1] - seen[0][1]
    lasted_s = seen[-1][0] - seen[0][0]
    # A burst and a chunk for each connection, and time between the counter and the clock.
    assert moved <= 5 * MB * (lasted_s + 0.5) + 4 * 262144
    assert handle.stats["replicate_s"] >= 32 * 1048576 / (5 * MB) - 1.0
    assert counters(cluster, "node-0")["puts_paced"] > 0
    assert lane_of(cluster, "node-0")["pacing"]["reason"] == "cap"
    assert lane_of(cluster, "node-0")["pacing"]["bytes_per_s"] == 5 * MB


def test_a_restore_overtakes_copies_under_way_and_holds_them_back_at_both_ends(make_cluster):
    settings = {"replicate_bytes_per_s": 2 * MB, "spread": 1, "chunk_bytes": 65536, "codec": "never"}
    cluster = make_cluster(3, **settings)
    small = Job(cluster, ["node-2"], name="small", megabytes=12)
    small.commit(1)
    cluster.kill("node-2", wipe=True)
    cluster.start("node-2")
    # Both nodes that may have to serve the restore are busy with copies that will take long.
    big = [Job(cluster, [node], name=f"big-{node}", megabytes=40) for node in ("node-0", "node-1")]
    handles = [job.save(1)[0] for job in big]
    for node in ("node-0", "node-1"):
        before = counters(cluster, node)["bytes_sent"]
        until(lambda n=node, b=before: counters(cluster, n)["bytes_sent"] > b, "the copies are under way")
    small.start()
    loads = 0
    while not any(counters(cluster, node)["puts_for_restore"] for node in ("node-0", "node-1")):
        assert small.load() == 1
        loads += 1
        assert loads < 20, "no restore ever held a copy back"
        cluster.kill("node-2", wipe=True)
        cluster.start("node-2")
        small.start()
    assert not any(handle.committed for handle in handles), "they would have been done anyway"
    for handle in handles:
        handle.result(timeout=120)
