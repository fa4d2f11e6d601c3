import ast
import copy
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import fastcheckd.registry.state as state_module
from fastcheckd.registry import wire
from fastcheckd.registry.commits import Standing, standing
from fastcheckd.registry.records import is_lossy
from fastcheckd.registry.state import (
    JOBS_MAX,
    NODES_MAX,
    SEEN_CLIENTS_MAX,
    SEEN_RESULTS_MAX,
    apply,
    new_state,
    restore,
    snapshot,
)


def register(node_id, life_id="life-1", **more):
    node = {
        "node_id": node_id,
        "agent_address": f"{node_id}:1",
        "data_address": f"{node_id}:2",
        "lane_address": f"{node_id}:3",
        "voter": False,
        "ram_budget_bytes": 1 << 30,
    }
    return {"type": "register", "node": node | more, "life_id": life_id}


def set_state(node, wanted):
    return {"type": "set_state", "node": node, "state": wanted}


def open_rank(job="gpt", rank=0, world_size=2, client="c0", node=("n0", 1)):
    return {
        "type": "open_rank",
        "job": job,
        "rank": rank,
        "world_size": world_size,
        "client": client,
        "node": list(node),
    }


def record(rank, session, owner, holders, state_bytes=100, *, digest="ab" * 16):
    half = state_bytes // 2
    shards = [(0, half), (half, state_bytes - half)] if half else [(0, state_bytes)]
    return {
        "rank": rank,
        "session": session,
        "owner": list(owner),
        "state_bytes": state_bytes,
        "shards": [
            {"offset": o, "bytes": b, "digest": digest, "holders": [list(h) for h in holders]}
            for o, b in shards
        ],
    }


def commit(step, ranks, world_size=2, job="gpt", **more):
    return {
        "type": "commit",
        "job": job,
        "step": step,
        "world_size": world_size,
        "epoch": 0,
        "tolerate": 1,
        "keep_steps": 2,
        "ranks": ranks,
    } | more


def cluster():
    """Three nodes n0..n2 in incarnations 1..3; job gpt with ranks 0 and 1 open on n0 and n1."""
    state = new_state()
    for i in range(3):
        assert apply(state, register(f"n{i}"))["incarnation"] == i + 1
    assert apply(state, open_rank(rank=0, client="c0", node=("n0", 1)))["session"] == 1
    assert apply(state, open_rank(rank=1, client="c1", node=("n1", 2)))["session"] == 2
    return state


def test_a_lossy_rank_stays_lossy_and_an_exact_one_is_as_before_there_was_such_a_thing():
    state = cluster()
    lossy, exact = RANKS[0] | {"lossy": True}, RANKS[1] | {"lossy": False}
    assert apply(state, commit(1, [lossy, exact]))["ok"]
    first, second = state["jobs"]["gpt"]["steps"][0]["ranks"]
    assert first["lossy"] is True and "lossy" not in second
    message = wire.step_message("gpt", state["jobs"]["gpt"]["steps"][0], None)
    assert [rank.lossy for rank in message.ranks] == [True, False]
    assert is_lossy([first, second]), "one lossy rank makes a lossy step"
    assert not is_lossy([second])
    assert [wire.rank_record(rank)["lossy"] for rank in message.ranks] == [True, False]
    assert apply(state, commit(1, [lossy, RANKS[1]]))["ok"]  # a repetition, as an older version would make it


def test_lossy_is_true_or_false():
    assert apply(cluster(), commit(1, [RANKS[0] | {"lossy": 1}, RANKS[1]]))["code"] == "INVALID"


RANKS = [record(0, 1, ("n0", 1), [("n2", 3)]), record(1, 2, ("n1", 2), [("n2", 3)])]


def refused(state, command):
    """The refusal of a command, which must change nothing."""
    before = copy.deepcopy(state)
    result = apply(state, command)
    assert not result["ok"] and state == before
    return result


