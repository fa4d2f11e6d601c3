"""A segment that its trainer still fills: how far it has come, and who waits for the rest.

Chunks are handed out as soon as the copy has passed them. A trainer that is slow, paused or dead would look to a holder
like an owner that is: so nobody waits longer than `patience_s`, which is below the deadline of a transfer. Then
`on_impatience` is called, once, and whoever began the transfer ends it; that is no fault of the holder's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

#: How often a waiting thread looks whether it is still wanted.
_LOOK_S = 0.1


class Filling:
    """How many bytes from the segment's start on are final.

    Threads may ask `has` and wait in `until_filled`; the rest is the event loop's.
    """

    def __init__(self, patience_s: float, on_impatience: Callable[[], None]) -> None:
        """`on_impatience` is called on the event loop that this is made on."""
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._on_impatience = on_impatience
        self._changed = threading.Condition()
        self._filled_bytes = 0
        self._sealed = False
        self._lost_patience = False
        self._sealing = asyncio.Event()
        self._moving = asyncio.Event()

    def fill(self, filled_bytes: int) -> None:
        """The trainer has come so far; less than before is no news."""
        with self._changed:
            if filled_bytes > self._filled_bytes:
                self._filled_bytes = filled_bytes
                self._changed.notify_all()
        self._wake()

    def seal(self) -> None:
        """The trainer vouches for all of it."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()
        self._sealing.set()
        self._wake()

    def _wake(self) -> None:
        self._moving.set()
        self._moving = asyncio.Event()

    def has(self, stop: int) -> bool:
        """Whether the bytes before offset `stop` are final."""
        with self._changed:
            return self._sealed or stop <= self._filled_bytes

    def until_filled(self, stop: int, still_wanted: Callable[[], None]) -> None:
        """In a thread: return when the bytes before `stop` are final; `still_wanted` raises to end the wait."""
        impatient_at = time.monotonic() + self._patience_s
        while not self.has(stop):
            still_wanted()
            if time.monotonic() > impatient_at:
                self._loop.call_soon_threadsafe(self._lose_patience)
                impatient_at = float("inf")
            with self._changed:
                self._changed.wait_for(lambda: self._sealed or stop <= self._filled_bytes, _LOOK_S)

    async def until_begun(self, stop: int) -> None:
        """On the event loop: return when the bytes before `stop` are final, however long that takes.

        For what has troubled no holder yet.
        """
        while not self.has(stop):
            await self._moving.wait()

    async def until_sealed(self) -> None:
        """On the event loop: return when the trainer vouches for all of it."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._sealing.wait()
        except TimeoutError:
            self._lose_patience()
            await self._sealing.wait()

    def _lose_patience(self) -> None:
        if not (self._lost_patience or self._sealed):
            self._lost_patience = True
            self._on_impatience()
