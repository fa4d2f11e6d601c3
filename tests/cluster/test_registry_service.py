"""One real registry process, and what it answers."""

import asyncio

import pytest
from tests.cluster.registry_actors import Node, Rank, connected, eventually, nodes
from tests.cluster.registry_process import RegistryCluster

from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheckd.errors import FencedError, InvalidRequestError, NoQuorumError, NotNewerError

COMMITTED = registry_pb2.REPORT_STATE_COMMITTED
REFUSED = registry_pb2.REPORT_STATE_REFUSED
WAITING = registry_pb2.REPORT_STATE_WAITING


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    cluster = RegistryCluster(tmp_path_factory.mktemp("registry"), 1)
    cluster.start_all()
    yield cluster
    cluster.stop_all()


def play(registry, scenario, count=4):
    """Run a scenario with fresh nodes of a fresh registration."""

    async def run():
        async with connected(registry.config) as client, nodes(client, registry.config, count) as started:
            await asyncio.wait_for(scenario(client, started), 60)
            for node in started:
                await client.leave(registry_pb2.LeaveRequest(node=node.ref), timeout_s=5)

    asyncio.run(run())


def test_from_placement_to_commit_to_lookup(registry):
    async def scenario(client, started):
        ranks = [Rank(client, started[i], i, 2, job="flow") for i in range(2)]
        for rank in ranks:
            await rank.open(f"client-{rank.rank}")
        placement = await ranks[0].place(1)
        assert len(placement.shards) == 3
        for shard in placement.shards:
            assert [h.node.node_id for h in shard.holders] != ["n0"] and len(shard.holders) == 1
            holder = shard.holders[0]
            assert holder.data_address == f"{holder.node.node_id}:1" and holder.node.incarnation > 0
        steps = await client.list_job_steps(registry_pb2.ListJobStepsRequest(job="flow"), timeout_s=5)
        assert [(s.step, s.state, s.ranks) for s in steps.steps] == [
            (1, registry_pb2.STEP_STATE_REPLICATING, 0)
        ]
        assert (await ranks[0].report(1, placement, wait_s=0.1)).state == WAITING
        both = await asyncio.gather(ranks[0].save(1), ranks[1].save(1))
        assert [r.state for r in both] == [COMMITTED, COMMITTED]
        assert (await ranks[0].report(1, placement)).state == COMMITTED, "asking again is harmless"
        for step in (2, 5):
            assert {r.state for r in await asyncio.gather(*(r.save(step) for r in ranks))} == {COMMITTED}
        listed = await client.list_job_steps(registry_pb2.ListJobStepsRequest(job="flow"), timeout_s=5)
        assert [(s.step, s.lossy) for s in listed.steps] == [(2, False), (5, False)]

        found = await client.lookup(registry_pb2.LookupRequest(job="flow"), timeout_s=5)
        assert found.record.step == 5 and list(found.kept_steps) == [2, 5] and found.record.copies == 1
        assert [r.rank for r in found.record.ranks] == [0, 1]
        assert {s.digest for s in found.record.ranks[1].shards} == {ranks[1].digest(5)}
        assert sum(s.bytes for s in found.record.ranks[0].shards) == found.record.ranks[0].state_bytes
        one = await client.lookup(registry_pb2.LookupRequest(job="flow", step=2, rank=1), timeout_s=5)
        assert one.record.step == 2 and [r.rank for r in one.record.ranks] == [1]
        gone = await client.lookup(registry_pb2.LookupRequest(job="flow", step=1), timeout_s=5)
        assert not gone.HasField("record") and list(gone.kept_steps) == [2, 5]
        nothing = await client.lookup(registry_pb2.LookupRequest(job="nobody"), timeout_s=5)
        assert not nothing.HasField("record") and not nothing.kept_steps
        with pytest.raises(NotNewerError):
            await ranks[0].place(5)
        jobs = await client.list_jobs(registry_pb2.ListJobsRequest(), timeout_s=5)
        assert [(j.job, list(j.kept_steps), j.world_size) for j in jobs.jobs if j.job == "flow"] == [
            ("flow", [2, 5], 2)
        ]

    play(registry, scenario)


