"""Whom a restore asks, in which order, and how it is counted."""

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.restore.plan import other_sources, plan_fetch
from fastcheckd.restore.tally import Tally


def node(name: str, state: rpb.NodeState.ValueType = rpb.NODE_STATE_UP) -> rpb.NodeRecord:
    return rpb.NodeRecord(
        node_id=name, incarnation=7, state=state, data_address=f"{name}:1", lane_address=f"{name}:2"
    )


def record(holders: list[list[str]], owner: str = "own") -> rpb.RankRecord:
    return rpb.RankRecord(
        owner=pb.NodeRef(node_id=owner),
        shards=[
            rpb.ShardRecord(shard=i, holders=[pb.NodeRef(node_id=h) for h in names])
            for i, names in enumerate(holders)
        ],
    )


def sources(plans):
    return [[h.node.node_id for h in p.sources] for p in plans]


def test_holders_come_before_the_owner_and_each_shard_starts_with_another():
    nodes = {n: node(n) for n in ("a", "b", "own")}
    assert sources(plan_fetch(record([["a", "b"], ["a", "b"]]), nodes, "me")) == [
        ["a", "b", "own"],
        ["b", "a", "own"],
    ]


def test_a_node_held_down_is_asked_last():
    nodes = {"a": node("a", rpb.NODE_STATE_DOWN), "b": node("b"), "own": node("own")}
    assert sources(plan_fetch(record([["a", "b"]]), nodes, "me")) == [["b", "own", "a"]]


def test_this_node_and_unknown_nodes_are_not_asked():
    nodes = {n: node(n) for n in ("a", "me")}
    assert sources(plan_fetch(record([["a", "gone"]], owner="me"), nodes, "me")) == [["a"]]


def test_a_replacement_under_a_new_address_is_asked_there():
    nodes = {"a": rpb.NodeRecord(node_id="a", incarnation=9, state=rpb.NODE_STATE_UP, data_address="new:1")}
    (plan,) = plan_fetch(record([["a"]]), nodes, "me")
    assert (plan.sources[0].data_address, plan.sources[0].node.incarnation) == ("new:1", 9)


def test_others_are_the_live_nodes_not_yet_tried():
    nodes = {"a": node("a"), "b": node("b"), "c": node("c", rpb.NODE_STATE_DOWN), "me": node("me")}
    (plan,) = plan_fetch(record([["a"]]), nodes, "me")
    assert [h.node.node_id for h in other_sources(plan, nodes, "me")] == ["b"]


NAMES = st.sampled_from(["a", "b", "c", "d", "own", "me"])


@given(
    st.lists(st.lists(NAMES, max_size=3, unique=True), max_size=4),
    st.dictionaries(NAMES, st.sampled_from([rpb.NODE_STATE_UP, rpb.NODE_STATE_SUSPECT, rpb.NODE_STATE_DOWN])),
)
def test_every_known_copy_is_in_the_plan_once(holders, states):
    nodes = {n: node(n, s) for n, s in states.items()}
    for names, plan in zip(holders, sources(plan_fetch(record(holders), nodes, "me")), strict=True):
        assert sorted(plan) == sorted({*names, "own"} & set(nodes) - {"me"})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_rate_is_that_of_late_and_holders_are_counted_once():
    clock = Clock()
    tally = Tally(clock)
    tally.begin(1000)
    assert tally.look().bytes_per_s == 0
    tally.local_bytes = 100
    for second in range(1, 20):
        clock.now = float(second)
        tally.came("a" if second % 2 else "b", 10 if second < 12 else 30)
        seen = tally.look()
    assert (seen.bytes_done, seen.bytes_total, seen.holders) == (100 + 11 * 10 + 8 * 30, 1000, 2)
    assert seen.bytes_per_s == 30


def test_a_step_that_turns_out_incomplete_does_not_count_for_the_next_one():
    clock = Clock()
    tally = Tally(clock)
    tally.begin(1000)
    tally.came("a", 400)
    tally.look()
    tally.begin(500)
    clock.now = 1.0
    seen = tally.look()
    assert (seen.bytes_done, seen.bytes_total, seen.bytes_per_s) == (0, 500, 0)
