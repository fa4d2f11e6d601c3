from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.save.holders import Quarantine, pick_holders


def placement(holders: list[list[str]]) -> rpb.PlaceResponse:
    return rpb.PlaceResponse(
        shards=[
            rpb.ShardPlacement(shard=i, holders=[pb.Holder(node=pb.NodeRef(node_id=h)) for h in names])
            for i, names in enumerate(holders)
        ]
    )


def picked(shard: int, wanted: int, taken: list[str], response: rpb.PlaceResponse) -> list[str]:
    return [h.node.node_id for h in pick_holders(shard, wanted, taken, response)]


def test_the_placement_decides_when_nothing_has_failed():
    assert picked(1, 2, [], placement([["a", "b"], ["b", "c"]])) == ["b", "c"]


def test_a_copy_that_is_there_is_not_sent_again():
    assert picked(0, 1, ["a"], placement([["a", "b"]])) == ["b"]


def test_a_shard_beyond_a_later_smaller_placement_still_finds_holders():
    assert picked(2, 1, [], placement([["a"], ["b"]])) == ["a"]
    assert picked(3, 1, [], placement([["a"], ["b"]])) == ["b"]


NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True)


@given(
    st.integers(0, 5),
    st.integers(0, 3),
    st.sets(st.sampled_from("abcdef")),
    st.lists(NAMES, min_size=1, max_size=4),
)
def test_never_twice_never_taken_never_too_many(shard, wanted, taken, holders):
    names = picked(shard, wanted, list(taken), placement(holders))
    everyone = {h for group in holders for h in group}
    assert len(names) == len(set(names)) == min(wanted, len(everyone - taken))
    assert not set(names) & taken


def test_a_quarantined_peer_rests_and_comes_back():
    assert Quarantine(rest_s=60).members("j") == []
    quarantine = Quarantine(rest_s=60)
    quarantine.add("a")
    assert quarantine.members("j") == ["a"]
    quarantine.add("b", "j")
    assert quarantine.members("j") == ["a", "b"] and quarantine.members("k") == ["a"]
    brief = Quarantine(rest_s=0)
    brief.add("a")
    assert brief.members("j") == []
