"""Ranks that hold one state: do their parts make a whole, and who differs where."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.fastcheckd.registry.small_cluster import DIGEST, apply, cluster, commit, open_rank, record

from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.config import Config
from fastcheckd.registry.model import MalformedError
from fastcheckd.registry.reports import Reports
from fastcheckd.registry.shared_state import (
    PARTS_MAX,
    check_digests,
    describe,
    disagreements,
    is_replicated,
    parts_differ,
)

HOLDERS = [("n2", 3)]
LAYOUT = DIGEST
OTHER_LAYOUT = b"\xcd" * 16


def part(start, stop, total, layout=LAYOUT):
    return common_pb2.SharedPart(shared_bytes=total, start=start, stop=stop, layout_digest=layout)


def sharing(count, **changes):
    """Records of so many ranks with ten bytes of the shared state each; `changes` by r0, r1, ..."""
    records = []
    for rank in range(count):
        shared = part(10 * rank, 10 * rank + 10, 10 * count)
        shared.MergeFrom(common_pb2.SharedPart(**changes.get(f"r{rank}", {})))
        records.append(registry_pb2.RankRecord(rank=rank, shared=shared))
    return records


def test_parts_that_follow_each_other_to_the_end_are_a_whole():
    assert parts_differ(sharing(1)) is None
    assert parts_differ(sharing(5)) is None
    assert parts_differ([registry_pb2.RankRecord(rank=rank) for rank in range(2)]) is None, (
        "and states of their own are no parts"
    )


@pytest.mark.parametrize(
    ("records", "blamed", "why"),
    [
        ([*sharing(3)[:2], registry_pb2.RankRecord(rank=2)], [2], "saved a state of its own"),
        (sharing(3, r1={"layout_digest": OTHER_LAYOUT}), [1], "names, dtypes, shapes"),
        (sharing(2, r1={"layout_digest": OTHER_LAYOUT}), [0, 1], "names, dtypes, shapes"),
        (sharing(3, r2={"shared_bytes": 31}), [2], "names, dtypes, shapes"),
        (sharing(3, r1={"start": 11}), [1], "does not follow"),
        (sharing(3, r2={"stop": 29}), [2], "end at byte 29 of 30"),
    ],
)
def test_parts_that_are_no_whole_are_refused_with_the_ranks_to_blame(records, blamed, why):
    sentence, ranks = parts_differ(records)
    assert ranks == blamed and why in sentence


DIGESTS = st.binary(min_size=16, max_size=16)


@given(st.lists(DIGESTS, min_size=1, max_size=4), st.integers(3, 9), st.data())
def test_exactly_the_planted_part_and_rank_are_named(parts, ranks, data):
    digests = {rank: dict(enumerate(parts)) for rank in range(ranks)}
    assert disagreements(digests) == []
    number = data.draw(st.integers(0, len(parts) - 1))
    guilty = data.draw(st.integers(0, ranks - 1))
    spoiled = bytearray(digests[guilty][number])
    spoiled[data.draw(st.integers(0, 15))] ^= 1
    digests[guilty] = digests[guilty] | {number: bytes(spoiled)}
    (found,) = disagreements(digests)
    assert (found.part, found.ranks, found.minority) == (number, [guilty], True)
    assert f"rank {guilty} differs from most others in part {number}" in describe([found])


ONE, OTHER, THIRD = b"1" * 16, b"2" * 16, b"3" * 16


def test_without_a_majority_all_are_named():
    (found,) = disagreements({0: {0: ONE}, 1: {0: OTHER}})
    assert found.ranks == [0, 1] and not found.minority
    (found,) = disagreements({0: {0: ONE}, 1: {0: OTHER}, 2: {0: ONE}, 3: {0: OTHER}})
    assert found.ranks == [0, 1, 2, 3] and not found.minority
    (found,) = disagreements({0: {0: ONE}, 1: {0: OTHER}, 2: {0: ONE}, 3: {0: THIRD}, 4: {0: ONE}})
    assert found.ranks == [1, 3] and found.minority
    said = describe(disagreements({0: {0: ONE, 1: ONE}, 1: {0: OTHER, 1: OTHER}}))
    assert "rank 0, 1 differ from each other in part 0, 1" in said


def test_only_those_who_looked_at_a_part_are_compared():
    assert disagreements({0: {0: ONE}, 1: {1: OTHER}, 2: {}}) == []
    (found,) = disagreements({0: {0: ONE}, 1: {1: OTHER}, 2: {0: THIRD, 1: OTHER}})
    assert (found.part, found.ranks) == (0, [0, 2])


def test_a_sentence_about_very_many_ranks_is_short():
    every = disagreements({rank: {part: bytes([rank]) * 16 for part in range(500)} for rank in range(250)})
    assert len(every) == 500 and len(describe(every)) < 500
    each = disagreements({r: {p: bytes([r == p]) * 16 for p in range(250)} for r in range(250)})
    assert "and others" in describe(each) and len(describe(each)) < 2000


def test_digests_are_bounded_and_whole():
    check_digests(dict.fromkeys(range(PARTS_MAX), ONE))
    for digests in (dict.fromkeys(range(PARTS_MAX + 1), ONE), {0: bytes(15)}, {1_000_000: ONE}):
        with pytest.raises(MalformedError):
            check_digests(digests)


def of_one_state(step=1, **changes):
    """Records of the two ranks of `small_cluster`'s job, each with half of a state of 8 bytes."""
    state = cluster()
    first = apply(state, open_rank("ddp", 0, 2, "a", ("n0", 1))).session
    second = apply(state, open_rank("ddp", 1, 2, "b", ("n1", 2))).session
    records = [record(0, first, ("n0", 1), HOLDERS), record(1, second, ("n1", 2), HOLDERS)]
    for rank, each in enumerate(records):
        each.shared.CopyFrom(part(4 * rank, 4 * rank + 4, 8))
        each.shared.MergeFrom(common_pb2.SharedPart(**changes.get(f"r{rank}", {})))
    return state, records, commit(step, records, job="ddp")


