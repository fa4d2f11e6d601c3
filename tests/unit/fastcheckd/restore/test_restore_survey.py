"""Which steps are complete, from what nodes say they hold."""

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.restore.survey import complete_steps

SHARD_BYTES = 10


def replica(step, rank=0, shard=0, *, shards=2, world_size=2, **more):
    fields = {
        "owner": f"node-{rank}",
        "session": rank + 1,
        "save_id": f"save-{step}-{rank}",
        "generation": world_size,
        "provisional": True,
        "digest": bytes([step, rank, shard]) + bytes(13),
        "offset": shard * SHARD_BYTES,
        "bytes": SHARD_BYTES,
        "state_bytes": shards * SHARD_BYTES,
        **more,
    }
    key = pb.ShardKey(job="gpt", step=step, rank=rank, shard=shard)
    return peer_pb2.Replica(key=key, world_size=world_size, shard_count=shards, **fields)


def whole(step, *ranks, **more):
    return [replica(step, rank, shard, **more) for rank in ranks or (0, 1) for shard in (0, 1)]


def numbers(answers):
    return [step.step for step in complete_steps("gpt", answers)]


def test_a_step_is_complete_when_all_shards_of_all_ranks_are_somewhere():
    everything = whole(5)
    assert numbers({"a": everything[:1], "b": everything[1:]}) == [5]
    for missing in range(4):
        assert numbers({"a": [r for i, r in enumerate(everything) if i != missing]}) == []


def test_the_newest_comes_first_and_other_jobs_do_not_count():
    other = whole(9)
    for each in other:
        each.key.job = "other"
    assert numbers({"a": whole(3), "b": whole(5), "c": other}) == [5, 3]


def test_a_record_names_who_has_what():
    shards = whole(5)
    (step,) = complete_steps("gpt", {"b": shards, "a": shards[:1], "node-1": shards[2:]})
    record = step.rank_record("gpt", 0)
    assert (record.step, record.world_size, record.ranks[0].owner.node_id) == (5, 2, "node-0")
    assert [[h.node_id for h in s.holders] for s in record.ranks[0].shards] == [["a", "b"], ["b"]]
    assert step.ranks[1].copies == 1, "the owner's own bytes are no copy"
    summary = step.summary(3)
    assert (summary.bytes, summary.copies, summary.ranks) == (40, 1, 2) and step.provisional


def test_shards_of_two_attempts_or_sessions_are_never_mixed():
    for differ in ({"save_id": "another"}, {"session": 99}, {"state_bytes": 30}, {"owner": "z"}):
        mixed = [*whole(5)[:3], replica(5, 1, 1, **differ)]
        assert numbers({"a": mixed}) == [], differ


def test_of_two_whole_attempts_the_later_session_counts():
    old = whole(5, 1, session=2, save_id="old")
    new = whole(5, 1, session=8, save_id="new")
    (step,) = complete_steps("gpt", {"a": whole(5, 0), "b": old, "c": new, "d": old})
    assert step.ranks[1].record.session == 8


def test_ranks_of_different_runs_make_no_step():
    assert numbers({"a": [*whole(5, 0), *whole(5, 1, generation=4)]}) == []
    again = whole(5, 0, generation=4, session=3), whole(5, 1, generation=4, session=4)
    (step,) = complete_steps("gpt", {"a": [*whole(5), *again[0]], "b": again[1]})
    assert [rank.record.session for rank in step.ranks] == [3, 4]


def test_two_digests_of_one_shard_cannot_both_be_right():
    assert numbers({"a": whole(5), "b": [replica(5, 0, 0, digest=b"x" * 16)]}) == []


def test_shards_that_do_not_tile_the_state_are_no_state():
    assert numbers({"a": [*whole(5)[:3], replica(5, 1, 1, offset=SHARD_BYTES + 1)]}) == []
    assert numbers({"a": [*whole(5)[:3], replica(5, 1, 1, bytes=SHARD_BYTES - 1)]}) == []


def test_nonsense_from_a_node_is_left_out():
    wild = [replica(5, 7), replica(5, 0, 0, world_size=0), replica(5, 0, 9), replica(5, shards=0)]
    assert numbers({"a": whole(5), "b": wild[:2]}) == [5]
    assert isinstance(numbers({"a": whole(5), "b": wild}), list)
    endless = replica(5, 0, 0)
    endless.shard_count = 2**32 - 1
    assert numbers({"a": whole(5), "b": [endless]}) == [5]


@given(st.data())
def test_completeness_is_exactly_that_nothing_is_missing(data):
    steps = data.draw(st.sets(st.integers(0, 5), max_size=3))
    everything = [r for step in steps for r in whole(step)]
    told = {name: [r for r in everything if data.draw(st.booleans())] for name in ("a", "b", "c")}
    there = {(r.key.step, r.key.rank, r.key.shard) for rs in told.values() for r in rs}
    wanted = [
        step
        for step in sorted(steps, reverse=True)
        if all((step, rank, shard) in there for rank in (0, 1) for shard in (0, 1))
    ]
    assert numbers(told) == wanted


def of_one_state(step, cuts, layouts=(b"a", b"a"), total=None):
    """All replicas of a step of two ranks that saved parts of one state."""
    found = []
    for rank in (0, 1):
        part = pb.SharedPart(
            shared_bytes=cuts[-1] if total is None else total,
            start=cuts[rank],
            stop=cuts[rank + 1],
            layout_digest=layouts[rank],
        )
        found += whole(step, rank, shared=part)
    return found


def test_parts_of_one_state_are_a_step_that_is_told_whole_and_says_so():
    (step,) = complete_steps("gpt", {"a": of_one_state(5, (0, 6, 12))})
    assert step.replicated and step.summary(3).replicated
    record = step.rank_record("gpt", 7)
    assert [(r.rank, r.shared.start, r.shared.stop) for r in record.ranks] == [(0, 0, 6), (1, 6, 12)]
    (plain,) = complete_steps("gpt", {"a": whole(5)})
    assert not plain.replicated and len(plain.rank_record("gpt", 1).ranks) == 1


def test_parts_that_are_no_whole_are_no_step():
    assert numbers({"a": of_one_state(5, (0, 6, 12), layouts=(b"a", b"b"))}) == []
    assert numbers({"a": of_one_state(5, (1, 6, 12))}) == []
    assert numbers({"a": of_one_state(5, (0, 6, 12), total=13)}) == []
    assert numbers({"a": of_one_state(5, (0, 6, 90))}) == [], "it has not so many bytes"
    half = of_one_state(5, (0, 6, 12))[:2] + whole(5, 1)
    assert numbers({"a": half}) == []
