"""The way to the leader is cut, the ways to other voters are not: a follower asks the leader for us."""

import asyncio
import contextlib

import pytest
from tests.cluster.registry_actors import Rank, connected, leader_of, nodes
from tests.cluster.registry_process import RegistryCluster

from fastcheck_proto.v1 import node_pb2, registry_pb2
from fastcheckd.counters import Counters
from fastcheckd.errors import FencedError, NoQuorumError
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
