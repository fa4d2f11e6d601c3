"""Claims that nodes took back: part of the state, so that no leader counts copies that are gone."""

import pytest
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    cluster,
    commit,
    move,
    refused,
    register,
    rehold,
    set_state,
)

from fastcheckd.registry import denials
from fastcheckd.registry.commands import deny
from fastcheckd.registry.denials import CLAIMS_MAX, DENIALS_MAX, denied_in
from fastcheckd.registry.redundancy import Claim, Ref, ShardId, survey
from fastcheckd.registry.state import apply, restore, snapshot


@pytest.fixture
def state():
    """Step 5 of two ranks of n0 and n1, both held by n2 (incarnation 3)."""
    state = cluster()
    assert apply(state, commit(5, RANKS))["ok"]
    return state


def claim(node, incarnation, *, step=5, rank=0, shard=0):
    return Claim(ShardId("gpt", step, rank, shard), Ref(node, incarnation))


COPY, OWNER = claim("n2", 3), claim("n0", 1)


def short(state):
    return survey(state, tolerate=1, denied=denied_in(state)).short_shards


def test_a_claim_taken_back_counts_no_more_and_does_again_when_it_is_confirmed(state):
    assert short(state) == 0
    assert apply(state, deny(gone=[COPY]))["ok"]
    assert denied_in(state) == {COPY} and short(state) == 1
    assert apply(state, deny(gone=[COPY, OWNER]))["ok"]
    assert denied_in(state) == {COPY, OWNER} and len(state["denied"]) == 2
    assert denied_in(restore(snapshot(state))) == {COPY, OWNER}, "a voter that starts anew knows it"
    assert apply(state, deny(held=[COPY]))["ok"]
    assert denied_in(state) == {OWNER}
    assert apply(state, deny(gone=[OWNER], held=[OWNER]))["ok"]
    assert denied_in(state) == {OWNER}, "who says both has lost it"


def test_only_claims_that_records_make_can_be_taken_back(state):
    strangers = [
        claim("n1", 2),  # holds nothing of this rank
        claim("n2", 2),  # an earlier life
        claim("n9", 1),
        claim("n2", 3, step=4),
        claim("n2", 3, shard=7),
        claim("n2", 3, rank=7),
    ]
    assert apply(state, deny(gone=strangers))["ok"]
    assert state["denied"] == []


def test_a_denial_ends_with_the_life_and_with_the_step(state):
    apply(state, deny(gone=[COPY, OWNER]))
    apply(state, set_state(["n2", 3], "DOWN"))
    apply(state, register("n2", "life-2"))
    assert denied_in(state) == {OWNER}, "of an earlier life nobody expects anything"
    apply(state, deny())
    assert len(state["denied"]) == 1, "and it is forgotten"
    del state["jobs"]["gpt"]["steps"][:]
    assert denied_in(state) == frozenset()


def test_a_holder_that_is_replaced_is_denied_no_more(state):
    assert apply(state, register("n3"))["ok"]
    apply(state, deny(gone=[COPY]))
    assert apply(state, rehold(move(add=["n3", 4], remove=["n2", 3])))["done"] == [True]
    assert denied_in(state) == frozenset() and short(state) == 0


def test_an_owner_that_returns_with_a_part_never_counts_for_the_rest(state):
    apply(state, set_state(["n0", 1], "DOWN"))
    apply(state, register("n0", "life-2"))
    assert short(state) == 2
    result = apply(state, rehold(move(shard=1, kind="owner", add=["n0", 4], absent=[0])))
    assert result["done"] == [True]
    assert denied_in(state) == {claim("n0", 4, shard=0)} and short(state) == 1
    result = apply(state, rehold(move(shard=0, kind="owner", add=["n0", 9], absent=[1])))
    assert result["done"] == [False] and len(state["denied"]) == 1, "a change that is refused denies nothing"


@pytest.mark.parametrize("absent", ["0", [64], [-1], [0.5], list(range(64)) * 2, None])
def test_what_an_owner_lacks_is_checked(state, absent):
    change = move(shard=1, kind="owner", add=["n0", 1]) | {"absent": absent}
    assert refused(state, rehold(change))["code"] == "INVALID"


def test_only_an_owner_may_lack_shards(state):
    assert refused(state, rehold(move(add=["n2", 3], absent=[0])))["code"] == "INVALID"


@pytest.mark.parametrize(
    "bad",
    [
        {"gone": None},
        {"gone": [["gpt", 5, 0, 0, "n2", 3]] * (CLAIMS_MAX + 1)},
        {"gone": [["gpt", 5, 0, 0, "n2"]]},
        {"gone": [["gpt", -5, 0, 0, "n2", 3]]},
        {"gone": [["gpt", 5, 0, 64, "n2", 3]]},
        {"gone": [["gpt", 5, 0, 0, "n2", "3"]]},
        {"gone": [["", 5, 0, 0, "n2", 3]]},
        {"held": "all"},
    ],
)
def test_malformed_denials_change_nothing(state, bad):
    assert refused(state, deny() | bad)["code"] == "INVALID"


def test_they_are_bounded(state, monkeypatch):
    assert DENIALS_MAX >= CLAIMS_MAX
    monkeypatch.setattr(denials, "DENIALS_MAX", 1)
    apply(state, deny(gone=[COPY, OWNER]))
    assert denied_in(state) == {COPY}
