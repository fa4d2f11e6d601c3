"""Which replica is to be checked next, and when. Pure: `now` in seconds is given.

Those that were not checked since this process has them come first, the newest step before older ones. All others
take turns, the one checked longest ago first; a turn takes its share of the period, so that the reading is
spread over all of it instead of coming in waves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: Part of the period in which everything is read once: the rest is for what holds it up.
TURN_SHARE = 0.8


class ScrubItem(NamedTuple):
    """One replica and the bytes that it has."""

    #: Job, step, rank, shard and kind.
    name: tuple[object, ...]
    step: int
    digest: bytes
    bytes: int
    #: Its bytes were hashed by this process.
    verified: bool


class ScrubSchedule:
    """When each replica was checked last."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._held: dict[tuple[tuple[object, ...], bytes], ScrubItem] = {}
        self._checked_at: dict[tuple[tuple[object, ...], bytes], float] = {}
        self._first_seen: dict[tuple[tuple[object, ...], bytes], float] = {}
        self._turn_ends_at: float | None = None

    def refresh(self, held: Iterable[ScrubItem], now: float) -> None:
        """What is held now; what was verified when it came counts as checked when it is first seen."""
        self._held = {(replica.name, replica.digest): replica for replica in held}
        self._first_seen = {key: self._first_seen.get(key, now) for key in self._held}
        self._checked_at = {key: at for key, at in self._checked_at.items() if key in self._held}
        for key, replica in self._held.items():
            if replica.verified:
                self._checked_at.setdefault(key, now)

    def checked(self, replica: ScrubItem, now: float) -> None:
        """The replica was checked, or could not be: its turn is over."""
        self._checked_at[replica.name, replica.digest] = now
        self._turn_ends_at = None

    def next(self, now: float) -> ScrubItem | None:
        """The replica that is to be checked now: whose turn ends, for each is read at the end of its own."""
        unchecked = [replica for key, replica in self._held.items() if key not in self._checked_at]
        if unchecked:
            return max(unchecked, key=lambda replica: replica.step)
        if not self._held:
            return None
        oldest = self._held[min(self._held, key=lambda key: self._checked_at[key])]
        if self._turn_ends_at is None:
            self._turn_ends_at = now + self._share_s(oldest)
        return oldest if now >= self._turn_ends_at else None

    def _share_s(self, replica: ScrubItem) -> float:
        total = sum(each.bytes for each in self._held.values())
        return TURN_SHARE * self._period_s * (replica.bytes / total if total else 1.0)

    def age_s(self, now: float) -> float | None:
        """How long ago the replica that waits longest was checked, or came here; None: nothing is held."""
        if not self._held:
            return None
        return now - min(self._checked_at.get(key, self._first_seen[key]) for key in self._held)
