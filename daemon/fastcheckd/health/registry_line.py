"""The agent's watch over its registry process: one that is there and makes no progress is ended, to be started anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from ..beats import BEAT_INTERVAL_S
from .vitals import RESTART_AFTER, DataVitals

logger = logging.getLogger(__name__)


class _Process(Protocol):
    """The supervised registry process."""

    @property
    def pid(self) -> int | None: ...

    @property
    def beats(self) -> int: ...

    def kill(self) -> None: ...


class RegistryLine:
    """Looks at the signs of life of whichever registry process there is.

    Args:
        process: the registry process; None: this node has none.
    """

    def __init__(self, process: Callable[[], _Process | None], hung_after_s: float) -> None:
        self._process = process
        self._vitals = DataVitals(hung_after_s=hung_after_s, step_s=2 * BEAT_INTERVAL_S)
        self._hung_after_s = hung_after_s
        self._beats = 0
        self._pid: int | None = None
        #: By the loop's clock: when it was last known to go on, or not to be there at all.
        self.went_on_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        process = self._process()
        self._vitals.look(None if process is None else process.pid, now)
        if process is None:
            self.went_on_at = now
            return
        if process.pid != self._pid:  # started anew: whoever does that has seen to it
            self._pid = process.pid
            self.went_on_at = now
        if process.beats != self._beats:
            self._beats = process.beats
            self._vitals.answered()
            self.went_on_at = now
        if self._vitals.must_restart:
            logger.error(
                "the registry process (pid %s) has made no progress for %g s: ending it, to start it anew",
                process.pid,
                RESTART_AFTER * self._hung_after_s,
            )
            process.kill()
