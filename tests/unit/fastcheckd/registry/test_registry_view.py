"""What a voter shows: the replicated state, and what it alone knows beside it."""

from tests.unit.fastcheckd.registry.small_cluster import (
    AT_MS,
    apply,
    cluster,
    register,
    set_draining,
    set_state,
)

from fastcheck_proto.v1 import registry_pb2
from fastcheckd.config import Voter
from fastcheckd.registry import commands
from fastcheckd.registry.raft.membership import voter_message, voter_of
from fastcheckd.registry.view import Signs, cluster_view


def voter(node_id):
    return Voter(node_id=node_id, registry_address=f"{node_id}:5", raft_address=f"{node_id}:6")


def shown(state, *, suspects=(), signs=None):
    view = cluster_view(
        state,
        cluster_id="test",
        leader="n0",
        voters=[voter("n0"), voter("n1")],
        suspects=suspects,
        ram_used_bytes={"n0": 7},
        signs=signs or {},
    )
    return view, {node.node_id: node for node in view.nodes}


def test_a_node_is_shown_with_its_labels_and_why_and_since_when_it_is_so():
    state = cluster()
    apply(state, register("n3", labels={"rack": "a1"}))
    apply(state, set_state(["n1", 2], "DOWN", "connection refused", at_ms=AT_MS + 9))
    apply(state, set_draining("n2"))
    _, nodes = shown(state)
    assert dict(nodes["n3"].labels) == {"rack": "a1"} and nodes["n3"].reason == "registered"
    assert nodes["n1"].state == registry_pb2.NODE_STATE_DOWN
    assert (nodes["n1"].reason, nodes["n1"].since_ms) == ("connection refused", AT_MS + 9)
    assert (nodes["n2"].state, nodes["n2"].reason) == (registry_pb2.NODE_STATE_DRAINING, "drained")
    assert nodes["n0"].ram_used_bytes == 7


def test_what_only_this_voter_knows_is_about_the_current_life():
    state = cluster()
    signs = {
        ("n0", 1): Signs(120, registry_pb2.DATA_HEALTH_HUNG, "its data process makes no progress"),
        ("n1", 99): Signs(5, registry_pb2.DATA_HEALTH_OK),
    }
    _, nodes = shown(state, suspects={("n0", 1), ("n1", 99), ("n2", 3)}, signs=signs)
    assert nodes["n0"].state == registry_pb2.NODE_STATE_SUSPECT
    assert nodes["n0"].reason == "its data process makes no progress"
    assert (nodes["n0"].heard_ms_ago, nodes["n0"].data) == (120, registry_pb2.DATA_HEALTH_HUNG)
    assert nodes["n1"].state == registry_pb2.NODE_STATE_UP and not nodes["n1"].HasField("heard_ms_ago")
    assert nodes["n1"].data == registry_pb2.DATA_HEALTH_UNSPECIFIED
    assert (nodes["n2"].state, nodes["n2"].reason) == (registry_pb2.NODE_STATE_SUSPECT, "registered")


def test_a_node_that_was_heard_this_very_moment_is_not_one_never_heard():
    _, nodes = shown(cluster(), signs={("n0", 1): Signs(0)})
    assert nodes["n0"].HasField("heard_ms_ago") and nodes["n0"].heard_ms_ago == 0


def test_only_a_node_that_is_up_is_shown_as_suspected():
    state = cluster()
    apply(state, set_draining("n0"))
    _, nodes = shown(state, suspects={("n0", 1)}, signs={("n0", 1): Signs(900, reason="silent")})
    assert (nodes["n0"].state, nodes["n0"].reason) == (registry_pb2.NODE_STATE_DRAINING, "drained")


def test_the_voters_are_the_engine_s_until_the_registry_names_others():
    state = cluster()
    view, nodes = shown(state)
    assert list(view.voters) == ["n0", "n1"] == [v.node_id for v in view.voter_records]
    assert [nodes[n].voter for n in ("n0", "n1", "n2")] == [True, True, False]
    apply(state, commands.set_voters([voter("n0"), voter("n2")], at_ms=1))
    view, nodes = shown(state)
    assert [voter_of(v) for v in view.voter_records] == [voter("n0"), voter("n2")]
    assert voter_message(voter("n2")) == view.voter_records[1]
    assert [nodes[n].voter for n in ("n0", "n1", "n2")] == [True, False, True]
