"""When a save began, by the daemon's clock: never too late, and of late messages the least late one counts."""

from fastcheck.session_stream import DaemonClock

DELAYS_S = (0.4, 0.02, 0.9)


def test_the_least_delayed_message_counts_and_the_moment_is_never_too_late():
    clock, ahead_s = DaemonClock(), 1000.0
    assert clock.at(9.0) == 0.0, "nothing was said yet"
    for said_at, delay_s in enumerate(DELAYS_S, start=1):
        now = said_at + delay_s
        clock.note(said_at + ahead_s, now)
        truth = now + ahead_s
        assert truth - 1.0 < clock.at(now) <= truth
    assert clock.at(2.02) == 2 + ahead_s
    for later_s in (0.0, 10.0, 3600.0):
        assert clock.at(5.0 + later_s) <= 5.0 + later_s + ahead_s
