"""Health codes and replica reports, from views and answers made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import admin_pb2, common_pb2, peer_pb2, registry_pb2
from fastcheckd.services.admin_reports import (
    Answers,
    health_codes,
    node_ids_to_ask,
    node_reports,
    replica_reports,
    unanswered,
    worst,
)

UP, SUSPECT, DOWN = (
    registry_pb2.NODE_STATE_UP,
    registry_pb2.NODE_STATE_SUSPECT,
    registry_pb2.NODE_STATE_DOWN,
)
DIGEST = b"d" * 16
STATS = peer_pb2.GetStatsResponse(ram_used_bytes=10, ram_budget_bytes=100, counters={"restores": 3})


def view(**states):
    nodes = [
        registry_pb2.NodeRecord(
            node_id=name, state=state, incarnation=1, voter=name == "a", ram_budget_bytes=100
        )
        for name, state in states.items()
    ]
    return registry_pb2.ClusterView(cluster_id="c", nodes=nodes, voters=["a"], has_leader=True, leader="a")


def step(owner="a", holders=("b",), number=5, job="gpt"):
    shard = registry_pb2.ShardRecord(
        shard=0,
        bytes=7,
        digest=DIGEST,
        holders=[common_pb2.NodeRef(node_id=h, incarnation=1) for h in holders],
    )
    rank = registry_pb2.RankRecord(rank=0, owner=common_pb2.NodeRef(node_id=owner), shards=[shard])
    return registry_pb2.StepRecord(job=job, step=number, world_size=1, copies=len(holders), ranks=[rank])


def holds(digest=DIGEST, verified_at_ms=1000, number=5, job="gpt"):
    key = common_pb2.ShardKey(job=job, step=number, rank=0, shard=0)
    return peer_pb2.Replica(key=key, digest=digest, verified_at_ms=verified_at_ms)


def codes(seen, stats=None, replicas=None, steps=(), *, has_quorum=True):
    answers = Answers(
        stats={n.node_id: STATS for n in seen.nodes} if stats is None else stats, replicas=replicas or {}
    )
    return health_codes(seen, answers, steps, has_quorum=has_quorum)


def names(found):
    return [(c.code, admin_pb2.Health.Name(c.severity).removeprefix("HEALTH_")) for c in found]


def test_a_whole_cluster_has_no_codes_and_is_ok():
    found = codes(view(a=UP, b=UP), replicas={"a": [holds()], "b": [holds()]}, steps=[step()])
    assert names(found) == []
    assert worst(found) == admin_pb2.HEALTH_OK


def test_no_quorum_is_critical_and_comes_first():
    found = codes(view(a=UP, b=DOWN), has_quorum=False)
    assert names(found) == [("NO_QUORUM", "CRITICAL"), ("NODE_DOWN", "DEGRADED")]
    assert worst(found) == admin_pb2.HEALTH_CRITICAL


def test_a_down_node_is_not_also_called_unreachable_or_full():
    found = codes(view(a=UP, b=DOWN), stats={"a": STATS})
    assert names(found) == [("NODE_DOWN", "DEGRADED")]
    assert "b is DOWN" in found[0].detail


def test_a_suspect_node_and_a_silent_data_process_are_two_codes():
    found = codes(view(a=SUSPECT, b=UP), stats={"b": STATS})
    assert names(found) == [("NODE_SUSPECT", "DEGRADED"), ("DATA_UNREACHABLE", "DEGRADED")]
    assert "a (a registry voter)" in found[0].detail


@pytest.mark.parametrize(("used", "expected"), [(90, []), (91, [("MEMORY_NEAR_FULL", "DEGRADED")])])
def test_memory_is_near_full_above_nine_tenths(used, expected):
    stats = {"a": peer_pb2.GetStatsResponse(ram_used_bytes=used, ram_budget_bytes=100)}
    assert names(codes(view(a=UP), stats=stats)) == expected


def test_memory_of_a_silent_node_is_what_its_heartbeat_said():
    seen = view(a=UP)
    seen.nodes[0].ram_used_bytes = 99
    assert ("MEMORY_NEAR_FULL", "DEGRADED") in names(codes(seen, stats={}))


def test_a_lost_copy_degrades_while_the_owner_still_has_its_bytes():
    found = codes(view(a=UP, b=UP), replicas={"a": [holds()], "b": []}, steps=[step()])
    assert names(found) == [("REPLICA_SHORT", "DEGRADED")]
    assert "rank 0 shard 0" in found[0].detail
    assert "step 5 of job gpt" in found[0].detail


def test_a_lost_owner_alone_leaves_the_copies_and_no_code():
    found = codes(view(a=UP, b=UP), replicas={"a": [], "b": [holds()]}, steps=[step()])
    assert names(found) == []


def test_a_shard_that_nobody_holds_is_critical():
    found = codes(view(a=UP, b=UP), replicas={"a": [], "b": []}, steps=[step()])
    assert names(found) == [("REPLICA_SHORT", "CRITICAL")]


def test_a_shard_is_not_given_up_while_a_node_that_may_hold_it_is_silent():
    found = codes(view(a=UP, b=UP), replicas={"a": []}, steps=[step()])
    assert names(found) == [("REPLICA_SHORT", "DEGRADED")]


def test_a_copy_with_another_digest_does_not_count():
    found = codes(view(a=UP, b=UP), replicas={"a": [], "b": [holds(digest=b"x" * 16)]}, steps=[step()])
    assert names(found) == [("REPLICA_SHORT", "CRITICAL")]


def test_copies_of_other_steps_and_jobs_do_not_count():
    held = {"a": [], "b": [holds(number=4), holds(job="other")]}
    assert names(codes(view(a=UP, b=UP), replicas=held, steps=[step()])) == [("REPLICA_SHORT", "CRITICAL")]


def test_bytes_published_by_another_node_after_a_restore_count_as_a_copy():
    (report,) = replica_reports(step(), {"a": [], "b": [], "c": [holds()]})
    assert (list(report.holders), list(report.placed), report.owner_holds) == (["c"], ["b"], False)


def test_verified_at_is_the_oldest_check_and_zero_when_one_was_not_checked():
    record = step(holders=("b", "c"))
    checked = {
        "b": [holds(verified_at_ms=50)],
        "c": [holds(verified_at_ms=20)],
        "a": [holds(verified_at_ms=1)],
    }
    assert replica_reports(record, checked)[0].verified_at_ms == 20
    checked["c"] = [holds(verified_at_ms=0)]
    assert replica_reports(record, checked)[0].verified_at_ms == 0


def test_many_short_shards_make_one_short_sentence():
    record = step()
    for rank in range(1, 50):
        record.ranks.add().CopyFrom(record.ranks[0])
        record.ranks[rank].rank = rank
    (code,) = codes(view(a=UP, b=UP), replicas={"a": [], "b": []}, steps=[record])
    assert "rank 0 shard 0, rank 1 shard 0, rank 2 shard 0 and 47 more" in code.detail


def test_down_nodes_are_not_asked_and_not_missed():
    seen = view(a=UP, b=DOWN, c=SUSPECT)
    assert node_ids_to_ask(seen) == ["a", "c"]
    assert unanswered(seen, {"a": None}) == ["c"]


def test_node_reports_prefer_what_the_node_itself_says():
    seen = view(b=UP, a=UP)
    seen.nodes[0].ram_used_bytes = 55
    first, second = node_reports(seen, {"a": STATS})
    assert (first.record.node_id, first.reachable, first.record.ram_used_bytes) == ("a", True, 10)
    assert dict(first.counters) == {"restores": 3}
    assert (second.record.node_id, second.reachable, second.record.ram_used_bytes) == ("b", False, 55)


@given(
    states=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([UP, SUSPECT, DOWN]), min_size=1),
    holding=st.sets(st.sampled_from("abcdef")),
    answering=st.sets(st.sampled_from("abcdef")),
    has_quorum=st.booleans(),
)
def test_critical_exactly_when_no_quorum_or_provably_lost(states, holding, answering, has_quorum):
    """Whatever fails: CRITICAL is never cried while a copy is known or may be, and never missed when none is."""
    seen = view(**states)
    asked = set(node_ids_to_ask(seen))
    held = {n: [holds()] if n in holding else [] for n in answering & asked}
    record = step(owner="a", holders=("b", "c"))
    known = any(held.values())
    may_be = bool({"a", "b", "c"} & asked - set(held))
    found = codes(seen, replicas=held, steps=[record], has_quorum=has_quorum)
    assert (worst(found) == admin_pb2.HEALTH_CRITICAL) == (not has_quorum or not (known or may_be))
