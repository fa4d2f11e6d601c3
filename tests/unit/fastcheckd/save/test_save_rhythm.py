"""Until when a step's copies should be made: by how often its rank saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.save.save_interval import INTERVALS, RANKS_MAX, SHARE, SaveIntervals

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
