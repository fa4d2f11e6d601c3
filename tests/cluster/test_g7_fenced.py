"""G7: whoever may have been declared DOWN acknowledges nothing, and nobody acts for a life that is over."""

from __future__ import annotations

import grpc
import psutil
import pytest
import yaml
from tests.cluster.harness import Job, node_states, paused, process_of, until

from fastcheck.admin import AdminClient
from fastcheck_proto.conventions import ERROR_METADATA_KEY
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

CHUNK = 64 << 10


class Holder:
    """A node's data process, asked directly to take a copy: what a late sender does."""

    def __init__(self, cluster, node):
        self.cluster, self.node = cluster, node
        config = yaml.safe_load((cluster.dir / node / "config.yaml").read_text())
        self.cluster_id = config["cluster_id"]
        self.address = f"127.0.0.1:{config['data_port']}"

    def life(self):
        with AdminClient(self.cluster.address("node-0"), timeout_s=5) as admin:
            nodes = admin.nodes()
        return next(n["incarnation"] for n in nodes["nodes"] if n["node_id"] == self.node)

    def begin(self, incarnation, *, provisional=False):
        """The transfer, or the name of the error."""
        manifest = pb.ShardManifest(
            key=pb.ShardKey(job="late", step=1, rank=0, shard=0),
            shard_count=1, world_size=1, owner="node-0", session=1, state_bytes=CHUNK, bytes=CHUNK,
            chunk_bytes=CHUNK, chunk_lengths=[CHUNK], provisional=provisional,
        )  # fmt: skip
        request = peer_pb2.BeginPutRequest(
            cluster_id=self.cluster_id,
            epoch=1 << 40,
            holder_incarnation=incarnation,
            owner=pb.NodeRef(node_id="node-0", incarnation=1),
            manifest=manifest,
            streams=1,
            provisional=provisional,
        )
        with grpc.insecure_channel(self.address) as channel:
            try:
                return peer_pb2_grpc.PeerServiceStub(channel).BeginPut(request, timeout=60)
            except grpc.RpcError as error:
                name = str(dict(error.trailing_metadata()).get(ERROR_METADATA_KEY, error.details()))
                assert name in {"ERROR_CODE_NO_LEASE", "ERROR_CODE_FENCED"}, error.details()
                return name

    def abort(self, begun):
        with grpc.insecure_channel(self.address) as channel:
            peer_pb2_grpc.PeerServiceStub(channel).AbortPut(
                peer_pb2.AbortPutRequest(transfer_id=begun.transfer_id), timeout=10
            )


def taken(answer):
    return isinstance(answer, peer_pb2.BeginPutResponse)


def test_a_holder_that_was_stopped_and_declared_down_takes_nothing_before_it_has_a_lease_again(make_cluster):
    cluster = make_cluster(4)
    holder = Holder(cluster, "node-3")
    old = holder.life()
    begun = until(lambda: (a := holder.begin(old)) and taken(a) and a, "a first put to be taken")
    holder.abort(begun)
    agent = process_of(cluster, "node-3", "agent")
    others = [process for pid in cluster.pids("node-3") if (process := psutil.Process(pid)) != agent]
    with paused(agent):
        with paused(*others):
            until(lambda: node_states(cluster, "node-0")["node-3"] == "DOWN", "node-3 to be DOWN")
        # The data process runs again, and its agent, which alone could tell it the news, does not.
        assert holder.begin(old) == "ERROR_CODE_NO_LEASE"
        assert holder.begin(old) == "ERROR_CODE_NO_LEASE", "also after it has waited"
        late = holder.begin(old, provisional=True)
        assert taken(late), "what nobody commits needs none"
        holder.abort(late)
    until(lambda: node_states(cluster, "node-0")["node-3"] == "UP", "node-3 to register anew")
    new = holder.life()
    assert new > old
    begun = until(lambda: (a := holder.begin(new)) and taken(a) and a, "a put to be taken in the new life")
    holder.abort(begun)
    assert holder.begin(old) == "ERROR_CODE_FENCED"


def test_a_holder_that_a_majority_of_the_voters_does_not_answer_loses_its_lease_by_itself(make_cluster):
    cluster = make_cluster(4)
    holder = Holder(cluster, "node-3")
    life = holder.life()
    begun = until(lambda: (a := holder.begin(life)) and taken(a) and a, "a first put to be taken")
    holder.abort(begun)
    registries = [process_of(cluster, node, "registry") for node in ("node-0", "node-1", "node-2")]
    with paused(*registries[:2]):
        until(lambda: holder.begin(life) == "ERROR_CODE_NO_LEASE", "the lease to end")
        late = holder.begin(life, provisional=True)
        assert taken(late)
        holder.abort(late)
    begun = until(lambda: (a := holder.begin(life)) and taken(a) and a, "the lease to come back")
    holder.abort(begun)


@pytest.mark.parametrize("stopped", ["a whole node", "its data process"])
def test_steps_go_on_without_a_stopped_holder_and_none_is_lost_when_it_wakes(make_cluster, stopped):
    cluster = make_cluster(4, spread=1)
    job = Job(cluster, ["node-0"])
    job.commit(1)
    victims = ["node-1", "node-2", "node-3"]
    processes = [process_of(cluster, "node-3", "data")]
    if stopped == "a whole node":
        processes = [psutil.Process(pid) for pid in cluster.pids("node-3")]
    with paused(*processes):
        for step in (2, 3):
            job.commit(step)
    until(lambda: all(node_states(cluster, "node-0")[n] == "UP" for n in victims), "all to be UP")
    job.commit(4)
    job.start()
    assert job.load() == 4
