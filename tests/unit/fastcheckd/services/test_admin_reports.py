"""Health codes and replica reports, from views and answers made by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import admin_pb2, common_pb2, peer_pb2, registry_pb2
from fastcheckd.config import Config, Voter
from fastcheckd.services.admin_reports import (
    Answers,
    node_ids_to_ask,
    node_reports,
    replica_reports,
    unanswered,
)
from fastcheckd.services.health_codes import health_codes, worst

UP, SUSPECT, DOWN, DRAINING = (
    registry_pb2.NODE_STATE_UP,
    registry_pb2.NODE_STATE_SUSPECT,
    registry_pb2.NODE_STATE_DOWN,
    registry_pb2.NODE_STATE_DRAINING,
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


def codes(seen, stats=None, replicas=None, steps=(), *, redundancy=None, config=None, has_quorum=True):
    answers = Answers(
        stats={n.node_id: STATS for n in seen.nodes} if stats is None else stats,
        replicas=replicas or {},
        newest_steps=steps,
        redundancy=redundancy,
    )
    return health_codes(seen, answers, config or Config(cluster_id="c", node_id="v0"), has_quorum=has_quorum)


def names(found):
    return [(c.code, admin_pb2.Health.Name(c.severity).removeprefix("HEALTH_")) for c in found]


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        pytest.param({"a": [holds()], "b": [holds()]}, None, id="a whole cluster"),
        pytest.param({"a": [], "b": [holds()]}, None, id="a lost owner leaves the copies"),
        pytest.param({"a": [holds()], "b": []}, "DEGRADED", id="a lost copy, the owner has its bytes"),
        pytest.param({"a": [], "b": []}, "CRITICAL", id="nobody holds it"),
        pytest.param({"a": []}, "DEGRADED", id="a silent node may hold it"),
        pytest.param({"a": [], "b": [holds(digest=b"x" * 16)]}, "CRITICAL", id="another digest"),
        pytest.param(
            {"a": [], "b": [holds(number=4), holds(job="other")]}, "CRITICAL", id="other steps and jobs"
        ),
    ],
)
def test_a_shard_with_too_few_copies_is_told_and_critical_only_when_provably_lost(replicas, expected):
    found = codes(view(a=UP, b=UP), replicas=replicas, steps=[step()])
    assert names(found) == ([("REPLICA_SHORT", expected)] if expected else [])
    assert worst(found) == admin_pb2.Health.Value(f"HEALTH_{expected or 'OK'}")
    assert not expected or ("step 5 of job gpt" in found[0].detail and "rank 0 shard 0" in found[0].detail)


def test_no_quorum_is_critical_and_comes_first():
    found = codes(view(a=UP, b=DOWN), has_quorum=False)
    assert names(found) == [("NO_QUORUM", "CRITICAL"), ("NODE_DOWN", "DEGRADED")]
    assert worst(found) == admin_pb2.HEALTH_CRITICAL


def test_a_down_node_is_not_also_called_unreachable_or_full():
    found = codes(view(a=UP, b=DOWN), stats={"a": STATS})
    assert names(found) == [("NODE_DOWN", "DEGRADED")]
    assert "b is DOWN" in found[0].detail


def test_a_process_that_cannot_be_started_degrades():
    seen = view(a=UP, b=UP)
    seen.nodes[0].trouble = "the registry process cannot be started: [Errno 11] why"
    found = codes(seen)
    assert names(found) == [("PROCESS_FAILING", "DEGRADED")]
    assert found[0].detail == "on a (a registry voter) the registry process cannot be started: [Errno 11] why"


def test_a_suspect_node_and_a_silent_data_process_are_two_codes():
    found = codes(view(a=SUSPECT, b=UP), stats={"b": STATS})
    assert names(found) == [("NODE_SUSPECT", "DEGRADED"), ("DATA_UNREACHABLE", "DEGRADED")]
    assert "a (a registry voter)" in found[0].detail


@pytest.mark.parametrize(("used", "expected"), [(90, []), (91, [("MEMORY_NEAR_FULL", "DEGRADED")])])
def test_memory_is_near_full_above_nine_tenths(used, expected):
    stats = {"a": peer_pb2.GetStatsResponse(ram_used_bytes=used, ram_budget_bytes=100)}
    assert names(codes(view(a=UP), stats=stats)) == expected


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (200, []), (100, [("JOB_NEAR_BUDGET", "OK")])])
def test_a_job_near_what_one_job_may_have_is_told_and_wakes_nobody(limit, expected):
    jobs = [peer_pb2.JobMemory(job="big", ram_used_bytes=91), peer_pb2.JobMemory(job="ok", ram_used_bytes=90)]
    stats = peer_pb2.GetStatsResponse(
        ram_used_bytes=181, ram_budget_bytes=1000, jobs=jobs, job_budget_bytes=limit
    )
    found = codes(view(a=UP), stats={"a": stats})
    assert names(found) == expected
    assert worst(found) == admin_pb2.HEALTH_OK
    assert not expected or "job big has 91 of the 100 bytes" in found[0].detail


def test_a_lane_on_the_slower_of_two_interfaces_is_told_and_wakes_nobody():
    lane = peer_pb2.LaneReport(interface="eth0", speed_mbit_per_s=1000)
    assert codes(view(a=UP), stats={"a": peer_pb2.GetStatsResponse(lane=lane)}) == []
    lane.faster_interface, lane.faster_mbit_per_s = "ib0", 100000
    found = codes(view(a=UP), stats={"a": peer_pb2.GetStatsResponse(lane=lane)})
    assert names(found) == [("LANE_SLOW_INTERFACE", "OK")]
    assert "eth0 (1000 Mbit/s)" in found[0].detail
    assert "lane_host: ib0" in found[0].remedy


def test_memory_of_a_silent_node_is_what_its_heartbeat_said():
    seen = view(a=UP)
    seen.nodes[0].ram_used_bytes = 99
    assert ("MEMORY_NEAR_FULL", "DEGRADED") in names(codes(seen, stats={}))


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
    assert "rank 0 shard 0, rank 1 shard 0, rank 2 shard 0, rank 3 shard 0 and 46 more" in code.detail


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


def test_reasons_are_passed_on():
    seen = view(a=SUSPECT, b=DOWN)
    seen.nodes[0].reason, seen.nodes[1].reason = "its data process does not answer", "left"
    suspect, down = codes(seen)
    assert suspect.detail.endswith("is suspected: its data process does not answer")
    assert down.detail == "b is DOWN: left" and "fastcheck forget b" in down.remedy


def test_a_node_that_keeps_coming_back_is_flapping_whatever_its_state():
    seen = view(a=UP, b=SUSPECT, c=UP)
    seen.nodes[1].reason = seen.nodes[2].reason = "damped for 20 s: came back 4 times in 10 minutes"
    assert names(codes(seen)) == [("NODE_FLAPPING", "DEGRADED")] * 2


def test_a_drain_was_asked_for_and_does_not_change_the_health():
    found = codes(view(a=UP, b=DRAINING))
    assert names(found) == [("NODE_DRAINING", "OK")]
    assert worst(found) == admin_pb2.HEALTH_OK


def test_a_hung_data_process_is_not_also_called_unreachable():
    seen = view(a=UP, b=SUSPECT)
    seen.nodes[1].data = registry_pb2.DATA_HEALTH_HUNG
    assert names(codes(seen, stats={"a": STATS})) == [("NODE_SUSPECT", "DEGRADED"), ("DATA_HUNG", "DEGRADED")]


@pytest.mark.parametrize(
    ("voters", "down", "thin"),
    [
        ("a", "", False),
        ("abc", "", False),
        ("abc", "b", True),
        ("abcde", "b", False),
        ("abcde", "bc", True),
        ("abc", "d", False),
    ],
)
def test_the_quorum_is_thin_when_one_more_loss_ends_it(voters, down, thin):
    seen = view(**{name: DOWN if name in down else UP for name in {*voters, *down}})
    del seen.voters[:]
    seen.voters.extend(voters)
    assert ("QUORUM_THIN" in [c.code for c in codes(seen)]) == thin
    assert "QUORUM_THIN" not in [c.code for c in codes(seen, has_quorum=False)]


def redundancy(**fields):
    return registry_pb2.GetRedundancyResponse(wanted_copies=2, **fields)


def test_what_the_leader_counted_is_told_when_the_newest_steps_look_whole():
    found = codes(
        view(a=UP), redundancy=redundancy(short_shards=7, short_bytes=700, lost_shards=1, repairing=2)
    )
    assert names(found) == [("REPLICA_SHORT", "DEGRADED")]
    assert found[0].detail == (
        "7 committed shards (700 bytes) have fewer than 2 live copies, 1 have none; 2 copies are being made"
    )


def test_a_short_step_is_told_once_and_whether_it_is_being_mended():
    held = {"a": [holds()], "b": []}
    (code,) = codes(view(a=UP, b=UP), replicas=held, steps=[step()], redundancy=redundancy(short_shards=1))
    assert (code.code, code.detail.endswith("no copy is being made now")) == ("REPLICA_SHORT", True)
    (code,) = codes(view(a=UP, b=UP), replicas=held, steps=[step()])
    assert code.detail.endswith("whether repairs run is not known")


def test_repairs_fail_only_while_something_is_short():
    failed = {"repair_failures": 3, "last_failure": "node b has no room"}
    assert codes(view(a=UP), redundancy=redundancy(**failed)) == []
    found = codes(view(a=UP), redundancy=redundancy(short_shards=1, **failed))
    assert names(found) == [("REPLICA_SHORT", "DEGRADED"), ("REPAIR_FAILING", "DEGRADED")]
    assert "node b has no room" in found[1].detail


def test_copies_in_one_failure_domain_degrade():
    found = codes(view(a=UP), redundancy=redundancy(domains_short_shards=4))
    assert names(found) == [("DOMAIN_SHORT", "DEGRADED")]


@pytest.mark.parametrize(("age_ms", "late"), [(None, False), (7_200_000, False), (7_200_001, True)])
def test_a_check_is_late_after_two_periods(age_ms, late):
    stats = peer_pb2.GetStatsResponse(ram_budget_bytes=1, scrub_age_ms=age_ms)
    assert (names(codes(view(a=UP), stats={"a": stats})) == [("SCRUB_LATE", "DEGRADED")]) == late
    assert not codes(
        view(a=UP), stats={"a": stats}, config=Config(cluster_id="c", node_id="v0", scrub_period_s=3601.0)
    )


def test_a_bad_replica_that_was_found_is_worth_knowing():
    stats = peer_pb2.GetStatsResponse(counters={"corrupt_found": 2})
    found = codes(view(a=UP), stats={"a": stats})
    assert names(found) == [("CORRUPT_FOUND", "OK")] and " 2 bad" in found[0].detail


def test_jobs_with_complete_provisional_steps_are_named_with_them():
    held = [holds(number=n, job=job) for n, job in ((8, "gpt"), (9, "gpt"), (3, "bert"), (4, "bert"))]
    for replica in held:
        replica.provisional = True
        replica.world_size = replica.shard_count = 1
        replica.state_bytes = replica.bytes
    held[-1].world_size = 2
    bert, gpt = codes(view(a=UP), replicas={"a": [*held, holds()]})
    assert (bert.code, gpt.code) == ("PROVISIONAL", "PROVISIONAL")
    assert "bert" in bert.detail and bert.detail.endswith(": 3"), "a step that lacks a rank is no use"
    assert "gpt" in gpt.detail and gpt.detail.endswith(": 8, 9")


def voters(host, count=3):
    return tuple(
        Voter(node_id=f"v{n}", registry_address=f"{host}:{100 + n}", raft_address=f"{host}:{200 + n}")
        for n in range(count)
    )


def test_a_shared_key_is_told_off_loopback_only(tmp_path):
    seen = view(a=UP)
    seen.voters.extend(["b", "c"])
    key = tmp_path / "raft.key"
    off = Config(cluster_id="c", node_id="v0", voters=voters("10.0.0.1"), raft_key_file=key)
    told = [("INSECURE", "OK"), ("RAFT_SHARED_KEY", "OK")]
    assert names(codes(seen, config=off)) == told
    assert (
        codes(
            seen,
            config=Config(cluster_id="c", node_id="v0", voters=voters("127.0.0.1"), raft_key_file=key),
        )
        == []
    )
    tls = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_file"), key)
    with_tls = Config(cluster_id="c", node_id="v0", voters=voters("10.0.0.1"), raft_key_file=key, **tls)
    assert codes(seen, config=with_tls) == []


def test_what_is_not_encrypted_is_told():
    tls = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_file"), Path("x"))
    far = {"cluster_id": "c", "node_id": "v0", "host": "10.0.0.1"}
    (code,) = codes(view(a=UP), config=Config(**far, raft_key_file=Path("x"), insecure=True))
    assert code.code == "INSECURE" and "10.0.0.1:7450" in code.detail and "10.0.0.1:7452" in code.detail
    assert names(codes(view(a=UP), config=Config(**far, **tls))) == [("LANE_READABLE", "OK")]
    assert codes(view(a=UP), config=Config(**far, **tls, lane_tls=True)) == []
    assert codes(view(a=UP), config=Config(cluster_id="c", node_id="v0", **tls)) == []


@pytest.mark.parametrize(
    ("days_left", "lifetime_days", "told"),
    [
        (8, 365, ""),
        (6.9, 365, "expires in 165"),
        (-1, 365, "expired 24.0 h ago"),
        (0.5, 1, ""),
        (0.1, 1, "expires in 2.4 h"),
    ],
)
def test_a_certificate_that_expires_soon_degrades(days_left, lifetime_days, told):
    stats = peer_pb2.GetStatsResponse()
    stats.certificate.seconds_left = round(days_left * 86400)
    stats.certificate.lifetime_seconds = round(lifetime_days * 86400)
    found = codes(view(a=UP), stats={"a": stats})
    assert names(found) == ([("CERT_EXPIRING", "DEGRADED")] if told else [])
    assert not told or told in found[0].detail


def test_voters_that_are_not_the_configs_are_named():
    config = Config(cluster_id="c", node_id="v0", voters=voters("127.0.0.1"), raft_key_file=Path("raft.key"))
    seen = view(a=UP)
    assert codes(seen, config=config) == [], "an older voter names none"
    for voter in voters("127.0.0.1"):
        seen.voter_records.add(
            node_id=voter.node_id, registry_address=voter.registry_address, raft_address=voter.raft_address
        )
    assert codes(seen, config=config) == []
    seen.voter_records[2].node_id = "v9"
    (code,) = codes(seen, config=config)
    assert code.code == "VOTERS_DIFFER" and "v9 at 127.0.0.1:202" in code.detail


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
