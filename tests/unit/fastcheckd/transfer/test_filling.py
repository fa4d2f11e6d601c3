"""Waiting for a trainer's copy: nothing is handed out early, nobody waits without end."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.unit.fastcheckd.transfer.transfer_harness import eventually

from fastcheckd.errors import PeerError
from fastcheckd.transfer.filling import Filling


def still_wanted() -> None:
    pass


def never() -> None:
    pytest.fail("patience was lost")


def test_threads_wait_until_the_copy_has_passed_and_going_back_is_no_news():
    async def run():
        filling = Filling(60, never)
        waited = [
            asyncio.create_task(asyncio.to_thread(filling.until_filled, at, still_wanted)) for at in (10, 20)
        ]
        filling.fill(10)
        await asyncio.wait_for(waited[0], 5)
        filling.fill(3)
        assert filling.has(10) and not filling.has(11) and not waited[1].done()
        filling.seal()
        await asyncio.wait_for(waited[1], 5)
        assert filling.has(10**12)

    asyncio.run(run())


def test_the_loop_waits_for_the_first_chunk_as_long_as_it_takes_and_for_the_seal():
    async def run():
        lost: list[bool] = []
        filling = Filling(0.05, lambda: lost.append(True))
        begun = asyncio.create_task(filling.until_begun(10))
        await asyncio.sleep(0.2)
        assert not begun.done() and not lost
        filling.fill(10)
        await asyncio.wait_for(begun, 5)
        sealed = asyncio.create_task(filling.until_sealed())
        await eventually(lambda: bool(lost))
        assert not sealed.done()
        filling.seal()
        await asyncio.wait_for(sealed, 5)
        assert lost == [True]

    asyncio.run(run())


def test_patience_is_lost_once_and_the_wait_ends_when_nobody_wants_it_any_more():
    async def run():
        lost = threading.Event()
        count: list[bool] = []

        def impatient() -> None:
            count.append(True)
            lost.set()

        def wanted() -> None:
            if lost.is_set():
                raise PeerError("the transfer was ended")

        filling = Filling(0.05, impatient)
        waits = [asyncio.to_thread(filling.until_filled, 10, wanted) for _ in range(3)]
        found = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 5)
        assert all(isinstance(error, PeerError) for error in found)
        assert count == [True]

    asyncio.run(run())
