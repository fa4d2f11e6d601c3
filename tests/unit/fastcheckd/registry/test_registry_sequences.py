"""Whatever the log holds: what must be true of the state machine after any commands in any order."""

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheckd.registry.small_cluster import (
    RANKS,
    cluster,
    commit,
    forget,
    open_rank,
    record,
    register,
    rehold,
    set_draining,
    set_state,
)

from fastcheckd.config import Voter
from fastcheckd.registry import commands as made
from fastcheckd.registry.nodes import HISTORY_MAX
from fastcheckd.registry.records import live
from fastcheckd.registry.redundancy import RecordedReplica, Ref, ShardId
from fastcheckd.registry.state import SCHEMA, apply, restore, snapshot

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
nodes = st.sampled_from(["n0", "n1", "n2", "n3"])
refs = st.tuples(nodes, st.integers(1, 8)).map(list)
rank_records = st.builds(
    record,
    st.integers(0, 2),
    st.integers(1, 6),
    refs,
    st.lists(refs, min_size=1, max_size=2),
    st.sampled_from([0, 100]),
)
changes = st.builds(
    made.holder_change,
    st.just("gpt"),
    st.sampled_from([2, 3, 3, 6]),
    st.integers(0, 1),
    st.integers(0, 2),
    st.sampled_from(["ab" * 16, "ab" * 16, "cd" * 16]),
    kind=st.sampled_from(["copy", "copy", "owner"]),
    add=st.none() | refs,
    remove=st.none() | refs,
)
replicas = st.builds(
    lambda step, rank, shard, ref: RecordedReplica(ShardId("gpt", step, rank, shard), Ref(*ref)),
    st.sampled_from([2, 3, 6]), st.integers(0, 1), st.integers(0, 2), refs,
)  # fmt: skip
voters = st.builds(
    lambda ids: [Voter(node_id=n, registry_address=f"{n}:5", raft_address=f"{n}:6") for n in ids],
    st.lists(nodes, max_size=3),
)
times = st.integers(0, 99)
whole_commands = st.one_of(
    st.builds(register, nodes, st.sampled_from(["l1", "l2"]), at_ms=times),
    st.builds(set_state, refs, st.sampled_from(["UP", "DOWN", "DRAINING"]), st.sampled_from(["", "left"])),
    st.builds(set_draining, nodes, st.booleans()),
    st.builds(forget, nodes),
    st.builds(made.set_voters, voters, at_ms=times),
    st.builds(
        open_rank,
        st.just("gpt"),
        st.integers(0, 1),
        st.integers(1, 2),
        st.sampled_from(["c0", "c1", "c2"]),
        refs,
    ),
    st.builds(commit, st.integers(0, 9), st.lists(rank_records, max_size=2), st.integers(1, 2)),
    st.just(commit(3, RANKS)),
    st.just(commit(6, RANKS)),
    st.builds(lambda these: rehold(*these), st.lists(changes, max_size=4)),
    st.builds(made.delete, st.just("gpt"), st.none() | st.integers(0, 9), even_if_running=st.booleans()),
    st.builds(made.close_rank, st.just("gpt"), st.integers(0, 1), st.integers(0, 6)),
    st.builds(made.supersede, st.just("gpt"), st.integers(0, 1), st.integers(0, 6), refs, st.integers(0, 9)),
    st.builds(made.mark, st.lists(replicas, max_size=3), st.lists(replicas, max_size=3)),
    st.just(made.upgrade(SCHEMA)),
    st.just(made.noop()),
)
commands = st.one_of(
    whole_commands,
    json_values,
    st.builds(
        lambda base, data: base | {data.draw(st.sampled_from(sorted(base))): data.draw(json_values)},
        whole_commands,
        st.data(),
    ),
)


def live_copies(state, owner, holders):
    return sum(live(state, ref[:2]) for ref in [owner, *holders])


def shards_of(state):
    """(step, rank, shard) -> (owner, holders) of all that is kept."""
    return {
        (kept["step"], record["rank"], index): (record["owner"], shard["holders"])
        for kept in state["jobs"]["gpt"]["steps"]
        for record in kept["ranks"]
        for index, shard in enumerate(record["shards"])
    }


def bytes_of(kept):
    """A committed step without what may change in it: who holds it."""
    known = copy.deepcopy(kept)
    del known["copies"]
    for rank in known["ranks"]:
        rank["owner"] = rank["owner"][0]
        for shard in rank["shards"]:
            del shard["holders"]
            shard.pop("owner_state", None)
    return known


