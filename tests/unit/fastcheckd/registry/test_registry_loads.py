"""What a placement goes by: bytes by node from the state, what is under way, and the holders before."""

from fastcheckd.placement import Plan, PlannedShard
from fastcheckd.registry.loads import Loads, committed_bytes, committed_holders, domain_label
from fastcheckd.registry.state import apply, new_state

DIGEST = "00" * 16


def cluster(count=5, label=None):
    state = new_state()
    for n in range(count):
        address = {f"{kind}_address": f"{kind}:{n}" for kind in ("agent", "data", "lane")}
        node = {"node_id": f"n{n}", "voter": n == 0, "ram_budget_bytes": 1 << 30, **address}
        assert apply(state, {"type": "register", "node": node, "life_id": f"life-{n}", "at_ms": 1})["ok"]
        if label:
            state["nodes"][f"n{n}"]["labels"] = {"rack": label(n)}
    return state


def ref(state, node_id):
    return [node_id, state["nodes"][node_id]["incarnation"]]


def commit(state, step, holders, shard_bytes=10, job="gpt"):
    """One rank of node n0, a shard for each entry of `holders`."""
    opened = apply(
        state,
        {
            "type": "open_rank",
            "job": job,
            "rank": 0,
            "world_size": 1,
            "client": "c",
            "node": ref(state, "n0"),
        },
    )
    shards = [
        {
            "offset": i * shard_bytes,
            "bytes": shard_bytes,
            "digest": DIGEST,
            "holders": [ref(state, holder) for holder in names],
        }
        for i, names in enumerate(holders)
    ]
    record = {
        "rank": 0,
        "session": opened["session"],
        "owner": ref(state, "n0"),
        "state_bytes": shard_bytes * len(holders),
        "shards": shards,
    }
    result = apply(
        state,
        {
            "type": "commit", "job": job, "step": step, "world_size": 1, "epoch": state["epoch"],
            "tolerate": 1, "keep_steps": 2, "ranks": [record],
        },
    )  # fmt: skip
    assert result["ok"], result


def plan(*holders, size=10):
    return Plan(
        tuple(
            PlannedShard(shard=i, offset=i * size, size_bytes=size, holders=names)
            for i, names in enumerate(holders)
        ),
        False,
    )


def test_owners_and_holders_of_all_kept_steps_count():
    state = cluster()
    commit(state, 1, [["n1"], ["n2"]])
    commit(state, 2, [["n1"], ["n3"]])
    assert committed_bytes(state) == {"n0": 40, "n1": 20, "n2": 10, "n3": 10}


def test_the_holders_before_are_those_of_the_newest_step_of_as_many_ranks():
    state = cluster()
    assert committed_holders(state, "gpt", 0, 1) == []
    commit(state, 1, [["n1"], ["n2"]])
    commit(state, 2, [["n1"], ["n3"]])
    assert committed_holders(state, "gpt", 0, 1) == [["n1"], ["n3"]]
    assert committed_holders(state, "gpt", 0, 2) == []


def test_what_is_under_way_counts_until_it_is_committed_and_not_twice():
    state, loads = cluster(), Loads()
    commit(state, 1, [["n1"]])
    assert loads.by_node(state)["n2"] == 0
    for _ in range(2):  # asked again, placed again
        loads.placed(state, "gpt", 0, 1, 2, plan(("n2",)))
        assert (loads.by_node(state)["n1"], loads.by_node(state)["n2"]) == (10, 10)
    loads.placed(state, "gpt", 0, 1, 2, plan(("n1",)))
    assert loads.by_node(state)["n2"] == 0, "the holder before gets nothing new"
    loads.placed(state, "gpt", 0, 1, 2, plan(("n3",)))
    state["version"] += 1
    assert loads.by_node(state)["n3"] == 10, "still under way"
    commit(state, 2, [["n3"]])
    assert loads.by_node(state)["n3"] == 10, "committed, and counted once"


def test_a_second_step_under_way_goes_where_the_first_one_goes():
    state, loads = cluster(), Loads()
    commit(state, 1, [["n1"]])
    loads.by_node(state)
    assert loads.earlier(state, "gpt", 0, 1) == [["n1"]]
    loads.placed(state, "gpt", 0, 1, 2, plan(("n2",)))
    assert loads.earlier(state, "gpt", 0, 1) == [["n2"]]
    commit(state, 2, [["n4"]])
    loads.by_node(state)
    assert loads.earlier(state, "gpt", 0, 1) == [["n4"]], "what was committed is what counts"


def test_the_next_term_knows_nothing_of_what_was_placed():
    state, loads = cluster(), Loads()
    commit(state, 1, [["n1"]])
    loads.by_node(state)
    loads.placed(state, "gpt", 0, 1, 2, plan(("n2",)))
    loads.forget()
    assert loads.by_node(state)["n2"] == 0
    assert loads.earlier(state, "gpt", 0, 1) == [["n1"]]


def test_groups_are_kept_for_an_epoch_and_a_draining_node_stays_in_them():
    state, loads = cluster(8, label=lambda n: f"r{n % 2}"), Loads()
    first = loads.groups(state, "rack", 3)
    assert loads.groups(state, "rack", 3) is first
    assert loads.groups(state, "", 3) is not first
    assert domain_label(state["nodes"]["n1"], "rack") == "r1" and domain_label(state["nodes"]["n1"], "") == ""
    apply(
        state, {"type": "set_state", "node": ref(state, "n7"), "state": "DRAINING", "reason": "", "at_ms": 1}
    )
    assert "n7" in loads.groups(state, "rack", 3)
    apply(state, {"type": "set_state", "node": ref(state, "n7"), "state": "DOWN", "reason": "", "at_ms": 1})
    assert "n7" not in loads.groups(state, "rack", 3)
