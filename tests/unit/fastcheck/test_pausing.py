"""How often a daemon that is away is tried: at once, then after pauses that grow to a bound."""

from __future__ import annotations

from fastcheck import DaemonUnavailableError, FencedError, RegistryUnavailableError
from fastcheck.pausing import Pause


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_to_a_bound_and_end_with_a_success():
    clock = Clock()
    pause = Pause(clock)
    assert pause.error is None
    first = pause.connect_s
    lengths = []
    for _ in range(8):
        pause.note(DaemonUnavailableError("away"))
        began = clock.now
        while pause.error is not None:
            assert isinstance(pause.error, DaemonUnavailableError)
            clock.now += 0.5
        lengths.append(clock.now - began)
    assert lengths == [1, 2, 4, 8, 8, 8, 8, 8]
    assert pause.failing
    assert pause.connect_s < first
    pause.note(None)
    assert pause.error is None
    assert pause.connect_s == first


def test_only_what_is_out_of_reach_makes_later_saves_wait():
    pause = Pause(Clock())
    pause.note(RegistryUnavailableError("no leader"))
    assert isinstance(pause.error, RegistryUnavailableError)
    pause.note(FencedError("old"))
    assert pause.error is None
    assert not pause.failing
