"""Raw or encoded: the formula, what it is fed with, and that it is never far from the better of the two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.transfer.policy import (
    DECODE_SHARE,
    LINK_BYTES_MIN,
    ROUTES_MAX,
    SAMPLE_EVERY,
    SPEEDUP_MIN,
    ReplicationPolicy,
    RestorePolicy,
    best_fraction,
    is_chosen,
    speedup,
)

MB = 1e6
ROUTE = ("job", 0, 0)
rates = st.floats(1e4, 1e12)
ratios = st.floats(0.5, 1e4)


def seconds_per_byte(fraction: float, *, link: float, encode: float, ratio: float) -> float:
    """Encoding overlaps sending."""
    encoding = fraction / encode if fraction else 0.0
    return max(encoding, (1 - fraction + fraction / ratio) / link)


def told(
    policy: ReplicationPolicy, *, link: float, encode: float = 500 * MB, ratio: float = 4.0, idle: float = 8.0
) -> None:
    """One step's figures."""
    policy.sent(
        ROUTE, sent_bytes=100_000_000, busy_s=100_000_000 / link, seconds=100_000_000 / link, idle_cores=idle
    )
    policy.encoded(
        ROUTE, raw_bytes=50_000_000, encoded_bytes=int(50_000_000 / ratio), cpu_s=50_000_000 / encode
    )


@pytest.mark.parametrize(
    ("link", "encode", "ratio", "fraction", "gain"),
    [
        (100 * MB, 1e12, 4.0, 1.0, 4.0),  # a slow link: all of it, and the ratio is what is gained
        (1000 * MB, 1000 * MB, 2.0, 1 / 1.5, 1.5),
        (4000 * MB, 1000 * MB, 4.0, 1 / 4.75, 4 / 4 / (4 / 4.75)),
        (1e12, 1 * MB, 4.0, 0.0, 1.0),  # a link that no core keeps up with
        (100 * MB, 0.0, 4.0, 0.0, 1.0),
        (100 * MB, 1000 * MB, 1.0, 0.0, 1.0),
        (100 * MB, 1000 * MB, 0.9, 0.0, 1.0),
    ],
)
def test_the_formula(link: float, encode: float, ratio: float, fraction: float, gain: float) -> None:
    found = best_fraction(link=link, encode=encode, ratio=ratio)
    assert found == pytest.approx(fraction, abs=1e-4)
    if encode:
        assert speedup(found, link=link, encode=encode, ratio=ratio) == pytest.approx(gain, abs=1e-4)


@given(link=rates, encode=rates, ratio=ratios)
def test_the_share_is_as_good_as_the_better_of_all_raw_and_all_encoded(
    link: float, encode: float, ratio: float
) -> None:
    fraction = best_fraction(link=link, encode=encode, ratio=ratio)
    times = [seconds_per_byte(f, link=link, encode=encode, ratio=ratio) for f in (fraction, 0.0, 1.0)]
    assert 0 <= fraction <= 1
    assert times[0] <= 1.05 * min(times[1:])
    gain = speedup(fraction, link=link, encode=encode, ratio=ratio)
    assert gain == pytest.approx(times[1] / times[0], rel=1e-6)


@given(link=rates, encode=rates, ratio=ratios, idle=st.floats(0, 64), sharing=st.integers(1, 8))
def test_what_is_decided_costs_no_more_than_what_a_speed_up_must_promise(
    link: float, encode: float, ratio: float, idle: float, sharing: int
) -> None:
    policy = ReplicationPolicy("auto", 4)
    told(policy, link=link, encode=encode, ratio=max(1.0, ratio), idle=idle)
    ratio = 50_000_000 / max(1, int(50_000_000 / max(1.0, ratio)))
    fraction = policy.fraction(ROUTE, sharing=sharing)
    encode *= min(4, idle) / sharing
    if not encode:
        assert fraction == 0
        return
    times = [seconds_per_byte(f, link=link, encode=encode, ratio=ratio) for f in (fraction, 0.0, 1.0)]
    assert times[0] <= 1.001 * SPEEDUP_MIN * (1 + DECODE_SHARE) * min(times[1:])
    assert times[0] <= 1.001 * times[1], "never slower than raw"


