"""Who holds committed shards, changed by repairs and by nodes that come back."""

import pytest
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    apply,
    cluster,
    commit,
    move,
    pairs,
    refused,
    register,
    rehold,
    set_draining,
    set_state,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.registry.commands import CHANGES_MAX, HOLDERS_MAX
from fastcheckd.registry.model import DRAINING


@pytest.fixture
def state():
    """Step 5 of two ranks of n0 and n1, both held by n2 (incarnation 3); n3 (incarnation 4) has nothing."""
    state = cluster()
    assert apply(state, commit(5, RANKS)).ok
    assert apply(state, register("n3")).ok
    return state


def holders(state, rank=0, shard=0):
    return pairs(state.jobs["gpt"].steps[-1].ranks[rank].shards[shard].holders)


def changed(state, *changes):
    """Apply one command; returns why each change was refused, "" for those that were made."""
    result = apply(state, rehold(*changes))
    assert result.ok
    return list(result.why)


def not_changed(state, change, why):
    answer = refused_by_itself(state, change)
    assert why in answer, answer


def refused_by_itself(state, change):
    before = holders(state)[:]
    (why,) = changed(state, change)
    assert why and holders(state) == before
    return why


def test_a_lost_copy_is_replaced(state):
    apply(state, set_state(["n2", 3], "DOWN"))
    version = state.version
    assert changed(state, move(add=["n3", 4], remove=["n2", 3])) == [""]
    assert holders(state) == [("n3", 4)] and holders(state, shard=1) == [("n2", 3)], "shard by shard"
    assert state.version == version, "no view shows it"
    assert changed(state, move(add=["n3", 4], remove=["n2", 3])) == [""], "asked for again, it is so already"
    assert holders(state) == [("n3", 4)]


def test_another_copy_is_added_and_counted(state):
    step = state.jobs["gpt"].steps[-1]
    both = [move(shard=0, rank=rank, add=["n3", 4]) for rank in (0, 1)]
    assert changed(state, *both) == ["", ""]
    assert holders(state) == [("n2", 3), ("n3", 4)] and step.copies == 1, "other shards have one still"
    assert changed(state, *(move(shard=1, rank=rank, add=["n3", 4]) for rank in (0, 1))) == ["", ""]
    assert step.copies == 2


def test_changes_stand_each_alone(state):
    why = changed(state, move(add=["n9", 9]), move(add=["n3", 4]), move(shard=7, add=["n3", 4]))
    assert [bool(no) for no in why] == [True, False, True]
    assert holders(state) == [("n2", 3), ("n3", 4)]


def test_only_what_is_committed_is_held(state):
    not_changed(state, move(digest=b"\xcd" * 16, add=["n3", 4]), "has the digest abab")
    not_changed(state, move(step=4, add=["n3", 4]), "step 4 of job gpt is not kept")
    not_changed(state, move(job="other", add=["n3", 4]), "not kept")
    not_changed(state, move(rank=2, add=["n3", 4]), "no such rank or shard")
    not_changed(state, move(shard=2, add=["n3", 4]), "no such rank or shard")


def test_a_new_holder_is_up_in_this_life_and_not_the_owner(state):
    not_changed(state, move(add=["n3", 3]), "node n3 in incarnation 3 is over")
    not_changed(state, move(add=["nobody", 3]), "is over")
    not_changed(state, move(add=["n0", 1]), "is its owner")
    apply(state, set_draining("n3"))
    not_changed(state, move(add=["n3", 4]), "DRAINING")
    apply(state, set_state(["n3", 4], "DOWN"))
    not_changed(state, move(add=["n3", 4]), "is over")


def test_a_node_that_comes_back_has_its_copy_again_also_while_it_is_drained(state):
    apply(state, set_draining("n2"))
    apply(state, register("n2", "life-2"))
    assert state.nodes["n2"].state == DRAINING
    assert changed(state, move(add=["n2", 5])) == [""]
    assert holders(state) == [("n2", 5)], "in place of its earlier life"
    apply(state, set_state(["n2", 5], "DOWN"))
    not_changed(state, move(add=["n2", 5]), "is over")


def test_an_owner_that_comes_back_owns_its_steps_again(state):
    record = state.jobs["gpt"].steps[-1].ranks[0]
    not_changed(state, move(of_owner=True, add=["n3", 4]), "n0 does")
    apply(state, register("n0", "life-2"))
    assert changed(state, move(of_owner=True, add=["n0", 5])) == [""]
    assert pairs([record.owner]) == [("n0", 5)]
    not_changed(state, move(of_owner=True, add=["n0", 1]), "is over")


def test_no_live_copy_is_given_up_for_nothing(state):
    not_changed(state, move(remove=["n2", 3]), "fewer live copies")
    not_changed(state, move(add=["n3", 4], remove=["n1", 2]), "does not hold it any more")
    assert changed(state, move(remove=["n1", 2])) == [""], "it holds none: nothing to do"
    apply(state, set_draining("n2"))
    not_changed(state, move(remove=["n2", 3]), "fewer live copies")
    assert changed(state, move(add=["n3", 4], remove=["n2", 3])) == [""], "a drained node hands over"


def test_a_dead_copy_is_forgotten_only_while_another_lives(state):
    apply(state, set_state(["n2", 3], "DOWN"))
    assert changed(state, move(shard=1, remove=["n2", 3])) == [""]
    assert holders(state, shard=1) == []
    apply(state, set_state(["n0", 1], "DOWN"))
    not_changed(state, move(remove=["n2", 3]), "fewer live copies")


def test_a_shard_has_a_bounded_number_of_holders(state):
    for i in range(HOLDERS_MAX - 1):
        incarnation = apply(state, register(f"m{i}")).incarnation
        assert changed(state, move(add=[f"m{i}", incarnation])) == [""]
    not_changed(state, move(add=["n3", 4]), f"has {HOLDERS_MAX} holders already")
    assert changed(state, move(add=["n3", 4], remove=["n2", 3])) == [""]


def test_nonsense_changes_nothing_at_all(state):
    good = move(add=["n3", 4])
    for bad in (
        move(),
        move(add=["n3", 4], digest=b"ab"),
        move(add=["n3", 4], shard=64),
        move(add=["", 4]),
        move(add=["n2", 5], remove=["n2", 3]),
        move(of_owner=True, remove=["n0", 1]),
        move(of_owner=True, add=["n0", 1], remove=["n0", 1]),
    ):
        assert refused(state, rehold(good, bad)).code == pb.ERROR_CODE_INVALID, bad
    assert refused(state, rehold(*[good] * (CHANGES_MAX + 1))).code == pb.ERROR_CODE_INVALID
