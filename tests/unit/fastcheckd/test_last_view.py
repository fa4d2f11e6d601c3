"""The kept view: what was kept comes back, what was damaged does not."""

import asyncio

import pytest

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config import Config
from fastcheckd.identity import NodeLife
from fastcheckd.view import FILE_NAME, LastView, ViewFollower


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
