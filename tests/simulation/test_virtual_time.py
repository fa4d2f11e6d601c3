"""The loop that everything in the simulation stands on."""

from __future__ import annotations

import asyncio

import pytest
from tests.simulation.virtual_time import Clock, Process, StuckError, VirtualLoop


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_an_hour_passes_at_once_and_timers_run_in_order(loop):
    seen = []

    async def wait(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, loop.now))

    async def both():
        await asyncio.gather(wait("late", 3600), wait("early", 1), wait("tie", 3600))

    loop.run_until_complete(both())
    assert [name for name, _ in seen] == ["early", "late", "tie"]
    assert loop.now == pytest.approx(3600)


def test_a_process_sees_its_own_clock(loop):
    process = Process(loop, "p", Clock(rate=1.05, offset_s=500))
    times = []

    async def sleep_ten():
        times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(10)
        times.append(asyncio.get_running_loop().time())

    loop.run_until_complete(process.start(sleep_ten()))
    assert times == pytest.approx([500, 510])
    assert loop.now == pytest.approx(10 / 1.05)


def test_a_paused_process_does_nothing_and_then_all_of_it(loop):
    process = Process(loop, "p", Clock())
    seen = []

    async def tick():
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(loop.now)

    task = process.start(tick())
    loop.at(1.5, process.pause, (), None)
    loop.at(10, process.resume, (), None)
    loop.run_until_complete(task)
    assert seen == pytest.approx([1, 10, 11])


def test_a_killed_process_runs_no_finally_and_its_mourners_are_told(loop):
    process = Process(loop, "p", Clock())
    seen = []

    async def work():
        try:
            await asyncio.sleep(1)
        finally:
            seen.append("finally")

    process.start(work())
    process.mourners["me"] = lambda: seen.append("dead")
    loop.at(0.5, process.kill, (), None)
    loop.run_until_complete(asyncio.sleep(5))
    assert seen == ["dead"]


def test_a_loop_with_nothing_left_to_do_says_so(loop):
    async def forever():
        await loop.create_future()

    with pytest.raises(StuckError):
        loop.run_until_complete(forever())
