"""When a process is started, and what is said of one that does not stay. Pure.

The pause before a start doubles up to a bound, for a start that fails as for a life that was short, and shrinks again
once a process has lived a while.
"""

from __future__ import annotations

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
#: A process that lived this long starts over with the shortest pause.
HEALTHY_AFTER_S = 10.0
#: So many lives in a row that were shorter are a defect that somebody should look at.
SHORT_LIVES = 3


class Restarts:
    """One process after the other under one name. Times are those of one clock, in seconds."""

    def __init__(self, now: float) -> None:
        #: None: it does not run.
        self.pid: int | None = None
        self.restarts = 0
        #: Starts that failed.
        self.start_failures = 0
        #: When it is to be started, while it does not run.
        self.start_at = now
        self._pause_s = BACKOFF_MIN_S
        self._not_started = ""
        self._healthy_at = 0.0
        self._short_lives = 0
        self._last_end = ""

    def started(self, pid: int, now: float) -> None:
        """It runs."""
        self.pid = pid
        self._healthy_at = now + HEALTHY_AFTER_S
        self._not_started = ""

    def not_started(self, reason: str, now: float) -> None:
        """The system could not start it."""
        self.start_failures += 1
        self._not_started = reason
        self._wait(now)

    def ended(self, end: str, now: float) -> float:
        """It has ended, though nobody asked it to; how long until it is started again, seconds."""
        self.pid = None
        self.restarts += 1
        self._last_end = end
        if now >= self._healthy_at:
            self._short_lives, self._pause_s = 0, BACKOFF_MIN_S / 2
        else:
            self._short_lives += 1
        return self._wait(now)

    def _wait(self, now: float) -> float:
        self._pause_s = min(2 * self._pause_s, BACKOFF_MAX_S)
        self.start_at = now + self._pause_s
        return self._pause_s

    def trouble(self, now: float) -> str:
        """Why it does not run as it should, to be read after its name; empty: it does."""
        if self._not_started:
            return f"cannot be started: {self._not_started}"
        if self._short_lives >= SHORT_LIVES and not self._is_healthy(now):
            return f"keeps ending ({self._short_lives} times in a row, lastly with {self._last_end})"
        return ""

    def wakes_at(self, now: float) -> float | None:
        """When something changes by itself: it is to be started, or has lived long enough."""
        if self.pid is None:
            return self.start_at
        return None if self._is_healthy(now) else self._healthy_at

    def _is_healthy(self, now: float) -> bool:
        return self.pid is not None and now >= self._healthy_at
