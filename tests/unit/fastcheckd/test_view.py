"""What a view says of a job and of which sessions, how soon a data process goes by it, and how the last one is kept."""

import asyncio

import pytest
from tests.sockets import free_address
from tests.unit.fastcheckd.store.store_helpers import CHUNK, open_store, put, trained, weights

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config import Config
from fastcheckd.counters import Counters
from fastcheckd.identity import NodeLife
from fastcheckd.process.data import _DataProcess
from fastcheckd.store.retention import Kept
from fastcheckd.view import FILE_NAME, LastView, ViewFollower


def follower(**job):
    view = ViewFollower(None, NodeLife("a"))  # type: ignore[arg-type]
    view.view = rpb.ClusterView(jobs=[rpb.JobView(job="gpt", **job)])
    return view


def test_a_view_speaks_of_the_sessions_that_it_knows():
    view = follower(kept_steps=[3, 9], void_below_session=2, next_session=5)
    assert view.speaks_of("gpt", 4) and not view.speaks_of("gpt", 5)
    assert view.is_void("gpt", 1) and not view.is_void("gpt", 2)
    assert view.retention() == {"gpt": Kept(frozenset({3, 9}), 2, 5)}
    assert not view.is_void("other", 1)


def test_the_view_of_a_version_that_tells_nothing_of_sessions_is_taken_as_it_always_was():
    view = follower(kept_steps=[3])
    assert view.speaks_of("gpt", 10**6) and not view.is_void("gpt", 1)


def test_a_slow_reader_of_a_deleted_step_does_not_keep_newer_views_waiting(tmp_path):
    """Nodes join while a step is being deleted whose bytes somebody reads: the newest epoch counts at once."""
    config = Config(
        node_id="a", state_dir=tmp_path / "state", ram_dir=tmp_path / "ram", runtime_dir=tmp_path / "run",
        data_port=int(free_address().rpartition(":")[2]), lane_port=int(free_address().rpartition(":")[2]),
        ram_budget_bytes=1 << 24,
    )  # fmt: skip
    counters = Counters()
    store = open_store(config.ram_dir, 1 << 24, counters=counters)
    newer = trained(weights(1), 2)
    read = put(store, newer, 2, base=put(store, weights(1)))

    class Registry:
        async def watch(self):
            for epoch in (1, 2, 3):
                job = rpb.JobView(job="gpt", kept_steps=[1], void_below_session=2, next_session=2)
                yield rpb.ClusterView(
                    cluster_id=config.cluster_id, version=epoch, epoch=epoch, has_leader=True, jobs=[job]
                )
            await asyncio.Event().wait()

        def use_voters(self, voters):
            pass

    async def scenario():
        rooms = _DataProcess(config, store, counters)
        rooms.view._registry = Registry()
        rooms.maintenance.start()
        following = asyncio.create_task(rooms.view.run())
        try:
            with store.reading(read) as opened, opened.chunk(0) as view:
                async with asyncio.timeout(60):
                    while rooms.identity.epoch < 3 or [held.key.step for held in store.held("gpt")] != [1]:
                        await asyncio.sleep(0.01)
                assert view == newer[:CHUNK]
        finally:
            following.cancel()
            await rooms.maintenance.stop()
            await rooms.close()

    asyncio.run(scenario())


def config_of(tmp_path, **settings):
    return Config(state_dir=tmp_path / "state", **settings)


def view_of(epoch=3, cluster_id="fastcheck", node_id="a"):
    node = rpb.NodeRecord(node_id=node_id, incarnation=1, data_address="h:1", lane_address="h:2")
    return rpb.ClusterView(cluster_id=cluster_id, epoch=epoch, version=epoch, nodes=[node])


class Registry:
    """Shows these views, one after the other."""

    def __init__(self, *views):
        self.views = views

    def use_voters(self, records):
        pass

    async def watch(self):
        for view in self.views:
            yield view


def test_what_was_kept_is_read_again_and_the_newest_replaces_it(tmp_path):
    last = LastView(config_of(tmp_path))
    assert last.read() is None
    for epoch in (3, 4):
        last.keep(view_of(epoch))
    assert LastView(config_of(tmp_path)).read() == view_of(4)
    assert [p.name for p in (tmp_path / "state").iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_damaged_file_is_not_used(tmp_path, at):
    last = LastView(config_of(tmp_path))
    last.keep(view_of())
    path = tmp_path / "state" / FILE_NAME
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    assert last.read() is None
    path.write_bytes(b"")
    assert last.read() is None


@pytest.mark.parametrize("wrong", [{"cluster_id": "other"}, {"node_id": "../x"}])
def test_another_clusters_or_malformed_view_is_not_used(tmp_path, wrong):
    last = LastView(config_of(tmp_path))
    last.keep(view_of(**wrong))
    assert last.read() is None


def test_an_old_view_says_where_nodes_are_and_nothing_else(tmp_path):
    config = config_of(tmp_path)

    async def follow(*views):
        follower = ViewFollower(Registry(*views), NodeLife("a"), LastView(config))
        await follower.run()
        return follower

    asyncio.run(follow(view_of(3), view_of(4)))
    restarted = asyncio.run(follow())
    assert restarted.members() == view_of(4)
    assert not restarted.view.version and not restarted.kept_steps()
    assert asyncio.run(follow(view_of(9))).members() == view_of(9)
    foreign = view_of(11, cluster_id="other")
    assert asyncio.run(follow(foreign)).members() == view_of(9)


def test_whether_the_view_calls_this_life_up_and_why_not():
    follower = ViewFollower(Registry(), NodeLife("a"))
    ref = pb.NodeRef(node_id="a", incarnation=3)
    assert "no view" in follower.why_not_up(ref)
    node = rpb.NodeRecord(node_id="a", incarnation=2, state=rpb.NODE_STATE_UP)
    follower.view = rpb.ClusterView(nodes=[node])
    assert "no view" in follower.why_not_up(ref)  # it is about an earlier life
    follower.view.nodes[0].incarnation = 3
    assert follower.why_not_up(ref) == ""
    follower.view.nodes[0].state, follower.view.nodes[0].reason = rpb.NODE_STATE_DOWN, "silent"
    assert follower.why_not_up(ref) == "the registry calls it DOWN: silent"
