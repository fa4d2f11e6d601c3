"""The registry process of a voter."""

from __future__ import annotations

import asyncio
from typing import Any

from ..beats import BEAT_INTERVAL_S, BeatGiver
from ..config import Config
from ..errors import RegistryError
from ..registry.raft import Raft
from ..registry_server import RegistryServer, Surroundings
from .process import stop_signal


class Progress:
    """Tells the agent that both go on, the event loop and the engine's thread."""

    def __init__(self) -> None:
        self._giver = BeatGiver()
        self._ticked = False

    def tick(self) -> None:
        """The engine's thread has come round."""
        self._ticked = True

    async def tell(self) -> None:
        """Give a sign of life now and then, as long as the engine comes round too."""
        while True:
            if self._ticked:
                self._ticked = False
                self._giver.give()
            await asyncio.sleep(BEAT_INTERVAL_S)


async def run(config: Config) -> None:
    """The registry process of a voter; returns after SIGTERM, raises when this voter can go on no more."""
    stopping = stop_signal()
    progress = Progress()
    server = RegistryServer(
        config, Surroundings(engine=lambda config, changed: Raft(config, changed, progress.tick))
    )
    await server.start()
    beating = asyncio.create_task(progress.tell(), name="signs of life")
    failing = asyncio.create_task(server.wait_failed(), name="registry-failure")
    try:
        ends: set[asyncio.Future[Any]] = {stopping, failing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise RegistryError(f"this voter stops, to be started anew: {failing.result()}")
    finally:
        failing.cancel()
        beating.cancel()
        await server.stop()
