"""How far a job has come, from what its saves say, and when its next step is due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.save.job_progress import job_progress
from fastcheckd.save.save import FINAL, SaveKey
from fastcheckd.save.save_interval import INTERVALS, RANKS_MAX, SHARE, SaveIntervals


def save(step, state, sealed_at=0.0, job="gpt", rank=0):
    return SimpleNamespace(
        key=SaveKey(job, rank, step), state=state, sealed_at=sealed_at, done=state in FINAL,
    )  # fmt: skip


def progress(saves, newest=-1, committed_at=None, intervals=None):
    by_rank = {}
    for one in saves:
        by_rank.setdefault((one.key.job, one.key.rank), []).append(one)
    return job_progress(
        by_rank,
        newest=lambda _: newest,
        committed_at=committed_at or {},
        interval_s=(intervals or {}).get,
        now=100.0,
    )


def test_the_newest_step_in_each_state():
    (found,) = progress(
        [
            save(5, tpb.SAVE_STATE_COMMITTED, 80.0),
            save(6, tpb.SAVE_STATE_REPLICATED, 90.0),
            save(7, tpb.SAVE_STATE_STAGED, 95.0),
        ],
        newest=5,
        committed_at={"gpt": 91.0},
        intervals={("gpt", 0): 5.0},
    )
    assert (found.staged_step, found.replicated_step, found.committed_step) == (7, 6, 5)
    assert (found.in_flight, found.staged_age_s, found.committed_age_s, found.interval_s) == (
        2,
        5.0,
        9.0,
        5.0,
    )


def test_what_failed_was_not_replicated():
    (found,) = progress([save(5, tpb.SAVE_STATE_FAILED, 90.0)])
    assert (found.staged_step, found.replicated_step, found.committed_step) == (5, None, None)
    assert found.in_flight == 0 and found.committed_age_s is None


def test_step_0_is_a_step():
    (found,) = progress([save(0, tpb.SAVE_STATE_COMMITTED)], newest=0)
    assert (found.replicated_step, found.committed_step) == (0, 0)


def test_ranks_of_a_job_are_one_line_and_jobs_are_several():
    found = progress(
        [
            save(3, tpb.SAVE_STATE_STAGED),
            save(4, tpb.SAVE_STATE_STAGED, rank=1),
            save(9, tpb.SAVE_STATE_STAGED, job="a"),
        ],
        intervals={("gpt", 0): 2.0, ("gpt", 1): 3.0},
    )
    assert [(f.job, f.staged_step, f.interval_s) for f in found] == [("a", 9, None), ("gpt", 4, 3.0)]


RANK = ("job", 0)


def test_without_a_rhythm_the_patience_counts() -> None:
    rhythm = SaveIntervals(30.0)
    rhythm.sealed(RANK, 100.0)
    assert rhythm.due(RANK, 100.0) == 130.0


def test_a_step_is_due_before_the_next_one_comes() -> None:
    rhythm = SaveIntervals(30.0)
    for moment in (100.0, 110.0, 120.0):
        rhythm.sealed(RANK, moment)
    assert rhythm.due(RANK, 120.0) == pytest.approx(120.0 + SHARE * 10)
    assert rhythm.due(("job", 1), 120.0) == 150.0


def test_when_saves_come_faster_the_step_under_way_is_due_earlier() -> None:
    rhythm = SaveIntervals(30.0)
    for moment in (100.0, 120.0, 121.0):
        rhythm.sealed(RANK, moment)
    assert rhythm.due(RANK, 120.0) == pytest.approx(120.0 + SHARE)


def test_a_pause_is_forgotten_and_so_is_a_short_interval() -> None:
    rhythm = SaveIntervals(1000.0)
    for moment in (0.0, 1.0, *(100.0 * i for i in range(1, INTERVALS + 2))):
        rhythm.sealed(RANK, moment)
    assert rhythm.due(RANK, 0.0) == pytest.approx(SHARE * 100)


def test_while_a_trainer_waits_its_steps_are_due_at_once() -> None:
    rhythm = SaveIntervals(30.0)
    rhythm.sealed(RANK, 100.0)
    rhythm.awaited(RANK, 103.0)
    rhythm.awaited(RANK, 105.0)
    assert rhythm.due(RANK, 100.0) == 103.0
    rhythm.sealed(RANK, 106.0)
    assert rhythm.due(RANK, 106.0) == pytest.approx(106.0 + SHARE * 6)


@given(st.lists(st.floats(0, 1e4), max_size=30), st.floats(0, 1e5), st.floats(0.1, 100))
def test_due_is_never_later_than_the_patience(
    waits: list[float], sealed_at: float, patience_s: float
) -> None:
    rhythm, now = SaveIntervals(patience_s), 0.0
    for wait_s in waits:
        now += wait_s
        rhythm.sealed(RANK, now)
    assert sealed_at <= rhythm.due(RANK, sealed_at) <= sealed_at + patience_s


def test_what_is_remembered_is_bounded() -> None:
    rhythm = SaveIntervals(1.0)
    for rank in range(RANKS_MAX + 10):
        rhythm.sealed(("job", rank), float(rank))
        rhythm.awaited(("job", rank), float(rank))
    assert len(rhythm._sealed) == len(rhythm._waiting) == RANKS_MAX
