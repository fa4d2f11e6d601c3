"""The registry process of a voter."""

from __future__ import annotations

import asyncio
from typing import Any

from ..config import Config
from ..errors import RegistryError
from ..registry_server import RegistryServer
from .process import stop_signal


async def run(config: Config) -> None:
    """The registry process of a voter; returns after SIGTERM, raises when this voter can go on no more."""
    stopping = stop_signal()
    server = RegistryServer(config)
    await server.start()
    failing = asyncio.create_task(server.wait_failed(), name="registry-failure")
    try:
        ends: set[asyncio.Future[Any]] = {stopping, failing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise RegistryError(f"this voter stops, to be started anew: {failing.result()}")
    finally:
        failing.cancel()
        await server.stop()
