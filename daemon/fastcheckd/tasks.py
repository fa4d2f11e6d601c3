"""Work that has ended when its caller has, also when that was cancelled: memory must not change hands meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def spread(indexes: Sequence[int], threads: int, work: Callable[[int], None]) -> None:
    """Call `work` once for each index, on so many threads. Blocks.

    After the first failure nothing new is begun; it is raised when all threads are done.
    """
    rest = iter(indexes)
    lock = threading.Lock()
    failed = threading.Event()

    def run() -> None:
        while not failed.is_set():
            with lock:
                index = next(rest, None)
            if index is None:
                return
            try:
                work(index)
            except BaseException:
                failed.set()
                raise

    if threads == 1 or len(indexes) <= 1:
        run()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="spread") as executor:
        done = [executor.submit(run) for _ in range(min(threads, len(indexes)))]
    for future in done:
        future.result()