def test_a_lost_holder_is_reported_while_waiting(registry):
    async def scenario(client, started):
        rank, other = (Rank(client, started[i], i, 2, job="lost") for i in range(2))
        await rank.open("a")
        await other.open("b")
        placement = await rank.place(1, avoid=["n1", "n2"])
        assert {h.node.node_id for s in placement.shards for h in s.holders} == {"n3"}
        waiting = asyncio.create_task(rank.report(1, placement, wait_s=10))
        await eventually(lambda: not waiting.done())
        await client.leave(registry_pb2.LeaveRequest(node=started[3].ref), timeout_s=5)
        response = await waiting
        assert response.state == REFUSED and response.error.code == common_pb2.ERROR_CODE_HOLDER_LOST
        assert [ref.node_id for ref in response.lost_holders] == ["n3"]
        both = await asyncio.gather(rank.save(1), other.save(1))
        assert {r.state for r in both} == {COMMITTED}
        await started[3].register(client)

    play(registry, scenario)


def test_nonsense_is_refused(registry):
    async def scenario(client, started):
        node = started[0]
        fine = {"cluster_id": "test", "node_id": "x", "life_id": "x", "agent_address": "a:1"}
        fine |= {"data_address": "a:2", "lane_address": "a:3"}
        for wrong in ({"cluster_id": "other"}, {"node_id": "../x"}, {"life_id": ""}, {"agent_address": "é"}):
            with pytest.raises(InvalidRequestError):
                await client.register(registry_pb2.RegisterRequest(**(fine | wrong)), timeout_s=5)
        for job, rank, world_size in (("../x", 0, 1), ("j", 1, 1), ("j", 0, 0), ("j", 0, 1 << 31)):
            with pytest.raises(InvalidRequestError):
                await Rank(client, node, rank, world_size, job=job).open("c")
        rank = Rank(client, node, 0, 1, job="nonsense")
        with pytest.raises(FencedError):
            await rank.place(1)
        await rank.open("c")
        good = rank.request(1, await rank.place(1))
        for spoil in (
            lambda r: r.record.shards.pop(),
            lambda r: setattr(r.record.shards[0], "digest", b"short"),
            lambda r: setattr(r.record.shards[0], "shard", 7),
            lambda r: setattr(r.record.shards[1], "bytes", (1 << 64) - 1),
            lambda r: setattr(r, "step", (1 << 64) - 1),
            lambda r: setattr(r, "job", "a" * 200),
        ):
            bad = registry_pb2.ReportRequest()
            bad.CopyFrom(good)
            spoil(bad)
            with pytest.raises(InvalidRequestError):
                await client.report(bad, timeout_s=5)
        own = registry_pb2.ReportRequest()
        own.CopyFrom(good)
        own.record.shards[0].holders[0].CopyFrom(node.ref)
        response = await client.report(own, timeout_s=5)
        assert response.state == REFUSED and response.error.code == common_pb2.ERROR_CODE_INVALID
        good.wait_s = float("nan")
        assert (await client.report(good, timeout_s=5)).state in {COMMITTED, WAITING}

    play(registry, scenario)


def test_watchers_see_every_change_and_never_an_older_view(registry):
    async def scenario(client, started):
        views = client.watch()
        first = await anext(views)
        rank = Rank(client, started[0], 0, 1, job="watched")
        await rank.open("c")
        assert (await rank.save(1)).state == COMMITTED
        version = first.version
        async for view in views:
            assert view.version >= version
            version = view.version
            if any(job.job == "watched" and list(job.kept_steps) == [1] for job in view.jobs):
                break
        await views.aclose()
        view = await client.view(5)
        shown = next(n for n in view.nodes if n.node_id == "n0")
        assert shown.ram_used_bytes == 77 and view.leader == "node-0" and view.has_leader

    play(registry, scenario)


def test_an_unregistered_node_is_fenced_by_the_leader(registry):
    async def scenario(client, started):
        stranger = Node(registry.config, "stranger")
        stranger.incarnation = 99
        stranger.start_heartbeats()
        await asyncio.wait_for(stranger.fenced.wait(), 10)
        await stranger.stop_heartbeats()
        assert stranger.ref == common_pb2.NodeRef(node_id="stranger", incarnation=99)

    play(registry, scenario, count=1)


def test_without_a_registry_calls_end_in_time(tmp_path):
    cluster = RegistryCluster(tmp_path, 3)

    async def scenario():
        async with connected(cluster.config) as client:
            start = asyncio.get_running_loop().time()
            with pytest.raises(NoQuorumError, match="within 1 s"):
                await client.lookup(registry_pb2.LookupRequest(job="x"), timeout_s=1)
            assert asyncio.get_running_loop().time() - start < 10
            assert client._counters.get("registry_retries") >= 3

    asyncio.run(scenario())
