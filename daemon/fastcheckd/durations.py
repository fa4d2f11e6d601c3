"""How long things take, by name: what a process measures as it goes, in buckets. The counterpart of `counters.py`.

Each kind of process has names of its own, so that what they tell can be joined. Seconds of the monotonic clock.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

#: Name → what is measured, for the data process.
DATA: dict[str, str] = {
    "save_wait": "of a save, until its trainer got memory: for its older steps, and for room",
    "save_copy": "of a save, from then to its seal: its trainer's copy",
    "save_replicate": "of a committed save, from its seal until all copies were acknowledged",
    "save_commit": "of a committed save, from then until the registry had committed it",
    "restore": "of a load, until all bytes of the step were here and checked",
}
#: For the agent.
AGENT: dict[str, str] = {
    "heartbeat_gap": "between two answers of one voter to this node's heartbeats",
}
#: For the registry process.
REGISTRY: dict[str, str] = {
    "registry_commit": "of a command, from its proposal until it was committed, at the voter that led",
}
#: Upper ends of the buckets: from a command on loopback to a step that waits for another rank for minutes.
BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    600.0,
)


@dataclass(frozen=True)
class Histogram:
    """What was measured under one name."""

    help: str
    #: How many fell into each bucket of `BOUNDS_S`, and last those beyond; not cumulative.
    counts: tuple[int, ...]
    total_s: float


class Durations:
    """A thread-safe set of histograms; asking for a name that is not declared is an error.

    Args:
        names: one of the tables above.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._lock = threading.Lock()
        self._counts = {name: [0] * (len(BOUNDS_S) + 1) for name in names}
        self._total_s = dict.fromkeys(names, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """One more took so long."""
        with self._lock:
            self._counts[name][bisect_left(BOUNDS_S, seconds)] += 1
            self._total_s[name] += seconds

    def snapshot(self) -> dict[str, Histogram]:
        """All histograms at one moment."""
        with self._lock:
            return {
                name: Histogram(text, tuple(self._counts[name]), self._total_s[name])
                for name, text in self._names.items()
            }