def test_a_committed_step_keeps_its_parts():
    state, _, command = of_one_state()
    assert apply(state, command).ok
    (kept,) = state.jobs["ddp"].steps
    assert is_replicated(kept.ranks)
    assert [(rank.shared.start, rank.shared.stop) for rank in kept.ranks] == [(0, 4), (4, 8)]
    assert apply(state, command).ok, "a repetition"


def test_the_state_machine_commits_no_parts_that_are_no_whole():
    for changes in ({"r1": {"layout_digest": bytes(16)}}, {"r1": {"start": 5}}, {"r0": {"stop": 3}}):
        state, _, command = of_one_state(**changes)
        assert apply(state, command).code == pb.ERROR_CODE_REPLICAS_DISAGREE
        assert state.jobs["ddp"].steps == []


@pytest.mark.parametrize(
    "wrong",
    [{"start": 9}, {"layout_digest": b"xy"}, {"shared_bytes": 1 << 63}, {"stop": 10**6}],
)
def test_a_part_that_is_none_is_malformed(wrong):
    state, _, command = of_one_state(r0=wrong)
    assert apply(state, command).code == pb.ERROR_CODE_INVALID


class Engine:
    """The state machine, and what was proposed to it."""

    def __init__(self, state):
        self.state = state
        self.proposed = []

    def read(self, reader):
        return reader(self.state)

    async def propose(self, command, *, timeout_s=4.0):
        self.proposed.append(command)
        return apply(self.state, command)


def test_a_step_on_which_ranks_disagree_is_never_proposed_and_every_rank_is_told_once():
    """Rank 0 asks again only after the step was refused: nobody else would tell it."""

    async def scenario():
        state, (first, second), _ = of_one_state()
        engine = Engine(state)
        reports = Reports(engine, Config(node_id="n0"))
        early = await reports.report("ddp", 1, 2, first, 0.0, {0: ONE, 1: OTHER})
        assert early.state == registry_pb2.REPORT_STATE_WAITING
        async with asyncio.timeout(5):
            late = await reports.report("ddp", 1, 2, second, 10.0, {0: ONE, 1: THIRD})
            again = await reports.report("ddp", 1, 2, first, 10.0, {0: ONE, 1: OTHER})
        for told in (late, again):
            assert told.state == registry_pb2.REPORT_STATE_REFUSED
            assert told.error.code == common_pb2.ERROR_CODE_REPLICAS_DISAGREE
            assert [(d.part, list(d.ranks)) for d in told.disagreements] == [(1, [0, 1])]
        assert engine.proposed == []
        # The same step may be saved again, and counts if they agree now.
        waiting = await reports.report("ddp", 1, 2, first, 0.0, {0: ONE})
        assert waiting.state == registry_pb2.REPORT_STATE_WAITING
        done = await reports.report("ddp", 1, 2, second, 10.0, {0: ONE})
        assert done.state == registry_pb2.REPORT_STATE_COMMITTED

    asyncio.run(scenario())
