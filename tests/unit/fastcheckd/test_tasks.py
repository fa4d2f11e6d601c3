"""What a call does in threads has ended when the call has, also when it was called off."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fastcheckd.tasks import to_its_end


def test_work_that_was_called_off_has_ended_and_what_it_made_is_undone() -> None:
    began, may_end, undone = threading.Event(), threading.Event(), []

    def work() -> str:
        began.set()
        assert may_end.wait(30)
        return "made"

    async def story() -> None:
        task = asyncio.create_task(to_its_end(work, undone.append))
        await asyncio.to_thread(began.wait, 30)
        for _ in range(2):  # whoever calls it off may be called off
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert undone == ["made"]

    asyncio.run(story())


def test_what_work_returns_or_raises_is_passed_on() -> None:
    async def story() -> None:
        undone: list[int] = []
        assert await to_its_end(lambda: 5, undone.append) == 5
        with pytest.raises(ValueError, match="invalid literal"):
            await to_its_end(lambda: int("x"), undone.append)
        assert undone == []

    asyncio.run(story())