def check_nodes(state):
    for node in state["nodes"].values():
        assert node["state"] == "DOWN" or node["draining"] == (node["state"] == "DRAINING")
        assert node["incarnation"] < state["next_incarnation"]
    epochs = [entry[1] for entry in state["history"]]
    assert epochs == sorted(set(epochs)) and len(epochs) <= HISTORY_MAX
    assert not epochs or epochs[-1] == state["epoch"]
    last = {entry[2]: entry for entry in state["history"]}
    for node_id, entry in last.items():
        assert entry[5] == state["nodes"].get(node_id, {"state": ""})["state"], "history ends with what is"


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(commands, st.integers(0, 40)), max_size=25))
def test_no_sequence_of_commands_raises_or_goes_back(sequence):
    state = cluster()
    assert apply(state, commit(2, RANKS))["ok"]
    assert apply(state, register("n3"))["ok"]
    replica = restore(snapshot(state))
    committed = {}
    for given_command, seq in sequence:
        numbered = {"client_id": "p", "seq": seq}
        command = given_command | numbered if isinstance(given_command, dict) else given_command
        before = copy.deepcopy(state)
        result = apply(state, command)
        json.dumps(result)
        assert result.get("code") != "INTERNAL", result
        if not result["ok"]:
            assert state | {"seen": 0} == before | {"seen": 0}, "a refusal changes nothing"
        # Another voter, restored from a snapshot on the way, comes to the same state.
        replica = restore(snapshot(replica))
        assert apply(replica, json.loads(json.dumps(command))) == result
        assert snapshot(replica) == snapshot(state)
        job = state["jobs"]["gpt"]
        void = job.get("void", 0)
        assert (void, job["newest"]) >= (
            before["jobs"]["gpt"].get("void", 0),
            before["jobs"]["gpt"]["newest"],
        ), "only a deletion takes a job back"
        assert state["epoch"] >= before["epoch"] and state["version"] >= before["version"]
        steps = [kept["step"] for kept in job["steps"]]
        assert steps == sorted(set(steps)) and len(steps) <= 2 and (not steps or steps[-1] == job["newest"])
        for kept in job["steps"]:
            known = bytes_of(kept)
            # After a deletion another session may save the same number anew.
            step_of = kept["step"], *(rank["session"] for rank in kept["ranks"])
            assert committed.setdefault(step_of, known) == known, "a committed step never changes"
            assert [r["rank"] for r in kept["ranks"]] == list(range(kept["world_size"]))
            assert kept["copies"] == min(len(s["holders"]) for r in kept["ranks"] for s in r["shards"])
        check_nodes(state)
        was = shards_of(before)
        for key, (owner, holders) in shards_of(state).items():
            on = [owner[0], *(holder[0] for holder in holders)]
            assert len(set(on)) == len(on), "never two copies of a shard on one node, its owner's included"
            if isinstance(command, dict) and command.get("type") == "rehold":
                assert live_copies(state, owner, holders) >= live_copies(state, *was[key])


#: What befalls a small cluster, told without incarnations: those are the current ones when it happens.
happenings = st.one_of(
    st.tuples(st.just("register"), nodes),
    st.tuples(st.just("down"), nodes),
    st.tuples(st.just("drain"), nodes, st.booleans()),
    *(
        st.tuples(
            st.just("rehold"),
            st.sampled_from(["copy", "copy", "copy", "owner"]),
            st.integers(0, 1),
            st.none() | nodes,
            st.none() | nodes,
        )
        for _ in range(3)
    ),
)


def command_of(state, count, what, *details):
    if what == "register":
        return register(details[0], f"life-{count}")
    if what == "drain":
        return set_draining(*details)
    if what == "down":
        return set_state([details[0], state["nodes"][details[0]]["incarnation"]], "DOWN", "silent")
    kind, rank, add, remove = details
    held = shards_of(state)[2, rank, 0][1]
    return rehold(
        made.holder_change(
            "gpt", 2, rank, 0, "ab" * 16, kind=kind,
            add=None if add is None else [add, state["nodes"][add]["incarnation"]],
            remove=next((holder for holder in held if holder[0] == remove), None),
        )
    )  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(happenings, min_size=1, max_size=20))
def test_no_change_of_holders_costs_a_live_copy_or_puts_two_on_a_node(sequence):
    state = cluster()
    assert apply(state, register("n3"))["ok"]
    assert apply(state, commit(2, RANKS))["ok"]
    for count, happening in enumerate(sequence):
        before = copy.deepcopy(state)
        command = command_of(state, count, *happening)
        result = apply(state, command)
        assert result.get("code") != "INTERNAL", result
        if not any(result.get("done", [False])) and command["type"] == "rehold":
            assert state == before, "a refused change changes nothing"
        was = shards_of(before)
        for key, (owner, holders) in shards_of(state).items():
            on = [owner[0], *(holder[0] for holder in holders)]
            assert len(set(on)) == len(on), "never two copies of a shard on one node, its owner's included"
            if command["type"] == "rehold":
                assert live_copies(state, owner, holders) >= live_copies(state, *was[key])
                assert all(live(state, ref) for ref in holders if ref not in was[key][1])
        (kept,) = state["jobs"]["gpt"]["steps"]
        assert kept["copies"] == min(len(s["holders"]) for r in kept["ranks"] for s in r["shards"])
        check_nodes(state)
