"""Which jobs are said to get nowhere, and which are only slow, done or thinking."""

import pytest

from fastcheck_proto.v1 import common_pb2, peer_pb2, registry_pb2
from fastcheckd.services.admin_reports import Answers
from fastcheckd.services.health_of_jobs import (
    FAILED_S_MIN,
    TRYING_S,
    UNCOMMITTED_S_FIRST,
    UNCOMMITTED_S_MIN,
    save_codes,
    stuck_jobs,
)

UP, DOWN = registry_pb2.NODE_STATE_UP, registry_pb2.NODE_STATE_DOWN
NOW_MS = 1_700_000_000_000


def saves(
    job="gpt", *, uncommitted_s=None, interval_s=None, tried_s=0.0, failures=0, error=None, failed_s=0.0
):
    report = peer_pb2.JobSaves(
        job=job, tried_ms_ago=int(tried_s * 1000), failures=failures, failed_ms_ago=int(failed_s * 1000),
        staged_step=7,
    )  # fmt: skip
    if uncommitted_s is not None:
        report.uncommitted_ms = int(uncommitted_s * 1000)
    if interval_s is not None:
        report.interval_ms = int(interval_s * 1000)
    if error is not None:
        report.last_failure.CopyFrom(error)
    return report


def answers(late=None, memory=None, **by_node):
    stats = {
        node: peer_pb2.GetStatsResponse(
            saves=found,
            jobs=[
                peer_pb2.JobMemory(job=j, ram_used_bytes=b) for j, b in (memory or {}).get(node, {}).items()
            ],
        )
        for node, found in by_node.items()
    }
    return Answers(stats=stats, late=late or {})


def view(*, committed_at_ms=0, running=1, kept=(4,)):
    return registry_pb2.ClusterView(
        nodes=[
            registry_pb2.NodeRecord(node_id="a", state=UP),
            registry_pb2.NodeRecord(node_id="b", state=DOWN),
        ],
        jobs=[
            registry_pb2.JobView(
                job="gpt", kept_steps=kept, committed_at_ms=committed_at_ms, running_ranks=running
            )
        ],
    )


@pytest.mark.parametrize(
    ("interval_s", "uncommitted_s", "stuck"),
    [
        (0.5, UNCOMMITTED_S_MIN + 1, True),
        (0.5, UNCOMMITTED_S_MIN - 1, False),
        (60.0, 170.0, False),
        (60.0, 181.0, True),
        (None, UNCOMMITTED_S_FIRST - 1, False),
        (None, UNCOMMITTED_S_FIRST + 1, True),
        (0.5, None, False),
    ],
)
def test_a_job_is_stuck_when_several_of_its_intervals_brought_no_commit(interval_s, uncommitted_s, stuck):
    found = answers(a=[saves(interval_s=interval_s, uncommitted_s=uncommitted_s)])
    assert stuck_jobs(found) == (["gpt"] if stuck else [])


def test_a_job_that_does_not_try_any_more_is_not_judged():
    quiet = saves(interval_s=1.0, uncommitted_s=500.0, tried_s=TRYING_S + 1)
    assert stuck_jobs(answers(a=[quiet])) == []
    seldom = saves(interval_s=100.0, uncommitted_s=500.0, tried_s=TRYING_S + 1)
    assert stuck_jobs(answers(a=[seldom])) == ["gpt"]


def test_the_node_that_saw_the_last_commit_speaks_for_all():
    old, new = (saves(interval_s=1.0, uncommitted_s=s) for s in (60.0, 2.0))
    assert stuck_jobs(answers(a=[old], b=[new])) == []


def test_the_late_ranks_are_named_with_their_nodes_and_the_last_commit_with_its_age():
    late = {
        "gpt": [
            registry_pb2.LateRank(rank=1, node_id="a"),
            registry_pb2.LateRank(rank=2, node_id="b"),
            registry_pb2.LateRank(rank=3),
            registry_pb2.LateRank(rank=4, node_id="a", closed=True),
        ]
    }
    stuck = answers(a=[saves(interval_s=1.0, uncommitted_s=60.0)], late=late)
    (code,) = save_codes(view(committed_at_ms=NOW_MS - 61_000), stuck, NOW_MS)
    assert code.code == "JOB_NOT_COMMITTING"
    assert code.detail == (
        "job gpt saves (step 7 is the newest) and commits nothing: its last commit is step 4, 61 s ago; late: "
        "rank 1 (a), rank 2 (b, which is DOWN), rank 3 (nobody has its place), rank 4 (a, closed by its trainer)"
    )
    (code,) = save_codes(view(kept=()), stuck, NOW_MS)
    assert "it has no committed step" in code.detail


@pytest.mark.parametrize(
    ("failures", "failed_s", "tried_s", "told"),
    [
        (2, 0.0, 0.0, True),
        (1, 0.0, 0.0, False),
        (1, FAILED_S_MIN + 1, 11.0, True),
        (0, 0.0, 0.0, False),
        (9, 700.0, 700.0, False),
    ],
)
def test_saves_fail_when_two_in_a_row_do_or_nothing_comes_after_one(failures, failed_s, tried_s, told):
    error = common_pb2.ErrorDetail(code=common_pb2.ERROR_CODE_NOT_NEWER, message="why")
    report = saves(failures=failures, error=error if failures else None, failed_s=failed_s, tried_s=tried_s)
    found = save_codes(view(), answers(a=[report]), NOW_MS)
    assert [code.code for code in found] == (["SAVES_FAILING"] if told else [])
    if told:
        assert "why" in found[0].detail and "on a" in found[0].detail


def test_memory_of_finished_jobs_is_named_where_room_is_what_is_missing():
    seen = view()
    seen.jobs.add(job="done", running_ranks=0, kept_steps=[1])
    seen.jobs.add(job="busy", running_ranks=2, kept_steps=[1])
    memory = {"a": {"done": 5, "busy": 50}, "b": {"done": 6, "gpt": 70}}
    for code, named in (
        (common_pb2.ERROR_CODE_OVER_BUDGET, True),
        (common_pb2.ERROR_CODE_STORE_FULL, True),
        (common_pb2.ERROR_CODE_NO_PLACEMENT, False),
    ):
        error = common_pb2.ErrorDetail(code=code, message="why")
        (found,) = save_codes(seen, answers(a=[saves(failures=3, error=error)], b=[], memory=memory), NOW_MS)
        assert ("11 bytes of the nodes' memory: job done" in found.detail) == named
        assert ("fastcheck delete done --all" in found.remedy) == named
        assert "busy" not in found.detail + found.remedy
