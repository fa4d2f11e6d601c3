"""The steps under way of each rank: which ones a newer step waits for, and which ones give way to it.

Bounds the steps under way per rank. A trainer waits only when the bound is reached, and never for a step that cannot go
forward: that one is given up for the newer. It does not wait for provisional steps either: the newest few of them are
kept until there is a registry again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError, SupersededError
from .rank_state import RankState
from .save import Save
from .save_interval import SaveIntervals

logger = logging.getLogger(__name__)

#: How often a waiting reservation looks whether the step before it has stalled.
STALL_CHECK_S = 0.25
#: How long a newer step waits until a given-up one has let go of its memory.
GIVE_UP_PATIENCE_S = 2.0


class Backlog:
    """Of one data process. Owned by the event loop's thread.

    Args:
        end: ends a save with an error.
    """

    def __init__(
        self,
        config: Config,
        counters: Counters,
        rhythm: SaveIntervals,
        end: Callable[[RankState, Save, FastCheckdError], None],
    ) -> None:
        self._config = config
        self._counters = counters
        self._rhythm = rhythm
        self._end = end

    async def wait_below(
        self, rank: RankState, bound: int, newer_step: int, ready: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until fewer than `bound` steps of the rank are under way, or `ready`; whether it took any time."""
        loop = asyncio.get_running_loop()
        waited = False
        while len(under_way := rank.under_way()) >= bound and not ready():
            oldest = under_way[0]
            patience_s = 0.0 if rank.starved else self._config.stall_after_s
            if oldest.stalled_because is not None and oldest.idle_s() > patience_s:
                rank.starved = True
                await self.give_up(rank, oldest, newer_step)
                continue
            waited = True
            self._rhythm.awaited((rank.job, rank.rank), loop.time())
            done = asyncio.create_task(oldest.until_done())
            await asyncio.wait({done}, timeout=STALL_CHECK_S)
            done.cancel()
        return waited

    async def give_up(self, rank: RankState, save: Save, newer_step: int) -> None:
        """Give a step up for a newer one; returns when its memory is free, or soon after."""
        self.supersede(rank, save, newer_step)
        if save.task is not None:
            await asyncio.wait({save.task}, timeout=GIVE_UP_PATIENCE_S)

    def supersede(self, rank: RankState, save: Save, newer_step: int) -> None:
        """A step gives way to a newer one."""
        logger.warning("%s given up for step %d: %s", save.key, newer_step, save.stalled_because)
        self._counters.add("saves_superseded")
        if not save.reported:
            rank.obsolete.append(save.key.step)
        kind = "provisional step" if save.provisional else "step"
        error = SupersededError(f"{kind} given up for step {newer_step}, because: {save.stalled_because}")
        self._end(rank, save, error)
        if save.task is not None:
            save.task.cancel()

    def note_provisional(self, rank: RankState, save: Save) -> None:
        """One more: the newest few are kept, older ones are given up for them."""
        self._counters.add("saves_provisional")
        rank.starved = False
        for old in rank.too_many():
            self.supersede(rank, old, save.key.step)

    def note_given_up(self, rank: RankState, save: Save, *, keep: int) -> None:
        """A step ended uncommitted that may still be committed: keep the newest few such ones."""
        rank.given_up.append(save.key.step)
        for old in rank.uncommittable(keep):
            self.supersede(rank, old, save.key.step)
