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

#: An offer was taken, and nobody had the shard.
TAKEN = "ERROR_CODE_UNREACHABLE"
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

    def offer(self, incarnation, *, provisional=False):
        """The name of the error: there is nothing at the source, so an offer that is taken ends there."""
        request = peer_pb2.ReplicateRequest(
            cluster_id=self.cluster_id,
            epoch=1 << 40,
            holder_incarnation=incarnation,
            key=pb.ShardKey(job="late", step=1, rank=0, shard=0),
            digest=bytes(16),
            bytes=CHUNK,
            sources=[pb.Holder(node=pb.NodeRef(node_id="node-0", incarnation=1), data_address="127.0.0.1:1")],
            provisional=provisional,
        )
        with grpc.insecure_channel(self.address) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                peer_pb2_grpc.PeerServiceStub(channel).Replicate(request, timeout=60)
            error = refused.value
            name = str(dict(error.trailing_metadata()).get(ERROR_METADATA_KEY, error.details()))
            assert name in {"ERROR_CODE_NO_LEASE", "ERROR_CODE_FENCED", TAKEN}, error.details()
            return name


def taken(answer):
    return answer == TAKEN


def test_a_holder_that_was_stopped_and_declared_down_takes_nothing_before_it_has_a_lease_again(make_cluster):
    cluster = make_cluster(4)
    holder = Holder(cluster, "node-3")
    old = holder.life()
    until(lambda: (a := holder.offer(old)) and taken(a) and a, "a first offer to be taken")
    agent = process_of(cluster, "node-3", "agent")
    others = [process for pid in cluster.pids("node-3") if (process := psutil.Process(pid)) != agent]
    with paused(agent):
        with paused(*others):
            until(lambda: node_states(cluster, "node-0")["node-3"] == "DOWN", "node-3 to be DOWN")
        # The data process runs again, and its agent, which alone could tell it the news, does not.
        assert holder.offer(old) == "ERROR_CODE_NO_LEASE"
        assert holder.offer(old) == "ERROR_CODE_NO_LEASE", "also after it has waited"
        late = holder.offer(old, provisional=True)
        assert taken(late), "what nobody commits needs none"
    until(lambda: node_states(cluster, "node-0")["node-3"] == "UP", "node-3 to register anew")
    new = holder.life()
    assert new > old
    until(lambda: (a := holder.offer(new)) and taken(a) and a, "an offer to be taken in the new life")
    assert holder.offer(old) == "ERROR_CODE_FENCED"


def test_a_holder_that_a_majority_of_the_voters_does_not_answer_loses_its_lease_by_itself(make_cluster):
    cluster = make_cluster(4)
    holder = Holder(cluster, "node-3")
    life = holder.life()
    until(lambda: (a := holder.offer(life)) and taken(a) and a, "a first offer to be taken")
    registries = [process_of(cluster, node, "registry") for node in ("node-0", "node-1", "node-2")]
    with paused(*registries[:2]):
        until(lambda: holder.offer(life) == "ERROR_CODE_NO_LEASE", "the lease to end")
        late = holder.offer(life, provisional=True)
        assert taken(late)
    until(lambda: (a := holder.offer(life)) and taken(a) and a, "the lease to come back")


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
