"""How long things take, by name: what a process measures as it goes, in buckets. The counterpart of `counters.py`.

Each kind of process has names of its own, so that what they tell can be joined. Seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric

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


# When a process began is told once, not beside each histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library types only some


class Durations:
    """Histograms by name; asking for a name that is not declared is an error. May be used from any thread.

    Args:
        names: one of the tables above.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._histograms = {
            name: Histogram(f"fastcheck_{name}_seconds", f"Seconds {text}.", buckets=BOUNDS_S, registry=None)
            for name, text in names.items()
        }

    def add(self, name: str, seconds: float) -> None:
        """One more took so long."""
        self._histograms[name].observe(seconds)

    def families(self) -> list[Metric]:
        """All of them as they are now, for a scrape."""
        return [family for histogram in self._histograms.values() for family in histogram.collect()]
