"""What becomes of a node: its states, drains, the history of them, and the voters that are named."""

import pytest
from tests.unit.fastcheckd.registry.small_cluster import (
    AT_MS,
    Command,
    apply,
    cluster,
    forget,
    pairs,
    refused,
    register,
    set_draining,
    set_state,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.config import LABELS_MAX, Voter
from fastcheckd.registry import commands
from fastcheckd.registry.model import DOWN, DRAINING, UNKNOWN, UP, Ref, State, live, state_name
from fastcheckd.registry.nodes import HISTORY_MAX, NODES_MAX
from fastcheckd.registry.raft.membership import voter_of


def told(state):
    """The history: when, epoch, node, life, from, to, why."""

    def name(value):
        return "" if value == UNKNOWN else state_name(value)

    return [
        [
            line.at_ms,
            line.epoch,
            *pairs([line.node])[0],
            name(getattr(line, "from")),
            name(line.to),
            line.reason,
        ]
        for line in state.history
    ]


def node_of(state, node_id="n0"):
    return state.nodes[node_id]


def test_a_node_brings_its_labels_and_an_older_one_has_none():
    state = State()
    apply(state, register("a", labels={"zone": "b", "rack": "a1"}))
    apply(state, register("b"))
    assert sorted(node_of(state, "a").labels.items()) == [("rack", "a1"), ("zone", "b")]
    assert node_of(state, "b").labels == {}
    apply(state, register("a", "life-2", labels={"rack": "a2"}))
    assert node_of(state, "a").labels == {"rack": "a2"}, "a new life says anew what it is"


@pytest.mark.parametrize(
    "labels",
    [
        {"": "x"},
        {"rack": "a b"},
        {"../x": "y"},
        {f"l{i}": "x" for i in range(LABELS_MAX + 1)},
    ],
)
def test_labels_are_names(labels):
    assert refused(State(), register("a", labels=labels)).code == pb.ERROR_CODE_INVALID


def test_every_state_has_a_reason_and_a_time():
    state = cluster()
    assert (node_of(state).reason, node_of(state).since_ms) == ("registered", AT_MS)
    apply(state, set_state(["n0", 1], "DOWN", "connection refused", at_ms=AT_MS + 5))
    assert (node_of(state).reason, node_of(state).since_ms) == ("connection refused", AT_MS + 5)
    apply(state, set_state(["n0", 1], "DOWN", "something else", at_ms=AT_MS + 6))
    assert node_of(state).reason == "connection refused", "it has been DOWN since, for the first reason"
    long = set_state(["n1", 2], "DOWN", "caf\u00e9\n" * 100)
    assert apply(state, long).ok and node_of(state, "n1").reason.startswith("caf??caf")
    wordy = set_state(["n2", 3], "DOWN")
    wordy.set_state.reason = "x" * 201
    assert refused(state, wordy).code == pb.ERROR_CODE_INVALID
    assert refused(state, set_state(["n2", 3], "SUSPECT")).code == pb.ERROR_CODE_INVALID
    assert refused(state, set_state(["n2", 3], "DOWN", at_ms=1 << 63)).code == pb.ERROR_CODE_INVALID


def test_history_tells_a_node_s_story_and_is_bounded():
    state = State()
    apply(state, register("a", at_ms=1))
    apply(state, set_state(["a", 1], "DOWN", "silent", at_ms=2))
    apply(state, register("a", "life-2", at_ms=3))
    apply(state, register("a", "life-3", at_ms=4))
    apply(state, set_draining("a", at_ms=5))
    apply(state, set_draining("a", False, at_ms=6))
    apply(state, set_state(["a", 3], "DOWN", "left", at_ms=7))
    apply(state, forget("a", at_ms=8))
    assert told(state) == [
        [1, 1, "a", 1, "", "UP", "registered"],
        [2, 2, "a", 1, "UP", "DOWN", "silent"],
        [3, 3, "a", 2, "DOWN", "UP", "came back"],
        [4, 4, "a", 3, "UP", "UP", "started anew"],
        [5, 5, "a", 3, "UP", "DRAINING", "drained"],
        [6, 6, "a", 3, "DRAINING", "UP", "drain undone"],
        [7, 7, "a", 3, "UP", "DOWN", "left"],
        [8, 8, "a", 3, "DOWN", "", "forgotten"],
    ]
    for i in range(HISTORY_MAX):
        apply(state, register("b", f"life-{i}"))
    assert len(state.history) == HISTORY_MAX and {entry.node.node_id for entry in state.history} == {"b"}


def test_a_drain_lasts_through_restarts_until_it_is_undone():
    state = cluster()
    epoch = state.epoch
    assert apply(state, set_draining("n0")).epoch == epoch + 1
    assert apply(state, set_draining("n0")).epoch == epoch + 1, "the same again is no change"
    assert node_of(state).state == DRAINING and live(state, Ref("n0", 1))
    apply(state, register("n0", "life-2"))
    assert node_of(state).state == DRAINING and node_of(state).reason == "started anew, still draining"
    apply(state, set_state(["n0", 4], "DOWN", "silent"))
    assert not live(state, Ref("n0", 4))
    apply(state, register("n0", "life-3"))
    assert node_of(state).state == DRAINING
    apply(state, set_draining("n0", False))
    assert node_of(state).state == UP
    apply(state, register("n0", "life-4"))
    assert node_of(state).state == UP


@pytest.mark.parametrize("died_first", [True, False])
def test_a_node_that_leaves_in_good_order_ends_its_drain(died_first):
    state = cluster()
    apply(state, set_draining("n0"))
    if died_first:
        apply(state, set_state(["n0", 1], "DOWN", "silent"))
    apply(state, set_state(["n0", 1], "DOWN", "left"))
    apply(state, register("n0", "life-2"))
    assert node_of(state).state == UP


def test_a_node_that_is_down_may_be_drained_before_it_comes_back():
    state = cluster()
    apply(state, set_state(["n0", 1], "DOWN", "silent"))
    assert apply(state, set_draining("n0")).ok
    assert node_of(state).state == DOWN
    apply(state, register("n0", "life-2"))
    assert node_of(state).state == DRAINING


def test_drains_of_nobody_are_refused():
    state = cluster()
    assert refused(state, set_draining("nobody")).code == pb.ERROR_CODE_NOT_FOUND
    assert refused(state, set_draining("")).code == pb.ERROR_CODE_INVALID
    assert refused(state, Command()).code == pb.ERROR_CODE_INVALID


def test_only_a_node_that_is_down_is_forgotten():
    state = cluster()
    for prepare in (commands.noop(), set_draining("n0")):
        apply(state, prepare)
        assert refused(state, forget("n0")).code == pb.ERROR_CODE_UNSAFE
    apply(state, set_state(["n0", 1], "DOWN", "silent"))
    epoch = apply(state, forget("n0")).epoch
    assert "n0" not in state.nodes and not live(state, Ref("n0", 1))
    assert apply(state, forget("n0")).epoch == epoch, "asked again, as after a lost answer"
    assert refused(state, forget("nobody")).code == pb.ERROR_CODE_NOT_FOUND
    assert apply(state, register("n0")).incarnation == 4, "numbers never come back"
    assert node_of(state).reason == "registered"


def test_who_had_to_make_room_is_in_the_history():
    state = State()
    for i in range(NODES_MAX):
        apply(state, register(f"m{i}"))
    apply(state, set_state(["m7", 8], "DOWN"))
    apply(state, register("one-more"))
    assert told(state)[-2][2:] == ["m7", 8, "DOWN", "", "forgotten to make room for one-more"]


def voters(*names):
    return [Voter(node_id=n, registry_address=f"{n}:5", raft_address=f"{n}:6") for n in names]


def test_the_voters_are_named_for_everyone():
    state = cluster()
    version, epoch = state.version, state.epoch
    named = commands.set_voters(voters("n0", "n1", "n2"), at_ms=1)
    assert apply(state, named).ok and apply(state, named).ok
    assert list(map(voter_of, state.voters)) == voters("n0", "n1", "n2")
    assert (state.version, state.epoch) == (version + 1, epoch)
    for bad in ([], voters("n0", "n0"), voters(*(f"v{i}" for i in range(10))), voters("../x")):
        assert refused(state, commands.set_voters(bad, at_ms=1)).code == pb.ERROR_CODE_INVALID
    same = [Voter(node_id=n, registry_address=f"{n}:5", raft_address="same:6") for n in ("n0", "n1")]
    assert refused(state, commands.set_voters(same, at_ms=1)).code == pb.ERROR_CODE_INVALID
