"""What the last saves of a loop cost, for `Checkpointer.advise`."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from .handle import SaveHandle

#: Saves that are remembered; medians of them are taken.
REMEMBERED_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Medians, in seconds; see `advice.advise`."""

    step_s: float
    stall_s: float
    commit_s: float
    busy_s: float


class Measured:
    """The last saves of one Checkpointer."""

    def __init__(self) -> None:
        self._handles: deque[SaveHandle] = deque(maxlen=REMEMBERED_MAX)

    def note(self, handle: SaveHandle) -> None:
        """A save has begun and returned."""
        self._handles.append(handle)

    def costs(self, step_s: float | None = None) -> Costs | None:
        """What saves cost; None while none is committed, or no step was seen and `step_s` is not given."""
        done = [handle for handle in self._handles if handle.committed]
        steps = self._steps() if step_s is None else [step_s]
        if not done or not steps:
            return None
        stats = [handle.stats for handle in done]
        return Costs(
            step_s=statistics.median(steps),
            # Waiting for an older step is no cost of a save but of saving too often.
            stall_s=statistics.median(max(0.0, s["blocked_s"] - s["waited_s"]) for s in stats),
            commit_s=statistics.median(_commit_s(handle) for handle in done),
            busy_s=statistics.median(s["replicate_s"] for s in stats),
        )

    def _steps(self) -> list[float]:
        """Seconds per step from one save's return to the next one's call."""
        found = []
        handles = list(self._handles)
        for one, other in pairwise(handles):
            if other.step > one.step and one._returned_at is not None and other._began_at is not None:
                found.append((other._began_at - one._returned_at) / (other.step - one.step))
        return [seconds for seconds in found if seconds > 0]


def _commit_s(handle: SaveHandle) -> float:
    assert handle._ended_at is not None
    returned_at = handle._ended_at if handle._returned_at is None else handle._returned_at
    return max(0.0, handle._ended_at - returned_at)
