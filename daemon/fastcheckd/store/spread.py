"""Work on many chunks, spread over a few threads that each have tools of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def spread(indexes: Sequence[int], tools: Sequence[T], work: Callable[[int, T], None]) -> None:
    """Call `work` once for each index, on as many threads as there are tools.

    After the first failure nothing new is begun; it is raised when all threads are done.
    """
    rest = iter(indexes)
    lock = threading.Lock()
    failed = threading.Event()

    def run(tool: T) -> None:
        while not failed.is_set():
            with lock:
                index = next(rest, None)
            if index is None:
                return
            try:
                work(index, tool)
            except BaseException:
                failed.set()
                raise

    if len(tools) == 1 or len(indexes) <= 1:
        run(tools[0])
        return
    with ThreadPoolExecutor(len(tools), thread_name_prefix="store") as executor:
        done = [executor.submit(run, tool) for tool in tools]
    for future in done:
        future.result()
