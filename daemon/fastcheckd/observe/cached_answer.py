"""A question that is asked at most once at a time, and whose answer is good for a moment, however many want it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedAnswer(Generic[T]):
    """The outcome of `ask`, errors included.

    Args:
        ask: bounded in time by itself.
        keep_s: for so long after it came an answer is given again.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], keep_s: float) -> None:
        self._ask = ask
        self._keep_s = keep_s
        self._asking: asyncio.Task[T] | None = None
        self._good_until = 0.0

    async def get(self) -> T:
        """The answer; raises what asking raised."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now >= self._good_until):
            self._asking = asyncio.create_task(self._run())
            # Whoever wanted it may be gone; the error is theirs, not the event loop's.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._asking)

    async def _run(self) -> T:
        try:
            return await self._ask()
        finally:
            self._good_until = asyncio.get_running_loop().time() + self._keep_s
