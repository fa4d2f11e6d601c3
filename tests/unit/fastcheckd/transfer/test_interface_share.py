"""Copies beside other traffic, on links that are formulas: who gets what, never below the floor, and back again."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.transfer.interface_share import (
    CAPACITY_S,
    LOOK_S,
    PEAK_S,
    TRICKLE_SHARE,
    InterfaceShare,
    WindowMax,
)

SAMPLE_S = 0.1
#: Looks for gaps in between.
GLANCES = 10
GLANCE_S = SAMPLE_S / GLANCES
LINK = 1000.0


class Link:
    """A link of 1000 bytes/s, shared evenly where all of it is wanted: `others(now)` is what others would like."""

    def __init__(self, others: Callable[[float], float], *, floor: float = 0.0, streams: int = 2) -> None:
        self.share = InterfaceShare()
        self.now = 0.0
        self.own_bytes = self.others_bytes = self.wanted_bytes = 0.0
        self._others = others
        self._floor = floor
        self._streams = streams

    def run(self, seconds: float, *, putting: bool = True) -> Link:
        for _ in range(round(seconds / SAMPLE_S)):
            own_sum = others_sum = 0.0
            for _ in range(GLANCES):
                own, others = self._share(putting=putting)
                self.now += GLANCE_S
                if self.share.crowded(self.now):
                    self.share.notice(self.now, others=others)
                own_sum += own
                others_sum += others
            own, others = own_sum / GLANCES, others_sum / GLANCES
            self.share.observe(self.now, own=own, others=others, putting=putting)
            self.own_bytes += own * SAMPLE_S
            self.others_bytes += others * SAMPLE_S
        return self

    def _share(self, *, putting: bool) -> tuple[float, float]:
        """Bytes per second that puts and others get now."""
        allowed = self.share.allowance(self.now, floor=self._floor).bytes_per_s if putting else 0.0
        wanted = self._others(self.now)
        self.wanted_bytes += wanted * GLANCE_S
        # Each of our streams gets as much as their one flow, when it is tight.
        own = min(allowed, max(LINK - wanted, LINK * self._streams / (self._streams + 1)))
        return own, min(wanted, LINK - own)


def test_alone_on_the_link_nothing_is_held_back() -> None:
    link = Link(lambda _: 0.02 * LINK).run(20)
    assert link.own_bytes >= 0.97 * 20 * LINK
    assert link.share.allowance(link.now, floor=0.0).reason == "none"


def test_a_greedy_neighbour_keeps_nine_tenths_and_puts_keep_their_floor() -> None:
    link = Link(lambda _: LINK, floor=50.0).run(30)
    assert link.others_bytes >= 0.9 * link.wanted_bytes
    assert link.own_bytes >= 0.99 * 50.0 * 30
    assert link.share.allowance(link.now, floor=50.0).reason == "deadline"


def test_a_full_link_is_left_within_half_a_second() -> None:
    link = Link(lambda _: LINK).run(LOOK_S + 0.5)
    assert link.share.allowance(link.now, floor=0.0).bytes_per_s <= 0.06 * LINK


def test_what_a_modest_neighbour_leaves_is_used() -> None:
    link = Link(lambda _: 0.3 * LINK).run(30)
    assert link.others_bytes >= 0.97 * link.wanted_bytes
    assert link.own_bytes >= 0.5 * 30 * LINK
    assert link.share.allowance(link.now, floor=0.0).reason == "traffic"


def test_bursts_once_per_step_find_their_place_free() -> None:
    link = Link(lambda now: LINK if now % 1.0 < 0.4 else 0.0).run(30)
    assert link.others_bytes >= 0.95 * link.wanted_bytes


def test_what_the_gaps_will_carry_is_not_asked_of_bursts_and_is_made_in_time() -> None:
    link = Link(lambda now: LINK if now % 1.5 < 0.6 else 0.0, floor=0.3 * LINK).run(30)
    assert link.own_bytes >= 0.3 * 30 * LINK
    link.own_bytes = link.others_bytes = link.wanted_bytes = 0.0
    link.run(30)  # how much the gaps carry is known by now
    assert link.own_bytes >= 0.3 * 30 * LINK
    assert link.others_bytes >= 0.97 * link.wanted_bytes


def test_what_the_gaps_will_not_carry_is_taken_from_bursts() -> None:
    link = Link(lambda now: LINK if now % 1.5 < 1.3 else 0.0, floor=0.3 * LINK).run(30)
    assert link.own_bytes >= 0.25 * 30 * LINK
    assert link.share.allowance(30.0, floor=0.3 * LINK).bytes_per_s >= 0.2 * LINK


def test_when_the_neighbour_leaves_the_whole_link_is_ours_again() -> None:
    link = Link(lambda now: LINK if now < 10 else 0.0).run(10 + PEAK_S + 1)
    before = link.own_bytes
    link.run(5)
    assert link.own_bytes - before >= 0.99 * 5 * LINK


def test_a_link_that_has_become_slower_is_believed_after_a_while() -> None:
    share = InterfaceShare()
    share.observe(0.0, own=1000.0, others=0.0, putting=True)
    assert share.capacity(1.0) == 1000.0
    assert share.capacity(CAPACITY_S * 1.2) == 0.0


def test_a_look_is_short_and_rare() -> None:
    looks = 0.0
    link = Link(lambda _: 0.5 * LINK)
    for _ in range(round(3 * CAPACITY_S / SAMPLE_S)):
        looks += math.isinf(link.share.allowance(link.now, floor=0.0).bytes_per_s) * SAMPLE_S
        link.run(SAMPLE_S)
    assert LOOK_S <= looks <= 4 * (LOOK_S + 2 * SAMPLE_S)


samples = st.lists(
    st.tuples(st.floats(0.01, 5.0), st.floats(0, 1e11), st.floats(0, 1e11), st.booleans()),
    min_size=1,
    max_size=80,
)


@given(samples, st.floats(0, 1e11))
def test_never_below_the_floor_never_more_than_there_is_room_for_and_always_a_reason(
    taken: list[tuple[float, float, float, bool]], floor: float
) -> None:
    share, now = InterfaceShare(), 0.0
    for since_s, own, others, putting in taken:
        now += since_s
        share.observe(now, own=own, others=others, putting=putting)
        allowance = share.allowance(now, floor=floor)
        assert allowance.bytes_per_s >= floor, "no gap was seen: nothing to count on"
        assert allowance.reason in {"none", "traffic", "deadline"}
        if allowance.reason == "traffic":
            room = share.capacity(now) - share.others(now)
            assert allowance.bytes_per_s <= max(room, TRICKLE_SHARE * share.capacity(now))
        assert math.isinf(allowance.bytes_per_s) == (allowance.reason == "none")


@given(samples)
def test_whatever_happened_before_a_free_link_is_soon_used_whole(
    taken: list[tuple[float, float, float, bool]],
) -> None:
    share, now = InterfaceShare(), 0.0
    for since_s, own, others, putting in taken:
        now += since_s
        share.observe(now, own=own, others=others, putting=putting)
    for _ in range(50):
        now += SAMPLE_S
        share.observe(now, own=10.0, others=0.0, putting=True)
    assert math.isinf(share.allowance(now, floor=0.0).bytes_per_s)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e9)), max_size=60), st.floats(0.5, 20))
def test_the_largest_of_a_window_is_never_missed_and_forgotten_in_time(
    values: list[tuple[float, float]], window_s: float
) -> None:
    window, now, seen = WindowMax(window_s), 0.0, []
    for since_s, value in values:
        now += since_s
        window.add(now, value)
        seen.append((now, value))
        found = window.at(now)
        recent = [v for at, v in seen if now - at < window_s * 11 / 12]
        older = [v for at, v in seen if now - at <= window_s * 13 / 12 + 1e-9]
        assert max(recent, default=0.0) <= found <= max(older, default=0.0)


def test_the_window_is_bounded() -> None:
    window = WindowMax(1.0)
    for i in range(10_000):
        window.add(i * 0.001, float(i))
    assert len(window._parts) <= 13
    assert window.at(9.999) == pytest.approx(9999.0)
