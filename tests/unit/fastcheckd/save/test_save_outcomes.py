"""What is told of saves that are refused, wait or fail: once, with a count, and when it is over."""

import asyncio

import pytest

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.counters import Counters
from fastcheckd.errors import FencedError, NoQuorumError, OverBudgetError, SupersededError
from fastcheckd.save import outcomes as module
from fastcheckd.save.job_progress import JobProgress
from fastcheckd.save.outcomes import JOBS_TOLD_MAX, Outcomes
from fastcheckd.save.save import SaveKey


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def key(step, job="gpt", rank=0):
    return SaveKey(job, rank, step)


def attempt(outcomes, at, error=None):
    """A trainer asks for memory and gets it, or does not."""

    async def ask():
        with outcomes.beginning(at, lambda: "why"):
            if error is not None:
                raise error

    asyncio.run(ask())


def only(outcomes, stalled=None):
    (report,) = outcomes.reports([], stalled or {})
    return report


def told(caplog):
    return [record.getMessage() for record in caplog.records]


def test_refused_saves_are_one_line_and_a_count_and_the_first_that_is_taken_ends_them(caplog):
    outcomes = Outcomes(Counters())
    for step in range(50):
        with pytest.raises(OverBudgetError):
            attempt(outcomes, key(step), OverBudgetError("no room"))
    attempt(outcomes, key(50))
    lines = told(caplog)
    assert lines[0] == "a save of rank 0 of job gpt is refused: step 0: no room"
    assert len(lines) == 2 and "over after" in lines[1] and "(50 times)" in lines[1]


def test_a_wait_is_told_while_it_lasts_and_a_save_that_does_not_wait_ends_it(caplog, monkeypatch):
    monkeypatch.setattr(module, "WAIT_TOLD_S", 0.02)
    outcomes = Outcomes(Counters())

    async def wait():
        with outcomes.beginning(key(7), lambda: "2 older steps are under way"):
            while not caplog.records:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(wait(), 30))
    attempt(outcomes, key(8))
    first, last = told(caplog)
    assert (
        first
        == "a save of rank 0 of job gpt waits: step 7, for more than 0.02 s: 2 older steps are under way"
    )
    assert "over after" in last


def test_a_trainer_that_gives_up_waiting_is_told_of(caplog):
    outcomes = Outcomes(Counters())

    async def given_up():
        async def wait():
            with outcomes.beginning(key(7), lambda: "why"):
                await asyncio.sleep(60)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(given_up())
    assert told(caplog) == [
        "a save of rank 0 of job gpt is refused: step 7: its trainer waits no longer, or is gone"
    ]


def test_failures_count_until_a_commit_and_what_another_took_the_place_of_is_none():
    clock = Clock()
    outcomes = Outcomes(Counters(), clock)
    for error in (NoQuorumError("a"), SupersededError("b"), FencedError("c"), OverBudgetError("d")):
        outcomes.ended(key(1), error)
    clock.now += 4
    report = only(outcomes)
    assert (report.failures, report.last_failure.message, report.failed_ms_ago) == (2, "d", 4000)
    assert report.last_failure.code == pb.ERROR_CODE_OVER_BUDGET
    outcomes.ended(key(2), None)
    report = only(outcomes)
    assert not report.failures and not report.HasField("last_failure")


def test_uncommitted_is_counted_from_the_first_seal_after_a_commit():
    clock = Clock()
    outcomes = Outcomes(Counters(), clock)
    outcomes.sealed(key(1))
    outcomes.ended(key(1), None)
    clock.now += 3600  # an evaluation
    assert not only(outcomes).HasField("uncommitted_ms")
    outcomes.sealed(key(2))
    clock.now += 5
    outcomes.sealed(key(3))
    outcomes.ended(key(2), SupersededError("by 3"))
    clock.now += 5
    report = only(outcomes, {"gpt": SupersededError("rank 1 has not saved")})
    assert (report.uncommitted_ms, report.tried_ms_ago) == (10_000, 5000)
    assert report.stalled_because == "rank 1 has not saved"


def test_a_report_says_how_far_the_job_has_come():
    outcomes = Outcomes(Counters())
    outcomes.sealed(key(9))
    come = JobProgress(
        job="gpt", in_flight=1, staged_step=9, staged_age_s=0.0, replicated_step=None, committed_step=None,
        committed_age_s=None, interval_s=0.25,
    )  # fmt: skip
    (report,) = outcomes.reports([come], {})
    assert (report.staged_step, report.interval_ms) == (9, 250)


def test_failing_jobs_are_told_first_and_forgotten_ranks_not_at_all():
    clock = Clock()
    outcomes = Outcomes(Counters(), clock)
    for number in range(2 * JOBS_TOLD_MAX):
        clock.now += 1
        outcomes.sealed(key(1, job=f"job-{number}"))
    outcomes.ended(key(1, job="job-3"), OverBudgetError("no room"))
    jobs = [report.job for report in outcomes.reports([], {})]
    assert len(jobs) == JOBS_TOLD_MAX and jobs[:2] == ["job-3", f"job-{2 * JOBS_TOLD_MAX - 1}"]
    outcomes.forget_except({("job-5", 0)})
    assert [report.job for report in outcomes.reports([], {})] == ["job-5"]
