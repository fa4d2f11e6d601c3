"""What a placement goes by: bytes by node from the state, what is under way, and the holders before."""

from tests.unit.fastcheckd.registry.small_cluster import DIGEST, apply, open_rank, record, register, set_state
from tests.unit.fastcheckd.registry.small_cluster import commit as made_commit

from fastcheckd.placement import Plan, PlannedShard
from fastcheckd.registry.loads import NodeLoads, committed_bytes, committed_holders, domain_label
from fastcheckd.registry.model import Ref, State


def cluster(count=5, label=None):
    state = State()
    for n in range(count):
        assert apply(state, register(f"n{n}", labels={"rack": label(n)} if label else {})).ok
    return state


def ref(state, node_id):
    return Ref.of(state.nodes[node_id])


def commit(state, step, holders, shard_bytes=10, job="gpt"):
    """One rank of node n0, a shard for each entry of `holders`."""
    session = apply(state, open_rank(job, 0, 1, "c", ref(state, "n0"))).session
    made = record(0, session, ref(state, "n0"), [], shard_bytes * len(holders))
    del made.shards[:]
    for i, names in enumerate(holders):
        lives = [ref(state, holder).message() for holder in names]
        made.shards.add(shard=i, offset=i * shard_bytes, bytes=shard_bytes, digest=DIGEST, holders=lives)
    result = apply(state, made_commit(step, [made], 1, job))
    assert result.ok, result


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
    state, loads = cluster(), NodeLoads()
    commit(state, 1, [["n1"]])
    assert loads.by_node(state)["n2"] == 0
    for _ in range(2):  # asked again, placed again
        loads.placed(state, "gpt", 0, 1, 2, plan(("n2",)))
        assert (loads.by_node(state)["n1"], loads.by_node(state)["n2"]) == (10, 10)
    loads.placed(state, "gpt", 0, 1, 2, plan(("n1",)))
    sums = loads.by_node(state)
    assert (sums["n1"], sums["n2"]) == (10, 0), "the holder before gets nothing new"
    loads.placed(state, "gpt", 0, 1, 2, plan(("n3",)))
    state.version += 1
    assert loads.by_node(state)["n3"] == 10, "still under way"
    commit(state, 2, [["n3"]])
    assert loads.by_node(state)["n3"] == 10, "committed, and counted once"


def test_a_second_step_under_way_goes_where_the_first_one_goes():
    state, loads = cluster(), NodeLoads()
    commit(state, 1, [["n1"]])
    loads.by_node(state)
    assert loads.earlier(state, "gpt", 0, 1) == [["n1"]]
    loads.placed(state, "gpt", 0, 1, 2, plan(("n2",)))
    assert loads.earlier(state, "gpt", 0, 1) == [["n2"]]
    commit(state, 2, [["n4"]])
    loads.by_node(state)
    assert loads.earlier(state, "gpt", 0, 1) == [["n4"]], "what was committed is what counts"


def test_the_next_term_knows_nothing_of_what_was_placed():
    state, loads = cluster(), NodeLoads()
    commit(state, 1, [["n1"]])
    loads.by_node(state)
    loads.placed(state, "gpt", 0, 1, 2, plan(("n2",)))
    loads.forget()
    assert loads.by_node(state)["n2"] == 0
    assert loads.earlier(state, "gpt", 0, 1) == [["n1"]]


def test_groups_are_kept_for_an_epoch_and_a_draining_node_stays_in_them():
    state, loads = cluster(8, label=lambda n: f"r{n % 2}"), NodeLoads()
    first = loads.groups(state, "rack", 3)
    assert loads.groups(state, "rack", 3) is first
    assert loads.groups(state, "", 3) is not first
    assert domain_label(state.nodes["n1"], "rack") == "r1" and domain_label(state.nodes["n1"], "") == ""
    apply(state, set_state(ref(state, "n7"), "DRAINING"))
    assert "n7" in loads.groups(state, "rack", 3)
    apply(state, set_state(ref(state, "n7"), "DOWN"))
    assert "n7" not in loads.groups(state, "rack", 3)
