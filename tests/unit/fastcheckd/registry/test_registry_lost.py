"""Replicas that their nodes no longer have: LOST in the record, so that no leader counts copies that are gone."""

import copy

import pytest
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    again,
    apply,
    cluster,
    commit,
    mark,
    move,
    refused,
    register,
    rehold,
    set_state,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.registry.commands import MARKED_MAX
from fastcheckd.registry.model import Ref, ShardId
from fastcheckd.registry.redundancy import RecordedReplica, is_lost, survey


@pytest.fixture
def state():
    """Step 5 of two ranks of n0 and n1, both held by n2 (incarnation 3)."""
    state = cluster()
    assert apply(state, commit(5, RANKS)).ok
    return state


def replica(node, incarnation, *, step=5, rank=0, shard=0):
    return RecordedReplica(ShardId("gpt", step, rank, shard), Ref(node, incarnation))


COPY, OWNER = replica("n2", 3), replica("n0", 1)


def lost(state):
    return {each for each in (COPY, OWNER) if is_lost(state, each)}


def short(state):
    return survey(state, tolerate=1).short_shards


def test_a_lost_replica_counts_no_more_and_does_again_when_it_is_held_again(state):
    assert short(state) == 0
    assert apply(state, mark(lost=[COPY])).ok
    assert lost(state) == {COPY} and short(state) == 1
    assert apply(state, mark(lost=[COPY, OWNER])).ok
    assert lost(state) == {COPY, OWNER} and state.holders_version == 2
    assert lost(again(state)) == {COPY, OWNER}, "a voter that starts anew knows it"
    assert apply(state, mark(held=[COPY])).ok
    assert lost(state) == {OWNER}
    assert apply(state, mark(lost=[OWNER], held=[OWNER])).ok
    assert lost(state) == {OWNER}, "what is both is lost"
    assert apply(state, mark(held=[COPY, OWNER])).ok
    assert state.jobs["gpt"].steps[0].ranks == RANKS, "no trace is left"


def test_only_replicas_that_records_name_can_be_lost(state):
    before = copy.deepcopy(state)
    strangers = [
        replica("n1", 2),  # holds nothing of this rank
        replica("n2", 2),  # an earlier life
        replica("n9", 1),
        replica("n2", 3, step=4),
        replica("n2", 3, shard=7),
        replica("n2", 3, rank=7),
    ]
    assert apply(state, mark(lost=strangers)).ok
    assert state == before
    assert {is_lost(state, each) for each in strangers} == {None}


def test_a_loss_ends_with_the_life_and_with_the_step(state):
    apply(state, mark(lost=[COPY, OWNER]))
    apply(state, set_state(["n2", 3], "DOWN"))
    apply(state, register("n2", "life-2"))
    assert is_lost(state, COPY) is None, "of an earlier life nobody expects anything"
    assert apply(state, rehold(move(add=["n2", 4]))).why == [""]
    assert is_lost(state, replica("n2", 4)) is False, "the new life has it"
    del state.jobs["gpt"].steps[:]
    assert is_lost(state, OWNER) is None


def test_a_lost_replica_can_be_replaced_and_is_no_live_copy(state):
    assert apply(state, register("n3")).ok
    apply(state, mark(lost=[COPY]))
    assert apply(state, rehold(move(remove=["n2", 3]))).why == [""], "the owner's is left"
    assert apply(state, rehold(move(shard=1, add=["n3", 4]))).why == [""]
    apply(state, mark(lost=[replica("n2", 3, shard=1), replica("n0", 1, shard=1)]))
    assert apply(state, rehold(move(shard=1, remove=["n3", 4]))).why != [""], "the last one stays"


def test_a_holder_that_is_replaced_is_not_lost_any_more(state):
    assert apply(state, register("n3")).ok
    apply(state, mark(lost=[COPY]))
    assert apply(state, rehold(move(add=["n3", 4], remove=["n2", 3]))).why == [""]
    assert is_lost(state, COPY) is None and is_lost(state, replica("n3", 4)) is False and short(state) == 0


def test_an_owner_that_returns_with_a_part_never_counts_for_the_rest(state):
    apply(state, mark(lost=[OWNER]))
    apply(state, set_state(["n0", 1], "DOWN"))
    apply(state, register("n0", "life-2"))
    assert short(state) == 2
    result = apply(state, rehold(move(shard=0, of_owner=True, add=["n0", 9], absent=[1])))
    assert result.why != [""] and is_lost(state, replica("n0", 4, shard=1)) is None
    result = apply(state, rehold(move(shard=1, of_owner=True, add=["n0", 4], absent=[0, 63])))
    assert result.why == [""]
    assert is_lost(state, replica("n0", 4)) is True and is_lost(state, replica("n0", 4, shard=1)) is False
    assert short(state) == 1
    apply(state, set_state(["n0", 4], "DOWN"))
    apply(state, register("n0", "life-3"))
    assert apply(state, rehold(move(of_owner=True, add=["n0", 5]))).why == [""]
    assert is_lost(state, replica("n0", 5)) is False, "what an earlier life lost, this one has"


def test_what_an_owner_lacks_is_checked(state):
    for absent in ([64], list(range(64)) * 2):
        change = move(shard=1, of_owner=True, add=["n0", 1], absent=absent)
        assert refused(state, rehold(change)).code == pb.ERROR_CODE_INVALID
    assert refused(state, rehold(move(add=["n2", 3], absent=[0]))).code == pb.ERROR_CODE_INVALID, (
        "an owner alone"
    )


@pytest.mark.parametrize(
    "bad",
    [[COPY] * (MARKED_MAX + 1), [replica("n2", 3, shard=64)], [replica("", 3)], [replica("n2", 1 << 63)]],
)
def test_malformed_marks_change_nothing(state, bad):
    assert refused(state, mark(lost=bad)).code == pb.ERROR_CODE_INVALID
    assert refused(state, mark(held=bad)).code == pb.ERROR_CODE_INVALID
