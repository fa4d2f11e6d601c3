"""The way to the leader is cut, the ways to other voters are not: a follower asks the leader for us."""

import asyncio
import contextlib

import pytest
from tests.cluster.registry_actors import Rank, connected, leader_of, nodes
from tests.cluster.registry_process import RegistryCluster

from fastcheck_proto.v1 import node_pb2, registry_pb2
from fastcheckd.counters import Counters
from fastcheckd.errors import FencedError, NoQuorumError, NotHeldError, UnsafeError
from fastcheckd.registry.client import RegistryClient
from fastcheckd.registry.outward import GrpcStubs

COMMITTED = registry_pb2.REPORT_STATE_COMMITTED


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = RegistryCluster(tmp_path_factory.mktemp("forwarding"), 3)
    cluster.start_all()
    yield cluster
    cluster.stop_all()


class Cuts:
    """Stubs whose calls to some addresses go to a port where nobody listens; counts all calls."""

    def __init__(self):
        self.real = GrpcStubs()
        self.cut = set()
        self.calls = []

    def __call__(self, address):
        self.calls.append(address)
        return self.real("127.0.0.1:9" if address in self.cut else address)


@contextlib.asynccontextmanager
async def around(cluster):
    """A client and the cuts in its ways."""
    cuts = Cuts()
    client = RegistryClient(cluster.config, Counters(), cuts)
    try:
        yield client, cuts
    finally:
        await client.close()
        await cuts.real.close()


def address_of(cluster, node_id):
    return next(v.registry_address for v in cluster.voters if v.node_id == node_id)


async def leader_address(cluster, client):
    return address_of(cluster, await leader_of(client))


def test_a_client_that_is_cut_off_from_the_leader_goes_on_through_a_follower(cluster):
    async def scenario():
        async with (
            connected(cluster.config) as well,
            nodes(well, cluster.config, 3) as started,
            around(cluster) as (client, cuts),
        ):
            leader = await leader_address(cluster, client)
            cuts.cut.add(leader)
            rank = Rank(client, started[0], 0, 1, job="cut")
            await rank.open("c")
            assert (await rank.save(1)).state == COMMITTED
            found = await client.lookup(registry_pb2.LookupRequest(job="cut"), timeout_s=10)
            assert found.record.step == 1
            with pytest.raises(FencedError):  # what the leader says comes through
                await Rank(client, started[0], 0, 1, job="nobody").place(1)
            # Once a follower has answered, the leader is not tried first each time.
            cuts.calls.clear()
            await client.lookup(registry_pb2.LookupRequest(job="cut"), timeout_s=10)
            assert (await client.view(5)).version > 0
            assert leader not in cuts.calls

    asyncio.run(scenario())


def test_a_client_asks_a_leader_that_a_view_names_itself(cluster):
    async def scenario():
        async with around(cluster) as (client, cuts):
            leader = await leader_address(cluster, client)
            cuts.calls.clear()
            await client.lookup(registry_pb2.LookupRequest(job="x"), timeout_s=10)
            assert cuts.calls == [leader]

    asyncio.run(scenario())


def test_the_client_goes_by_the_voters_that_a_view_names(cluster):
    async def scenario():
        async with around(cluster) as (client, cuts):
            view = await client.view(10)
            assert [v.node_id for v in view.voter_records] == list(view.voters)
            assert {(v.node_id, v.registry_address, v.raft_address) for v in view.voter_records} == {
                (v.node_id, v.registry_address, v.raft_address) for v in cluster.voters
            }
            strangers = [
                node_pb2.VoterRecord(node_id="x", registry_address="127.0.0.1:9", raft_address="x:1")
            ]
            client.use_voters(strangers)
            with pytest.raises(NoQuorumError):
                await client.lookup(registry_pb2.LookupRequest(job="x"), timeout_s=0.5)
            client.use_voters([])
            assert set(cuts.calls[-1:]) == {"127.0.0.1:9"}, "no voters are no change"
            client.use_voters(view.voter_records)
            await client.lookup(registry_pb2.LookupRequest(job="x"), timeout_s=10)

    asyncio.run(scenario())


def test_drains_history_and_forgetting_of_a_node(cluster):
    async def scenario():
        async with connected(cluster.config) as client, nodes(client, cluster.config, 3) as started:
            node = started[1]

            async def drain(draining):
                request = registry_pb2.SetDrainingRequest(node_id=node.node_id, draining=draining)
                await client.set_draining(request, timeout_s=10)
                view = await client.view(10)
                return next(n for n in view.nodes if n.node_id == node.node_id)

            rank = Rank(client, started[0], 0, 1, job="drained")
            await rank.open("c")
            shown = await drain(True)
            assert shown.state == registry_pb2.NODE_STATE_DRAINING and shown.reason == "drained"
            assert shown.since_ms > 1_600_000_000_000
            assert {h.node.node_id for s in (await rank.place(1)).shards for h in s.holders} == {"n2"}
            shown = await drain(False)
            assert shown.state == registry_pb2.NODE_STATE_UP

            forget = registry_pb2.ForgetRequest(node_id=node.node_id)
            with pytest.raises(UnsafeError, match="only a node that is DOWN"):
                await client.forget(forget, timeout_s=10)
            await client.leave(registry_pb2.LeaveRequest(node=node.ref), timeout_s=10)
            await client.forget(forget, timeout_s=10)
            assert node.node_id not in {n.node_id for n in (await client.view(10)).nodes}
            nobody = registry_pb2.SetDrainingRequest(node_id="nobody", draining=True)
            with pytest.raises(NotHeldError, match="no node nobody"):
                await client.set_draining(nobody, timeout_s=10)

            request = registry_pb2.HistoryRequest(node_id=node.node_id, limit=4)
            told = (await client.history(request, timeout_s=10)).transitions
            up, draining, down = (
                registry_pb2.NODE_STATE_UP,
                registry_pb2.NODE_STATE_DRAINING,
                registry_pb2.NODE_STATE_DOWN,
            )
            assert [(getattr(t, "from"), t.to, t.reason) for t in told] == [
                (up, draining, "drained"),
                (draining, up, "drain undone"),
                (up, down, "left"),
                (down, registry_pb2.NODE_STATE_UNSPECIFIED, "forgotten"),
            ]
            assert all(t.node == node.ref for t in told)
            everything = (await client.history(registry_pb2.HistoryRequest(), timeout_s=10)).transitions
            assert len(everything) > len(told)
            assert [t.epoch for t in everything] == sorted(t.epoch for t in everything)

    asyncio.run(scenario())