def test_a_speed_up_that_is_hardly_one_is_not_worth_the_cores() -> None:
    for ratio, encodes in ((1.03, False), (1.3, True)):
        policy = ReplicationPolicy("auto", 4)
        told(policy, link=100 * MB, encode=1e11, ratio=ratio)
        assert (policy.fraction(ROUTE, sharing=1) > 0) is encodes


def test_without_idle_cores_everything_goes_as_it_is() -> None:
    policy = ReplicationPolicy("auto", 4)
    told(policy, link=100 * MB, idle=0.0)
    assert policy.fraction(ROUTE, sharing=1) == 0.0


def test_cores_are_shared_by_what_is_sent_at_the_same_time_and_no_more_than_the_threads_count() -> None:
    policy = ReplicationPolicy("auto", 2)
    told(policy, link=100 * MB, encode=300 * MB, ratio=4.0, idle=64.0)
    alone, shared = policy.fraction(ROUTE, sharing=1), policy.fraction(ROUTE, sharing=4)
    assert alone == pytest.approx(best_fraction(link=100 * MB, encode=600 * MB, ratio=4.0))
    assert shared == pytest.approx(best_fraction(link=100 * MB, encode=150 * MB, ratio=4.0))
    assert shared < alone


@pytest.mark.parametrize(("setting", "fraction"), [("always", 1.0), ("never", 0.0)])
def test_a_setting_is_not_argued_with(setting: str, fraction: float) -> None:
    policy = ReplicationPolicy(setting, 4)
    assert policy.fraction(ROUTE, sharing=1) == fraction
    told(policy, link=1e12 if fraction else 1e5)
    assert policy.fraction(ROUTE, sharing=1) == fraction
    assert not policy.wants_sample(ROUTE)


def test_nothing_is_encoded_before_all_is_known() -> None:
    policy = ReplicationPolicy("auto", 4)
    assert policy.fraction(ROUTE, sharing=1) == 0.0
    policy.sent(ROUTE, sent_bytes=LINK_BYTES_MIN, busy_s=1.0, seconds=1.0, idle_cores=8)
    assert policy.fraction(ROUTE, sharing=1) == 0.0
    policy.encoded(ROUTE, raw_bytes=100, encoded_bytes=10, cpu_s=1e-7)
    assert policy.fraction(ROUTE, sharing=1) > 0.0
    assert policy.fraction(("job", 1, 0), sharing=1) == 0.0, "another rank's way"


def test_what_fits_into_socket_buffers_says_nothing_of_the_link() -> None:
    policy = ReplicationPolicy("auto", 4)
    told(policy, link=100 * MB)
    before = policy.fraction(ROUTE, sharing=1)
    policy.sent(ROUTE, sent_bytes=LINK_BYTES_MIN - 1, busy_s=1e-9, seconds=1.0, idle_cores=8)
    policy.sent(ROUTE, sent_bytes=10**9, busy_s=0.0, seconds=1.0, idle_cores=8)
    assert policy.fraction(ROUTE, sharing=1) == before


def test_a_link_with_pauses_is_not_taken_for_a_faster_one() -> None:
    """All is encoded, the cores are what binds, and bursts go into the sockets' buffers at any rate."""
    policy = ReplicationPolicy("auto", 4)
    told(policy, link=125 * MB, encode=600 * MB, ratio=3.5, idle=1.0)
    for _ in range(10):
        assert policy.fraction(ROUTE, sharing=1) == 1.0
        policy.sent(ROUTE, sent_bytes=70_000_000, busy_s=0.1, seconds=0.6, idle_cores=1.0)


@pytest.mark.parametrize(
    ("old", "new"), [(100 * MB, 1000 * MB), (10_000 * MB, 1000 * MB), (20 * MB, 20_000 * MB)]
)
def test_a_link_that_changes_a_lot_is_known_within_two_steps(old: float, new: float) -> None:
    policy = ReplicationPolicy("auto", 4)
    for _ in range(10):
        told(policy, link=old, encode=100 * MB)
    for _ in range(2):
        told(policy, link=new, encode=100 * MB)
    fraction = policy.fraction(ROUTE, sharing=1)
    best = best_fraction(link=new, encode=400 * MB, ratio=4.0)
    gain = speedup(best, link=new, encode=400 * MB / (1 + DECODE_SHARE), ratio=4.0)
    assert fraction == (pytest.approx(best, rel=0.05) if gain >= SPEEDUP_MIN else 0.0)


