"""The life that a data process speaks for, and the next one."""

import asyncio

from fastcheckd import identity
from fastcheckd.identity import NodeLife


def test_whoever_spoke_for_a_life_that_is_over_waits_for_the_next_one(monkeypatch):
    async def scenario():
        own = NodeLife("node-1")
        own.assume(3)
        ended = own.ref()
        waiting = asyncio.create_task(own.outlives(ended))
        await asyncio.sleep(0)
        own.assume(2)
        await asyncio.sleep(0)
        assert not waiting.done(), "an older life is none to go on with"
        own.assume(4)
        assert await waiting
        assert await own.outlives(ended), "it is known by now"
        monkeypatch.setattr(identity, "NEXT_LIFE_S", 0.01)
        assert not await own.outlives(own.ref())

    asyncio.run(scenario())
