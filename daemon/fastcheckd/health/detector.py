"""Heartbeats and probes seen, now → who is UP, SUSPECT or DOWN. Pure; times are the judge's monotonic clock.

Every voter listens, only the leader judges, and its DOWN is a proposal that the state machine decides.
SUSPECT means "place nothing new there and ask it directly"; it costs nothing if it is wrong. DOWN costs
copies, so it needs silence and a second sign: a refused connection, or much longer silence.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

#: A node in one of its lives: node id and incarnation.
Life = tuple[str, int]


class Verdict(Enum):
    """What the leader thinks of a node."""

    UP = "UP"
    SUSPECT = "SUSPECT"
    DOWN = "DOWN"


@dataclass
class _Signs:
    heard_at: float
    #: A direct probe found nobody, or another life, at the node's address; and no sign of life since.
    refused: bool = False
    #: The agent lives but its data process does not answer it.
    data_ready: bool = True


class FailureDetector:
    """Signs of life, and the verdicts they allow.

    Args:
        suspect_after_s: silence before a node is suspected, and the window that a new leader waits.
        down_after_s: silence after which a node that cannot be reached at all is DOWN.
    """

    def __init__(self, *, suspect_after_s: float, down_after_s: float) -> None:
        self._suspect_after_s = suspect_after_s
        self._down_after_s = down_after_s
        self._signs: dict[Life, _Signs] = {}
        self._judging_since = 0.0
        self._judged_at = 0.0

    def became_leader(self, now: float) -> None:
        """Start judging, after one window: heartbeats may have been lost on the way here."""
        self._judging_since = now
        self._judged_at = now

    def heard(self, life: Life, now: float, *, data_ready: bool = True) -> None:
        """A heartbeat, or an answer to a probe."""
        self._signs[life] = _Signs(now, data_ready=data_ready)

    def probe_answered(self, life: Life, now: float) -> None:
        """The agent answered a direct probe in this very life."""
        signs = self._signs.setdefault(life, _Signs(now))
        signs.heard_at = now
        signs.refused = False

    def probe_refused(self, life: Life, sent_at: float) -> None:
        """Nobody listens at the node's address, or another life does. `sent_at`: when the probe left."""
        signs = self._signs.get(life)
        if signs is not None and signs.heard_at <= sent_at:
            signs.refused = True

    def keep(self, lives: Collection[Life]) -> None:
        """Forget the signs of all other lives."""
        known = set(lives)
        self._signs = {life: signs for life, signs in self._signs.items() if life in known}

    def judge(self, lives: Collection[Life], now: float) -> dict[Life, Verdict]:
        """Verdicts about the current lives; signs of all others are forgotten."""
        self.keep(lives)
        for life in lives:
            self._signs.setdefault(life, _Signs(now))
        if now - self._judged_at > self._suspect_after_s:
            # The judge itself was asleep (stopped, or starved of CPU): what it did not hear proves nothing.
            self._judging_since = now
        self._judged_at = now
        return {life: self._verdict(self._signs[life], now) for life in lives}

    def silence_s(self, life: Life, now: float) -> float:
        """How long nothing was heard from a life, by a judge who listened."""
        signs = self._signs.get(life)
        return 0.0 if signs is None else now - max(signs.heard_at, self._judging_since)

    def _verdict(self, signs: _Signs, now: float) -> Verdict:
        silence_s = now - max(signs.heard_at, self._judging_since)
        if silence_s > self._down_after_s or (signs.refused and silence_s > self._suspect_after_s):
            return Verdict.DOWN
        if silence_s > self._suspect_after_s or not signs.data_ready:
            return Verdict.SUSPECT
        return Verdict.UP