def test_a_share_that_only_pays_while_others_decode_is_not_encoded() -> None:
    for link, encodes in ((300 * MB, True), (1250 * MB, False)):
        policy = ReplicationPolicy("auto", 1)
        told(policy, link=link, encode=600 * MB, ratio=3.4, idle=1.0)
        assert (policy.fraction(ROUTE, sharing=1) > 0) is encodes


def test_what_a_busy_link_has_carried_is_believed_at_once() -> None:
    policy = ReplicationPolicy("auto", 4)
    for link in (1000 * MB, 1400 * MB, 900 * MB):
        told(policy, link=link)
        assert policy._routes[ROUTE].link == pytest.approx(link)


def test_a_sample_is_due_at_first_and_when_the_last_one_is_old() -> None:
    policy = ReplicationPolicy("auto", 4)
    assert policy.wants_sample(ROUTE)
    told(policy, link=100 * MB)
    for _ in range(SAMPLE_EVERY):
        assert not policy.wants_sample(ROUTE)
        policy.sent(ROUTE, sent_bytes=1, busy_s=1.0, seconds=1.0, idle_cores=8)
    assert policy.wants_sample(ROUTE)
    policy.encoded(ROUTE, raw_bytes=0, encoded_bytes=0, cpu_s=0.0)
    assert policy.wants_sample(ROUTE), "nothing was encoded"
    policy.encoded(ROUTE, raw_bytes=10, encoded_bytes=5, cpu_s=1e-6)
    assert not policy.wants_sample(ROUTE)


def test_routes_not_used_for_long_are_forgotten() -> None:
    policy = ReplicationPolicy("auto", 4)
    told(policy, link=100 * MB)
    for number in range(ROUTES_MAX):
        policy.fraction(("job", number, 1), sharing=1)
    assert len(policy._routes) == ROUTES_MAX
    assert policy.wants_sample(ROUTE)


@given(st.floats(0, 1), st.integers(1, 4))
def test_the_chosen_chunks_are_spread_evenly(fraction: float, stride: int) -> None:
    chosen = [is_chosen(index, fraction) for index in range(0, 1000 * stride, stride)]
    assert sum(chosen) == pytest.approx(1000 * fraction, abs=20)


def test_all_or_none_are_chosen_at_the_ends() -> None:
    assert all(is_chosen(index, 1.0) for index in range(100_000))
    assert not any(is_chosen(index, 0.0) for index in range(100_000))


# --- what restores read -----------------------------------------------------------------------------


def measured(policy: RestorePolicy, *, link: float, encode: float, ratio: float) -> None:
    for _ in range(20):
        policy.sent(1_000_000, 1_000_000 / link)
        policy.encoded(1_000_000, int(1_000_000 / ratio), 1_000_000 / encode)


def test_a_restore_is_encoded_where_that_is_faster() -> None:
    for link, expected in ((50 * MB, True), (5000 * MB, False)):
        policy = RestorePolicy("auto", 2)
        assert not policy.choose(), "nothing is known yet"
        measured(policy, link=link, encode=400 * MB, ratio=1.5)
        with_it = [policy.choose() for _ in range(640)]
        assert with_it.count(expected) >= 625
        assert any(with_it), "one in a while keeps the figures fresh"


def test_the_first_chunk_after_a_raw_one_is_looked_at() -> None:
    policy = RestorePolicy("auto", 2)
    policy.sent(1000, 1e-5)
    assert policy.choose()


def test_connections_share_the_encoding_threads() -> None:
    policy = RestorePolicy("auto", 2)
    measured(policy, link=150 * MB, encode=200 * MB, ratio=1.5)
    assert policy.choose()
    for _ in range(16):
        policy.begin()
    assert not policy.choose()
    for _ in range(16):
        policy.end()
    assert policy.choose()


@pytest.mark.parametrize(("setting", "chosen"), [("always", True), ("never", False)])
def test_a_setting_holds_for_restores(setting: str, chosen: bool) -> None:
    policy = RestorePolicy(setting, 2)
    measured(policy, link=1e12 if chosen else 1e4, encode=100 * MB, ratio=2.0)
    assert policy.choose() is chosen
