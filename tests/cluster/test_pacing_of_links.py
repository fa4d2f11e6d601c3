"""Making copies keeps to the operator's cap, and whoever serves a restore holds its own copies back."""

import contextlib
import socket
import threading
import time

import grpc
from tests.cluster.harness import Job, counters, until

from fastcheck.admin import AdminClient
from fastcheck_proto.v1 import common_pb2, node_pb2, node_pb2_grpc, peer_pb2, peer_pb2_grpc
from fastcheckd.chunks import ChunkTable
from fastcheckd.transfer.frames import WANT_INDEXES_MAX, Hello, pack_hello, pack_want

MB = 1_000_000


def lane_of(cluster, node):
    with AdminClient(cluster.address(node), timeout_s=5) as admin:
        return next(n for n in admin.nodes()["nodes"] if n["node_id"] == node)["lane"]


def test_copies_take_no_more_than_the_cap(make_cluster):
    settings = {"replicate_bytes_per_s": 5 * MB, "spread": 1, "chunk_bytes": 262144, "codec": "never"}
    cluster = make_cluster(2, **settings)
    job = Job(cluster, ["node-0"], megabytes=20)
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
    assert handle.stats["replicate_s"] >= 20 * 1048576 / (5 * MB) - 1.0
    assert counters(cluster, "node-0")["copies_paced"] > 0
    assert lane_of(cluster, "node-0")["pacing"]["reason"] == "cap"
    assert lane_of(cluster, "node-0")["pacing"]["bytes_per_s"] == 5 * MB


def test_whoever_serves_a_restore_holds_its_own_copies_back(make_cluster):
    # A stream that is held back sends a piece in a part of the time that a transfer may stand still for.
    settings = {"replicate_bytes_per_s": 10 * MB, "transfer_timeout_s": 6.0, "chunk_bytes": 65536}
    cluster = make_cluster(2, spread=1, codec="never", **settings)
    job = Job(cluster, ["node-0"], megabytes=40)
    (handle,) = job.save(1)
    with slow_reader(cluster, "node-0", lambda: handle.committed):
        (under_way,) = job.save(2)
        until(
            lambda: counters(cluster, "node-0")["copies_for_restore"] > 5, "copies that wait for the reader"
        )
        assert lane_of(cluster, "node-0")["pacing"]["reason"] == "restore"
        before = counters(cluster, "node-0")["bytes_sent"]
        until(lambda: counters(cluster, "node-0")["bytes_sent"] > before, "a trickle all the same")
        assert not under_way.replicated
    under_way.result(timeout=60)


@contextlib.contextmanager
def slow_reader(cluster, node, ready):
    """A peer that has asked a node for a shard, as a restore does, and takes its time to read it."""
    until(ready, "something to read")
    with AdminClient(cluster.address(node), timeout_s=5) as admin:
        address = next(n for n in admin.nodes()["nodes"] if n["node_id"] == node)["lane_address"]
        found = admin.replicas("gpt", step=1)["replicas"][0]
    with grpc.insecure_channel(cluster.address(node)) as channel:
        who = node_pb2_grpc.NodeServiceStub(channel).Describe(node_pb2.DescribeRequest(), timeout=60)
    request = peer_pb2.OpenRequest(
        cluster_id=who.cluster_id, digest=bytes.fromhex(found["digest"]), streams=1,
        purpose=peer_pb2.PURPOSE_RESTORE,
        key=common_pb2.ShardKey(job="gpt", step=1, rank=0, shard=found["shard"]),
    )  # fmt: skip
    with grpc.insecure_channel(who.data_address) as channel:
        begun = peer_pb2_grpc.PeerServiceStub(channel).Open(request, timeout=60)
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        table = ChunkTable.of(begun.manifest)
        for first in range(0, len(table), WANT_INDEXES_MAX):
            wanted = range(first, min(len(table), first + WANT_INDEXES_MAX))
            hello = b"" if first else pack_hello(Hello(begun.tickets[0]))
            sock.sendall(hello + b"".join(pack_want(wanted)))
        assert sock.recv(1)
        stop = threading.Event()

        def sip():  # or the sender gives up
            while not stop.wait(0.2):
                sock.recv(1 << 16)

        thread = threading.Thread(target=sip)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(10)
