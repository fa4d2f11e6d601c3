"""Others' bytes told from ours, and the moments in which they are silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.transfer.gaps import GAP_S, MEMORY_S, STALE_S, Foreign, Gaps

LOOK_S = 0.01
QUEUE = 1000.0


def look(gaps: Gaps, now: float, seconds: float, *, silent: bool) -> float:
    for _ in range(round(seconds / LOOK_S)):
        now += LOOK_S
        gaps.notice(now, silent=silent)
    return now


def test_a_gap_is_open_after_two_silent_looks_and_shut_at_the_first_word() -> None:
    gaps = Gaps()
    now = look(gaps, 0.0, 1.0, silent=False)
    now = look(gaps, now, LOOK_S, silent=True)
    assert not gaps.open_at(now)
    now = look(gaps, now, GAP_S, silent=True)
    assert gaps.open_at(now)
    now = look(gaps, now, LOOK_S, silent=False)
    assert not gaps.open_at(now)


def test_a_gap_that_was_seen_a_while_ago_is_none() -> None:
    gaps = Gaps()
    now = look(gaps, 0.0, 1.0, silent=True)
    assert gaps.open_at(now) and not gaps.open_at(now + 1.5 * STALE_S)
    gaps.notice(now + 10, silent=True)  # the first look after a while
    assert not gaps.open_at(now + 10)


def test_the_share_of_gaps_is_that_of_the_last_steps() -> None:
    gaps, now = Gaps(), 0.0
    for _ in range(30):
        now = look(gaps, now, 0.6, silent=True)
        now = look(gaps, now, 0.4, silent=False)
    assert gaps.share == pytest.approx(0.6 - GAP_S, abs=0.08)
    look(gaps, now, 5 * MEMORY_S, silent=False)
    assert gaps.share < 0.01


def test_the_share_is_known_after_the_looks_of_one_put() -> None:
    gaps, now = Gaps(), 0.0
    now = look(gaps, now, 0.2, silent=True)
    assert gaps.share < 0.25, "two tenths of a second are no pattern"
    now = look(gaps, now, 0.4, silent=False)
    now = look(gaps, now, 0.6, silent=True)
    assert gaps.share == pytest.approx(0.8 / 1.2, abs=0.08)
    now = look(gaps, now + 5.0, 0.4, silent=False)  # the next put
    assert gaps.share == pytest.approx(0.8 / 1.6, abs=0.08)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, QUEUE)), max_size=50))
def test_never_more_than_others_sent_and_all_of_it_but_for_what_is_queued(
    steps: list[tuple[float, float, float]],
) -> None:
    """Each step: bytes of others, bytes of ours, and how many of ours are still in the queue after it."""
    foreign, others, own, found = Foreign(), 0.0, 0.0, 0.0
    foreign.sent(0.0, 0.0, QUEUE)
    for theirs, ours, queued in steps:
        others, own = others + theirs, own + ours
        left = min(own, queued)
        found += foreign.sent(others + own - left, own, QUEUE)
        assert others - left - 1e-3 <= found <= others + 1e-3


def test_headers_that_the_interface_does_not_count_hide_others_for_one_queue_only() -> None:
    foreign = Foreign()
    foreign.sent(0.0, 0.0, QUEUE)
    foreign.sent(1e6, 1.04e6, QUEUE)  # as if 40,000 bytes were missing
    assert foreign.sent(1e6 + 5000, 1.04e6, QUEUE) == pytest.approx(5000 - QUEUE)
