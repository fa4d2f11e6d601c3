"""When a process is started again, and what is said of one that does not stay."""

import pytest

from fastcheckd.process.restarts import BACKOFF_MAX_S, BACKOFF_MIN_S, HEALTHY_AFTER_S, SHORT_LIVES, Restarts


def test_pauses_double_up_to_a_bound_and_are_short_again_after_a_life_that_lasted():
    process, now, pauses = Restarts(0.0), 0.0, []
    for _ in range(8):
        process.started(7, now)
        pauses.append(process.ended("1", now + 1))
        now = process.start_at
    assert pauses[:3] == [2 * BACKOFF_MIN_S, 4 * BACKOFF_MIN_S, 8 * BACKOFF_MIN_S]
    assert pauses[-1] == BACKOFF_MAX_S and process.restarts == 8
    process.started(8, now)
    assert process.ended("-9", now + HEALTHY_AFTER_S) == BACKOFF_MIN_S


def test_a_start_that_fails_is_tried_again_and_told_until_one_succeeds():
    process = Restarts(0.0)
    process.not_started("no memory", 5.0)
    assert process.pid is None and process.start_failures == 1 and process.restarts == 0
    assert process.wakes_at(5.0) == process.start_at == pytest.approx(5.0 + 2 * BACKOFF_MIN_S)
    assert process.trouble(5.0) == "cannot be started: no memory"
    process.started(7, 6.0)
    assert process.trouble(6.0) == ""


def test_one_that_keeps_ending_is_in_trouble_until_it_has_lived_a_while():
    process, now = Restarts(0.0), 0.0
    for lives in range(1, SHORT_LIVES + 1):
        process.started(7, now)
        process.ended("5", now)
        assert bool(process.trouble(now)) == (lives == SHORT_LIVES)
    assert process.trouble(now) == f"keeps ending ({SHORT_LIVES} times in a row, lastly with 5)"
    process.started(8, now)
    assert process.trouble(now) and process.wakes_at(now) == now + HEALTHY_AFTER_S
    assert process.trouble(now + HEALTHY_AFTER_S) == "" and process.wakes_at(now + HEALTHY_AFTER_S) is None
