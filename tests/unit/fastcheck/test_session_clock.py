"""When a save began, by the daemon's clock: never too late, and of late messages the least late one counts."""

from fastcheck.session import _clock_at

DELAYS_S = (0.4, 0.02, 0.9)


def test_the_least_delayed_message_counts_and_the_moment_is_never_too_late():
    known, ahead_s = (0.0, 0.0), 1000.0
    for said_at, delay_s in enumerate(DELAYS_S, start=1):
        now = said_at + delay_s
        known = max((said_at + ahead_s, now), known, key=lambda clock: _clock_at(clock, now))
        truth = now + ahead_s
        assert truth - 1.0 < _clock_at(known, now) <= truth
    assert known == (2 + ahead_s, 2.02)
    for later_s in (0.0, 10.0, 3600.0):
        assert _clock_at(known, 5.0 + later_s) <= 5.0 + later_s + ahead_s
    assert _clock_at((0.0, 5.0), 9.0) == 0.0
