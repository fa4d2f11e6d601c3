"""Waiting for what happens by itself: as long as it takes, up to a limit that only a defect reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: str = "it", timeout_s: float = 60.0) -> Any:
    """The condition's value, as soon as it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.01)
    return found


async def eventually(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Returns as soon as the condition is true, and lets other tasks run until then."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)