def test_the_module_needs_no_engine_no_network_and_no_clock():
    imported = set()
    for path in ("state.py", "commits.py", "records.py"):
        tree = ast.parse((Path(state_module.__file__).parent / path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    assert not imported & {"pysyncobj", "grpc", "time", "datetime", "random", "asyncio", "os"}


def test_a_life_gets_one_incarnation_and_a_new_life_a_new_one():
    state = new_state()
    first = apply(state, register("a"))
    assert first == {"ok": True, "incarnation": 1, "epoch": 1}
    assert apply(state, register("a")) == first
    assert state["epoch"] == 1
    assert apply(state, register("a", "life-2")) == {"ok": True, "incarnation": 2, "epoch": 2}


def test_down_needs_the_right_incarnation_and_ends_the_life():
    state = cluster()
    assert refused(state, set_state(["n0", 9], "DOWN"))["code"] == "FENCED"
    assert apply(state, set_state(["n0", 1], "DOWN"))["epoch"] == 4
    assert apply(state, set_state(["n0", 1], "DOWN"))["epoch"] == 4, "the same again is no change"
    assert refused(state, set_state(["n0", 1], "UP"))["code"] == "FENCED"
    assert apply(state, register("n0"))["incarnation"] == 4, "the same life that was DOWN needs a new one"


def test_sessions_count_up_and_the_same_process_keeps_its_own():
    state = cluster()
    assert apply(state, open_rank(client="c0"))["session"] == 1
    assert apply(state, open_rank(client="c0-new"))["session"] == 3
    # The old process asks again, late: it must not get its place back.
    assert refused(state, open_rank(client="c0"))["code"] == "FENCED"
    assert refused(state, open_rank(client="x", node=("n0", 9)))["code"] == "FENCED"
    assert refused(state, open_rank(client="x", rank=2))["code"] == "INVALID"


def test_commit_and_its_repetition():
    state = cluster()
    assert apply(state, commit(5, RANKS)) == {"ok": True, "step": 5}
    version = state["version"]
    assert apply(state, commit(5, list(reversed(RANKS)))) == {"ok": True, "step": 5}
    assert state["version"] == version
    assert state["jobs"]["gpt"]["steps"][0]["copies"] == 1
    other = [record(0, 1, ("n0", 1), [("n2", 3)], digest="cd" * 16), RANKS[1]]
    assert refused(state, commit(5, other))["code"] == "NOT_NEWER"
    assert refused(state, commit(4, RANKS))["code"] == "NOT_NEWER"


def test_retention_keeps_the_newest_steps():
    state = cluster()
    for step in (1, 2, 3, 7):
        assert apply(state, commit(step, RANKS))["ok"]
    job = state["jobs"]["gpt"]
    assert [kept["step"] for kept in job["steps"]] == [3, 7] and job["newest"] == 7
    # A late question about a step that is gone still gets the right answer.
    assert standing(job, 2, 0, 1) is Standing.COMMITTED
    assert standing(job, 5, 0, 1) is Standing.SUPERSEDED
    session = apply(state, open_rank(client="later"))["session"]
    assert standing(job, 2, 0, session) is Standing.NOT_NEWER
    assert standing(job, 8, 0, session) is Standing.OPEN


def test_a_stale_session_fences_only_its_rank():
    state = cluster()
    apply(state, open_rank(rank=1, client="c1-new", node=("n1", 2)))
    result = refused(state, commit(5, RANKS))
    assert result["code"] == "FENCED" and result["ranks"] == [1]


def test_an_owner_whose_life_is_over_is_fenced():
    for end in (set_state(["n0", 1], "DOWN"), register("n0", "life-2")):
        state = cluster()
        apply(state, end)
        result = refused(state, commit(5, RANKS))
        assert result["code"] == "FENCED" and result["ranks"] == [0]


def test_a_lost_holder_is_named():
    for end in (set_state(["n2", 3], "DOWN"), register("n2", "life-2"), set_state(["n2", 3], "DRAINING")):
        state = cluster()
        apply(state, end)
        result = refused(state, commit(5, RANKS))
        assert result["code"] == "HOLDER_LOST" and result["lost"] == [["n2", 3]] and result["ranks"] == [0, 1]


def test_malformed_commits_are_refused():
    good = RANKS
    bad_tiling = copy.deepcopy(good)
    bad_tiling[0]["shards"][1]["offset"] += 1
    short = copy.deepcopy(good)
    short[0]["shards"].pop()
    by_owner = [record(0, 1, ("n0", 1), [("n0", 1)]), good[1]]
    twice = [record(0, 1, ("n0", 1), [("n2", 3), ("n2", 3)]), good[1]]
    for ranks, more in (
        (good[:1], {}),
        ([good[0], good[0]], {}),
        (bad_tiling, {}),
        (short, {}),
        (by_owner, {}),
        (twice, {"tolerate": 2}),
        (good, {"tolerate": 2}),
        (good, {"epoch": 99}),
        (good, {"step": -1}),
        (good, {"step": True}),
        ([*good, record(2, 3, ("n0", 1), [("n2", 3)])], {}),
    ):
        assert refused(cluster(), commit(5, ranks) | more)["code"] == "INVALID", (ranks, more)
    state = cluster()
    apply(state, open_rank(rank=0, world_size=4, client="c0"))
    ranks = [record(0, 3, ("n0", 1), [("n2", 3)]), good[1]]
    assert refused(state, commit(5, ranks))["code"] == "WORLD_SIZE"


def test_an_empty_state_can_be_committed():
    state = cluster()
    ranks = [record(0, 1, ("n0", 1), [("n2", 3)], 0), record(1, 2, ("n1", 2), [("n2", 3)], 0)]
    assert apply(state, commit(1, ranks))["ok"]


def test_a_command_proposed_twice_is_applied_once():
    state = new_state()
    numbered = register("a") | {"client_id": "p", "seq": 1}
    first = apply(state, numbered)
    apply(state, register("a", "life-2"))
    assert apply(state, numbered) == first and state["nodes"]["a"]["incarnation"] == 2
    bad = {"type": "set_state", "client_id": "p", "seq": 2}
    assert apply(state, bad) == apply(state, bad)


def test_what_is_remembered_of_proposers_is_bounded():
    state = new_state()
    for seq in range(SEEN_RESULTS_MAX + 20):
        apply(state, register("a") | {"client_id": "p", "seq": seq})
    assert len(state["seen"]["p"]) == SEEN_RESULTS_MAX
    too_old = apply(state, register("a", "life-9") | {"client_id": "p", "seq": 3})
    assert too_old["code"] == "INVALID" and state["nodes"]["a"]["life_id"] == "life-1"
    for client in range(SEEN_CLIENTS_MAX + 5):
        apply(state, register("a") | {"client_id": f"q{client}", "seq": 1})
    assert len(state["seen"]) == SEEN_CLIENTS_MAX and "p" not in state["seen"]


def test_nodes_and_jobs_are_bounded_and_numbers_never_come_back():
    state = cluster()
    for i in range(NODES_MAX - 3):
        apply(state, register(f"m{i}"))
    assert refused(state, register("one-more"))["code"] == "INVALID"
    apply(state, set_state(["m5", state["nodes"]["m5"]["incarnation"]], "DOWN"))
    added = apply(state, register("one-more"))
    assert added["ok"] and "m5" not in state["nodes"] and added["incarnation"] > NODES_MAX
    for i in range(JOBS_MAX - 1):
        apply(state, open_rank(job=f"job-{i}"))
    apply(state, open_rank(job="job-7", client="again"))
    assert apply(state, open_rank(job="one-more"))["session"] == 3, (
        "job gpt, oldest without a step, made room"
    )
    assert "gpt" not in state["jobs"] and len(state["jobs"]) == JOBS_MAX


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
nodes = st.sampled_from(["n0", "n1", "n2"])
refs = st.tuples(nodes, st.integers(1, 6)).map(list)
rank_records = st.builds(
    record,
    st.integers(0, 2),
    st.integers(1, 6),
    refs,
    st.lists(refs, min_size=1, max_size=2),
    st.sampled_from([0, 100]),
)
commands = st.one_of(
    st.builds(register, nodes, st.sampled_from(["l1", "l2"])),
    st.builds(set_state, refs, st.sampled_from(["UP", "DOWN", "DRAINING", "?"])),
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
    st.just({"type": "noop"}),
    json_values,
    st.builds(
        lambda base, key, value: base | {key: value},
        st.just(commit(4, RANKS)),
        st.sampled_from(list(commit(4, RANKS))),
        json_values,
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(commands, st.integers(0, 9)), max_size=25))
def test_no_sequence_of_commands_raises_or_goes_back(sequence):
    state = cluster()
    replica = restore(snapshot(state))
    committed = {}
    for given_command, seq in sequence:
        numbered = {"client_id": "p", "seq": seq}
        command = given_command | numbered if isinstance(given_command, dict) else given_command
        newest = state["jobs"]["gpt"]["newest"]
        epoch, version = state["epoch"], state["version"]
        result = apply(state, command)
        json.dumps(result)
        assert result.get("code") != "INTERNAL", result
        # Another voter, restored from a snapshot on the way, comes to the same state.
        replica = restore(snapshot(replica))
        assert apply(replica, json.loads(json.dumps(command))) == result
        assert snapshot(replica) == snapshot(state)
        job = state["jobs"]["gpt"]
        assert job["newest"] >= newest and state["epoch"] >= epoch and state["version"] >= version
        steps = [kept["step"] for kept in job["steps"]]
        assert steps == sorted(set(steps)) and len(steps) <= 2 and (not steps or steps[-1] == job["newest"])
        for kept in job["steps"]:
            assert committed.setdefault(kept["step"], kept) == kept, "a committed step never changes"
            assert [r["rank"] for r in kept["ranks"]] == list(range(kept["world_size"]))


def test_restore_refuses_what_is_not_a_snapshot():
    for data in (b"", b"[]", b"{}", snapshot(new_state() | {"schema": 2})):
        try:
            restore(data)
        except ValueError:
            continue
        raise AssertionError(f"{data!r} was taken for a snapshot")
