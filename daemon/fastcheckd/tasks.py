"""Work that has ended when its caller has, also when that was cancelled: memory must not change hands meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, TypeVar

R = TypeVar("R")


async def settled(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all have ended, however they do, also when cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while tasks:
        try:
            _, tasks = await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def to_its_end(work: Callable[[], R], undo: Callable[[R], object] | None = None) -> R:
    """As `asyncio.to_thread`, but the work has ended when this has: memory must not change hands behind its back.

    What it returns after a cancellation is given to `undo`.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        try:
            await settled({running})
        finally:
            if not running.cancelled() and running.exception() is None and undo is not None:
                undo(running.result())
        raise
