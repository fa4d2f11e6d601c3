"""What is short of copies, against a count that is written down plainly; and what stopping a node would cost."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1.registry_pb2 import NodeRecord, NodeState, RankRecord, ShardRecord, StepRecord
from fastcheckd.registry.audit import recorded_at
from fastcheckd.registry.model import DOWN, DRAINING, UP, Job, Ref, ShardId, State
from fastcheckd.registry.redundancy import RecordedReplica, Survey, find_shard, stop_verdict, survey

NAMES = [f"n{i}" for i in range(6)]


def node(state: str = "UP", incarnation: int = 1, rack: str = "") -> NodeRecord:
    return NodeRecord(
        incarnation=incarnation,
        state=NodeState.Value(f"NODE_STATE_{state}"),
        draining=state == "DRAINING",
        labels={"rack": rack} if rack else {},
        data_address="127.0.0.1:1",
        lane_address="127.0.0.1:2",
        ram_budget_bytes=1 << 40,
    )


def shard(*holders: tuple[str, int], size: int = 10) -> ShardRecord:
    return ShardRecord(bytes=size, digest=b"\xab" * 16, holders=[Ref(*ref).message() for ref in holders])


def rank(number: int, owner: tuple[str, int], *shards: ShardRecord) -> RankRecord:
    return RankRecord(rank=number, session=1, owner=Ref(*owner).message(), state_bytes=10, shards=shards)


def step(number: int, *ranks: RankRecord) -> StepRecord:
    return StepRecord(step=number, world_size=len(ranks), copies=1, ranks=ranks)


def make(nodes: dict[str, NodeRecord], **jobs: list[StepRecord]) -> State:
    for name, each in nodes.items():
        each.node_id = name
    return State(
        version=1,
        epoch=1,
        nodes=nodes,
        jobs={
            name: Job(name, next_session=2, newest=steps[-1].step, steps=steps)
            for name, steps in jobs.items()
        },
    )


REFS = st.tuples(st.sampled_from(NAMES), st.integers(1, 2))
SHARDS = st.lists(REFS, max_size=4, unique_by=lambda ref: ref[0])


@st.composite
def states(draw: st.DrawFn) -> State:
    nodes = {
        name: node(
            draw(st.sampled_from(["UP", "UP", "UP", "DRAINING", "DOWN"])),
            draw(st.integers(1, 2)),
            draw(st.sampled_from(["a", "b", "c"])),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    }
    jobs = {}
    for name in draw(st.lists(st.sampled_from(["gpt", "vit"]), unique=True)):
        numbers = sorted(draw(st.lists(st.integers(0, 99), min_size=1, max_size=2, unique=True)))
        steps = []
        for number in numbers:
            ranks = []
            for index in range(draw(st.integers(1, 2))):
                owner = draw(REFS)
                shards = [
                    shard(*(ref for ref in draw(SHARDS) if ref[0] != owner[0]), size=draw(st.integers(0, 50)))
                    for _ in range(draw(st.integers(1, 3)))
                ]
                ranks.append(rank(index, owner, *shards))
            steps.append(step(number, *ranks))
        jobs[name] = steps
    return make(nodes, **jobs)


def all_shards(state: State) -> list[tuple[ShardId, list[Ref], int]]:
    return [
        (
            ShardId(job, kept.step, record.rank, index),
            [Ref.of(record.owner), *map(Ref.of, one.holders)],
            one.bytes,
        )
        for job, entry in state.jobs.items()
        for kept in entry.steps
        for record in kept.ranks
        for index, one in enumerate(record.shards)
    ]


def counting(state: State, refs: list[Ref], *kinds: int) -> set[str]:
    return {
        ref.node_id
        for ref in refs
        if (found := state.nodes.get(ref.node_id)) is not None
        and found.incarnation == ref.incarnation
        and found.state in kinds
    }


def lose(state: State, replicas: Iterable[RecordedReplica]) -> None:
    """Have these replicas LOST, as the state machine marks them."""
    for replica in replicas:
        found = find_shard(state, replica.shard)
        assert found is not None
        found[1].lost.append(replica.ref.message())


def lose_some(state: State, data: st.DataObject) -> frozenset[RecordedReplica]:
    replicas = [RecordedReplica(name, ref) for name, refs, _ in all_shards(state) for ref in refs]
    lost = frozenset(data.draw(st.lists(st.sampled_from(replicas), max_size=3))) if replicas else frozenset()
    lose(state, lost)
    return lost


@given(states(), st.integers(1, 3), st.data())
def test_every_shard_with_too_few_copies_is_found_and_no_other(
    state: State, tolerate: int, data: st.DataObject
) -> None:
    lost = lose_some(state, data)
    found = survey(state, tolerate=tolerate)
    expected = {}
    for name, refs, size in all_shards(state):
        believed = [ref for ref in refs if RecordedReplica(name, ref) not in lost]
        if (missing := tolerate + 1 - len(counting(state, believed, UP))) > 0:
            expected[name] = (missing, size, counting(state, believed, UP, DRAINING))
    assert {s.id: (s.missing, s.bytes) for s in found.shortages} == {k: v[:2] for k, v in expected.items()}
    assert found.short_shards == len(expected)
    assert found.short_bytes == sum(missing * size for missing, size, _ in expected.values())
    assert found.lost_shards == sum(1 for _, _, readable in expected.values() if not readable)
    for shortage in found.shortages:
        assert {ref.node_id for ref in (*shortage.live, *shortage.draining)} == expected[shortage.id][2]


@given(states(), st.integers(1, 3))
def test_the_newest_steps_come_first_and_then_those_with_the_fewest_copies(
    state: State, tolerate: int
) -> None:
    def urgency(found: Survey) -> list[tuple[int, int]]:
        newest = {job: entry.kept[::-1] for job, entry in state.jobs.items()}
        return [(newest[s.id.job].index(s.id.step), len(s.live)) for s in found.shortages]

    order = urgency(survey(state, tolerate=tolerate))
    assert order == sorted(order)


@given(states(), st.integers(1, 2))
def test_copies_in_one_domain_are_found_where_there_are_domains_enough(state: State, tolerate: int) -> None:
    found = survey(state, tolerate=tolerate, domain_key="rack")
    racks = {name: entry.labels["rack"] for name, entry in state.nodes.items()}
    enough = len({racks[n] for n, entry in state.nodes.items() if entry.state == UP}) > tolerate
    expected = set()
    for name, refs, _ in all_shards(state):
        good = counting(state, refs, UP)
        if enough and len({racks[n] for n in good}) < min(len(good), tolerate + 1):
            expected.add(name)
    assert {s.id for s in found.shortages if s.domains_short} == expected
    assert found.domains_short_shards == len(expected)


@given(states(), st.integers(1, 2), st.sampled_from(NAMES), st.data())
def test_stopping_a_node_is_judged_by_what_the_others_hold(
    state: State, tolerate: int, leaving: str, data: st.DataObject
) -> None:
    gone = lose_some(state, data)
    voters = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    verdict = stop_verdict(state, leaving, tolerate=tolerate, voters=voters)
    short = lost = 0
    for name, refs, _ in all_shards(state):
        rest = [ref for ref in refs if ref.node_id != leaving and RecordedReplica(name, ref) not in gone]
        short += len(counting(state, rest, UP)) < tolerate + 1
        lost += not counting(state, rest, UP, DRAINING)
    up = [
        voter
        for voter in voters
        if voter != leaving and voter in state.nodes and state.nodes[voter].state != DOWN
    ]
    quorum = 2 * len(up) > len(voters)
    assert (verdict.short_shards, verdict.lost_shards) == (short, lost)
    assert verdict.safe == (quorum and not short)
    assert verdict.survivable == (quorum and not lost)
    assert bool(verdict.reasons) == (not verdict.safe)


def test_a_verdict_says_why_in_sentences() -> None:
    state = make(
        {"a": node(), "b": node(), "c": node("DOWN")},
        gpt=[step(5, rank(0, ("a", 1), shard(("b", 1)), shard(("c", 1))))],
    )
    verdict = stop_verdict(state, "a", tolerate=1, voters=["a", "b", "c"])
    assert verdict.jobs == ("gpt",)
    assert verdict.reasons == (
        "the registry would have 1 of its 3 voters, 2 are needed: start others, or replace a as a voter first",
        "job gpt: one shard would have no copy left on another node",
        "job gpt: 2 shards would have fewer than 2 copies on nodes that stay",
    )


def test_a_suspected_node_counts_for_nothing_when_another_is_to_be_stopped() -> None:
    state = make(
        {"a": node(), "b": node(), "c": node(), "d": node()},
        gpt=[step(5, rank(0, ("a", 1), shard(("b", 1), ("c", 1))))],
    )
    assert stop_verdict(state, "d", tolerate=1, voters=["a"]).safe
    assert stop_verdict(state, "c", tolerate=1, voters=["a"]).safe
    assert not stop_verdict(state, "c", tolerate=1, voters=["a"], unwell={"b"}).safe


@given(states())
def test_the_replicas_of_a_life_are_all_that_records_name_it_for(state: State) -> None:
    lives = [Ref(name, entry.incarnation) for name, entry in state.nodes.items()]
    found = recorded_at(state, lives)
    expected = {ref: set() for ref in lives}
    for name, refs, _ in all_shards(state):
        for ref in refs:
            if ref in expected:
                expected[ref].add(RecordedReplica(name, ref))
    assert {ref: set(replicas) for ref, replicas in found.items()} == expected


@pytest.mark.timeout(60)
def test_a_thousand_nodes_are_looked_at_quickly() -> None:
    names = [f"node-{i}" for i in range(1000)]
    ranks = [
        rank(r, (names[r // 8], 1), *(shard((names[(r // 8 + 1 + s) % 1000], 1)) for s in range(3)))
        for r in range(8000)
    ]
    state = make({name: node() for name in names}, gpt=[step(1, *ranks), step(2, *ranks)])
    state.nodes["node-7"].state = DOWN
    began = time.process_time()
    found = survey(state, tolerate=1)
    took_s = time.process_time() - began
    # node-7 owns 8 ranks of 3 shards and is the holder of 3 times 8 shards, in both steps.
    assert found.short_shards == 2 * (24 + 24)
    assert took_s < 5  # a bound against something quadratic, no measurement
