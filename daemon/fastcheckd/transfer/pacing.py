"""How fast work that can wait may go: a rate, and no more than a trickle while work that cannot wait is under way.

`Pacer` decides, and knows no clock. `Gate` asks it on behalf of threads that move bytes, `AsyncGate` on that of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

#: A stream that waits for the foreground moves a piece after this share of the time in which a transfer is believed
#: dead. More often, and pieces of MiB on many connections are most of a slow link.
TRICKLE_SHARE = 0.5
#: Longest time for which a gate sleeps before it looks again.
LOOK_INTERVAL_S = 0.05


class ChunkGate(Protocol):
    """Holds up the chunks of transfers that can wait. Asked by the threads that move them."""

    def begin(self, stream: object) -> None:
        """A connection begins."""

    def end(self, stream: object) -> None:
        """It has ended."""

    def wait(self, stream: object, size_bytes: int, still_wanted: Callable[[], None]) -> None:
        """Return when the next piece may move; `still_wanted` raises when it need not any more."""


@contextlib.contextmanager
def passing(gate: ChunkGate | None, stream: object) -> Iterator[None]:
    """While a connection's chunks are held up by the gate, if there is one."""
    if gate is None:
        yield
        return
    gate.begin(stream)
    try:
        yield
    finally:
        gate.end(stream)


class Pacer:
    """A token bucket that stands still while the foreground is busy. Pure: `now` in seconds is given.

    A piece may begin as soon as there is any token, and takes as many as it has bytes: pieces may be larger than
    the bucket, and the rate holds in the long run.

    Args:
        bytes_per_s: the rate; may be infinite, and may change.
        burst_bytes: what may have been saved up.
        trickle_s: a stream that has waited so long gets one piece in any case: the other end is not to believe
            that it is gone. The bytes count against the rate all the same.
        starve_s: likewise, where it is the rate and not the foreground that holds it up; default: `trickle_s`.
    """

    def __init__(
        self, bytes_per_s: float, *, burst_bytes: int, trickle_s: float, starve_s: float | None = None
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._starve_s = trickle_s if starve_s is None else starve_s
        self._burst_bytes = burst_bytes
        self._trickle_s = trickle_s
        self._tokens = float(burst_bytes)
        self._at: float | None = None
        self._passed_at: dict[object, float] = {}

    def set_rate(self, bytes_per_s: float, now: float) -> None:
        """From now on. What was earned or owed by the old one stays."""
        self._refill(now)
        self._bytes_per_s = bytes_per_s

    def begin(self, stream: object, now: float) -> None:
        """A stream begins."""
        self._passed_at[stream] = now

    def end(self, stream: object) -> None:
        """A stream has ended."""
        self._passed_at.pop(stream, None)

    def wait_s(self, stream: object, size_bytes: int, now: float, *, busy: bool) -> float:
        """0: the piece may pass, and is counted. Otherwise ask again after so many seconds, or when `busy` changes."""
        self._refill(now)
        waits_since = self._passed_at.get(stream, now)
        if busy and (left_s := waits_since + self._trickle_s - now) > 0:
            return left_s
        if not busy and self._tokens <= 0 and (left_s := waits_since + self._starve_s - now) > 0:
            return min(left_s, (1.0 - self._tokens) / self._bytes_per_s)
        self._tokens -= size_bytes
        self._passed_at[stream] = now
        return 0.0

    def _refill(self, now: float) -> None:
        if math.isinf(self._bytes_per_s):
            self._tokens = float(self._burst_bytes)
        elif self._at is not None:
            gained = max(0.0, now - self._at) * self._bytes_per_s
            self._tokens = min(float(self._burst_bytes), self._tokens + gained)
        self._at = now


class Gate:
    """The pacer of one kind of work, for many threads and tasks.

    Args:
        busy: whether the foreground moves bytes; may be asked from any thread.
        paused: is called once for each piece that had to wait for the foreground.
        held_up: likewise, for each that had to wait for the rate alone.
    """

    def __init__(
        self,
        pacer: Pacer,
        busy: Callable[[], bool],
        paused: Callable[[], None] = lambda: None,
        held_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pacer = pacer
        self._busy = busy
        self._paused = paused
        self._held_up = held_up
        self._clock = clock
        self._lock = threading.Lock()

    def begin(self, stream: object) -> None:
        """A stream begins: it has waited for nothing yet."""
        with self._lock:
            self._pacer.begin(stream, self._clock())

    def set_rate(self, bytes_per_s: float) -> None:
        """From now on."""
        with self._lock:
            self._pacer.set_rate(bytes_per_s, self._clock())

    def end(self, stream: object) -> None:
        """A stream has ended."""
        with self._lock:
            self._pacer.end(stream)

    def wait(self, stream: object, size_bytes: int, still_wanted: Callable[[], None]) -> None:
        """Block until the piece may move. `still_wanted` is asked meanwhile, and raises when it is not."""
        for pause_s in self._pauses(stream, size_bytes):
            still_wanted()
            time.sleep(pause_s)

    async def wait_async(self, stream: object, size_bytes: int) -> None:
        """As `wait`, for a task."""
        for pause_s in self._pauses(stream, size_bytes):
            await asyncio.sleep(pause_s)

    def _pauses(self, stream: object, size_bytes: int) -> Iterator[float]:
        """How long to wait until the next look, look after look; ends when the piece may move, and counts it."""
        waited_for: set[bool] = set()
        while True:
            busy = self._busy()
            with self._lock:
                wait_s = self._pacer.wait_s(stream, size_bytes, self._clock(), busy=busy)
            if not wait_s:
                break
            if busy and True not in waited_for:
                self._paused()
            waited_for.add(busy)
            yield min(wait_s, LOOK_INTERVAL_S)
        if waited_for == {False}:
            self._held_up()
