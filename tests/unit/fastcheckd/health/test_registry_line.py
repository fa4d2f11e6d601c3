import asyncio

import pytest

from fastcheckd.health import registry_line
from fastcheckd.health.registry_line import RegistryLine

HUNG_AFTER_S = 0.1


class Process:
    def __init__(self) -> None:
        self.pid, self.beats, self.kills = 1, 0, 0

    def kill(self) -> None:
        self.kills += 1
        self.pid += 1


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(registry_line, "BEAT_INTERVAL_S", 0.02)


def watched(process, story):
    async def run():
        line = RegistryLine(lambda: process, HUNG_AFTER_S)
        task = asyncio.create_task(line.run())
        try:
            async with asyncio.timeout(20):
                await story(line)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_one_that_stops_to_make_progress_is_ended_and_one_that_goes_on_is_not():
    process = Process()

    async def story(line):
        for _ in range(60):  # six times as long as one may be silent
            process.beats += 1
            await asyncio.sleep(0.01)
        assert process.kills == 0
        while not process.kills:
            await asyncio.sleep(0.01)

    watched(process, story)


def test_one_that_has_not_begun_is_left_alone_but_seen():
    process = Process()

    async def story(line):
        await asyncio.sleep(0.05)
        began = line.went_on_at
        await asyncio.sleep(10 * HUNG_AFTER_S)
        assert process.kills == 0 and line.went_on_at == began

    watched(process, story)


def test_a_node_without_one_always_goes_on():
    async def story(line):
        began = line.went_on_at
        while line.went_on_at <= began + 5 * HUNG_AFTER_S:
            await asyncio.sleep(0.01)

    watched(None, story)
