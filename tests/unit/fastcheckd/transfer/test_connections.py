"""A transfer takes the threads it can get, and nobody leaves before all of them have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastcheckd.errors import PeerError
from fastcheckd.transfer.connections import LoopProgress, connections


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


def test_a_busy_executor_lends_fewer_threads_and_no_connections_need_none() -> None:
    async def story() -> None:
        busy = threading.Event()
        with ThreadPoolExecutor(3) as executor:
            executor.submit(busy.wait, 10)
            async with connections(executor, 4) as opened:
                assert opened.size == 2
                done: list[int] = []
                await opened.run([lambda: done.append(1), lambda: done.append(2)])
                assert sorted(done) == [1, 2]
            async with connections(executor, 0) as opened:
                assert opened.size == 0
                await opened.run([])
            busy.set()
            async with connections(executor, 3) as opened:
                assert opened.size >= 1

    run(story())


def test_threads_without_orders_go_home() -> None:
    async def story() -> None:
        with ThreadPoolExecutor(2) as executor:
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    async with connections(executor, 2):
                        raise ZeroDivisionError
            async with connections(executor, 2) as opened:
                assert opened.size == 2

    run(story())


def test_the_first_error_ends_the_others_and_is_raised_when_all_have_left() -> None:
    async def story() -> None:
        left = threading.Event()
        with ThreadPoolExecutor(2) as executor:
            async with connections(executor, 2) as opened:

                def fails() -> None:
                    raise ZeroDivisionError

                def ends_late() -> None:
                    deadline = time.monotonic() + 60
                    while time.monotonic() < deadline:
                        try:
                            with opened.channel("127.0.0.1:1", "nobody", 1.0, ""):
                                pass
                        except PeerError as error:
                            if "was ended" in str(error):
                                left.set()
                                raise
                        time.sleep(0.01)

                with pytest.raises(ZeroDivisionError):
                    await opened.run([fails, ends_late])
                assert left.is_set()

    run(story())


def test_a_cancelled_caller_waits_for_the_threads_even_if_cancelled_again() -> None:
    async def story() -> None:
        go, gone = threading.Event(), threading.Event()

        def stubborn() -> None:
            go.wait(10)
            gone.set()

        async def caller(executor: ThreadPoolExecutor) -> None:
            async with connections(executor, 1) as opened:
                await opened.run([stubborn])

        with ThreadPoolExecutor(1) as executor:
            task = asyncio.create_task(caller(executor))
            await asyncio.sleep(0.05)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gone.is_set()

    run(story())


def test_an_executor_that_is_shut_down_is_a_peer_error() -> None:
    async def story() -> None:
        executor = ThreadPoolExecutor(1)
        executor.shutdown()
        with pytest.raises(PeerError, match="shutting down"):
            async with connections(executor, 1):
                pass

    run(story())


def test_progress_of_many_threads_arrives_on_the_loop_and_adds_up() -> None:
    async def story() -> None:
        loop_thread = threading.get_ident()
        told: list[int] = []

        def listener(count: int) -> None:
            assert threading.get_ident() == loop_thread
            told.append(count)

        progress = LoopProgress(asyncio.get_running_loop(), listener)

        def work() -> None:
            for _ in range(500):
                progress(3)

        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(3)))
        await asyncio.sleep(0)
        assert sum(told) == 4500
        assert len(told) <= 1500

    run(story())
