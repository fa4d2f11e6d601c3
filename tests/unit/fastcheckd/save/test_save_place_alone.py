"""Where copies go by what was known last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import PlacementError
from fastcheckd.save.without_quorum import LastPlacements, Silence, place_alone

NAMES = ["a", "b", "c", "d", "e"]


def node(name, state=rpb.NODE_STATE_UP):
    return rpb.NodeRecord(
        node_id=name, incarnation=1, state=state, data_address=f"{name}:1", lane_address=f"{name}:2"
    )


def placement(*shards, epoch=4):
    return rpb.PlaceResponse(
        epoch=epoch,
        generation=9,
        shards=[
            rpb.ShardPlacement(
                shard=index, holders=[pb.Holder(node=pb.NodeRef(node_id=n, incarnation=1)) for n in names]
            )
            for index, names in enumerate(shards)
        ],
    )


def alone(previous=None, nodes=(), gone=(), tolerate=1, avoid=()):
    found = place_alone(
        previous=previous,
        nodes=nodes,
        is_gone=lambda ref: ref.node_id in gone,
        owner="owner",
        job="gpt",
        rank=0,
        state_bytes=100,
        chunk_bytes=10,
        tolerate=tolerate,
        spread=3,
        avoid=avoid,
    )
    return found, [[h.node.node_id for h in shard.holders] for shard in found.shards]


def test_holders_stay_also_those_that_the_view_does_not_name_yet():
    found, names = alone(placement("ab", "bc"), [node("a"), node("d")], tolerate=2)
    assert names == [["a", "b"], ["b", "c"]]
    assert (found.epoch, found.generation) == (4, 9)


def test_those_that_are_gone_or_rest_are_replaced_and_nobody_else_moves():
    nodes = [node(name) for name in NAMES]
    nodes[0].state = rpb.NODE_STATE_DOWN
    _, names = alone(placement("ab", "bc", "cb"), nodes, gone="a", tolerate=2, avoid=["c"])
    assert [each[0] for each in names] == ["b", "b", "b"]
    assert all(len(set(each)) == 2 and not {"a", "c", "owner"} & set(each) for each in names)


def test_without_a_placement_the_view_alone_decides():
    nodes = [node("a"), node("b"), node("c", rpb.NODE_STATE_DOWN), node("d", rpb.NODE_STATE_DRAINING)]
    found, names = alone(None, [*nodes, node("owner")])
    assert {name for each in names for name in each} == {"a", "b"}
    assert found.shards[0].holders[0].data_address in {"a:1", "b:1"}


def test_too_few_are_an_error():
    with pytest.raises(PlacementError):
        alone(placement("a"), [node("a")], gone="a", tolerate=2)
    with pytest.raises(PlacementError):
        alone()


@given(
    shards=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), max_size=4),
    up=st.sets(st.sampled_from(NAMES)),
    gone=st.sets(st.sampled_from(NAMES)),
    avoid=st.sets(st.sampled_from(NAMES)),
    tolerate=st.integers(1, 3),
)
def test_every_shard_has_as_many_different_holders_as_wanted_and_none_that_is_gone(
    shards, up, gone, avoid, tolerate
):
    nodes = [node(name) for name in up - gone]
    known = (up - gone) | {name for each in shards for name in each if name not in gone}
    try:
        _, names = alone(placement(*shards), nodes, gone, tolerate, avoid)
    except PlacementError:
        assert len(known) < tolerate
        return
    assert not shards or len(names) == len(shards)
    for index, each in enumerate(names):
        assert len(each) == len(set(each)) == tolerate and set(each) <= known
        if shards:
            stay = [n for n in shards[index] if n in known and n not in avoid][:tolerate]
            assert set(stay) <= set(each), (
                "who stays is not moved; in which order they are named does not matter"
            )


def test_silence_lasts_for_a_while_and_ends_with_an_answer():
    now = [0.0]
    silence = Silence(lambda: now[0])
    assert not silence.lasts
    silence.noted()
    assert silence.lasts
    silence.heard()
    assert not silence.lasts
    silence.noted()
    now[0] = 10.0
    assert not silence.lasts


def test_the_memory_of_placements_is_bounded():
    last = LastPlacements()
    for rank in range(1000):
        last.remember("gpt", rank, placement("a"))
    assert last.get("gpt", 999) is not None and last.get("gpt", 0) is None
