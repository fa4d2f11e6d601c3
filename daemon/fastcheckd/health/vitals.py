"""How a process is, from what those see who watch it: its pid, and whether it answers. Pure.

A process that is gone is known at once; one that is there and does not answer is just busy until it has been so
for `hung_after_s`, counted only while the watcher itself was awake.
"""

from __future__ import annotations

from fastcheck_proto.v1 import registry_pb2 as rpb

#: A process that hangs for so many times `hung_after_s` is ended and started again.
RESTART_AFTER = 3


class ProcessVitals:
    """One process after the other under one name.

    Args:
        hung_after_s: without an answer for this long a process is hung.
        step_s: longest time between two calls of `look` in which the agent was awake for sure.
    """

    def __init__(self, *, hung_after_s: float, step_s: float) -> None:
        self._hung_after_s = hung_after_s
        self._step_s = step_s
        self._pid: int | None = None
        self._answered = False
        self._had_one = False
        self._looked_at: float | None = None
        self._mute_s = 0.0

    def look(self, pid: int | None, now: float) -> None:
        """Time passes. `pid` of the data process; None: there is none."""
        gap_s = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        self._looked_at = now
        self._had_one = self._had_one or pid is not None
        if pid != self._pid:
            self._pid, self._answered, self._mute_s = pid, False, 0.0
        else:
            self._mute_s += min(gap_s, self._step_s)

    def answered(self) -> None:
        """The process that is there has answered: its loop turns."""
        self._answered = self._pid is not None
        self._mute_s = 0.0

    def health(self, pid: int | None) -> rpb.DataHealth.ValueType:
        """How it is; `pid` is the newest known, which may be newer than the last look."""
        if pid is None:
            return rpb.DATA_HEALTH_GONE if self._had_one else rpb.DATA_HEALTH_STARTING
        if pid != self._pid or not self._answered:
            return rpb.DATA_HEALTH_STARTING
        return rpb.DATA_HEALTH_HUNG if self._mute_s >= self._hung_after_s else rpb.DATA_HEALTH_OK

    @property
    def must_restart(self) -> bool:
        """It has hung for so long that only a new one helps. One that never answered may have much to adopt."""
        return self._answered and self._mute_s >= RESTART_AFTER * self._hung_after_s
