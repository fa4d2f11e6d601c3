"""How often each rank saves, and so until when a step's copies should be made: before the next one comes. Pure."""

from __future__ import annotations

import itertools
from collections import OrderedDict

Rank = tuple[str, int]

#: Share of the time to the next save that a step may take: what is late by a little is then still in time.
SHARE = 0.8
#: The fastest of the last intervals counts: a pause for an evaluation says nothing about the next step.
INTERVALS = 3
#: Ranks remembered; beyond, the one that has not saved for longest is forgotten.
RANKS_MAX = 4096


class SaveIntervals:
    """When steps are due. Moments are seconds of one clock.

    Args:
        patience_s: how long a step may take whose rank has no rhythm yet, and at most.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        #: When each rank sealed its last steps, the newest last.
        self._sealed: OrderedDict[Rank, list[float]] = OrderedDict()
        #: Ranks whose trainers wait for their older steps, since then.
        self._waiting: dict[Rank, float] = {}

    def sealed(self, rank: Rank, now: float) -> None:
        """A rank has saved."""
        self._waiting.pop(rank, None)
        moments = self._sealed.setdefault(rank, [])
        self._sealed.move_to_end(rank)
        moments.append(now)
        del moments[: -INTERVALS - 1]
        while len(self._sealed) > RANKS_MAX:
            forgotten, _ = self._sealed.popitem(last=False)
            self._waiting.pop(forgotten, None)

    def awaited(self, rank: Rank, now: float) -> None:
        """The rank's trainer cannot save for want of room: its older steps are due."""
        if rank in self._sealed:
            self._waiting.setdefault(rank, now)

    def interval_s(self, rank: Rank) -> float | None:
        """How often the rank saves: the shortest of its last intervals; None: it has not saved twice."""
        return min((b - a for a, b in itertools.pairwise(self._sealed.get(rank, []))), default=None)

    def due(self, rank: Rank, sealed_at: float) -> float:
        """When a step that was sealed at that moment should have its copies."""
        latest = sealed_at + self._patience_s
        if (interval_s := self.interval_s(rank)) is not None:
            latest = min(latest, sealed_at + SHARE * interval_s)
        return min(latest, self._waiting.get(rank, latest))
