"""The registry process of a voter."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import observe_pb2_grpc

from ..beats import BEAT_INTERVAL_S, BeatGiver
from ..config import Config
from ..durations import REGISTRY, Durations
from ..errors import RegistryError
from ..observe import registry_metrics
from ..registry.raft import Raft
from ..registry_server import RegistryServer, Surroundings
from ..rpc import server_options
from ..services.admission import Admission
from ..services.observe import ObserveService
from .process import listening, private_directory, stop_signal, watching_crowds


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
    durations, progress = Durations(REGISTRY), Progress()
    server = RegistryServer(
        config, Surroundings(engine=partial(Raft, durations=durations, on_tick=progress.tick))
    )
    await server.start()
    beating = asyncio.create_task(progress.tell(), name="signs of life")
    private_directory(config.runtime_dir)
    observed = ObserveService(lambda: registry_metrics.families(server.facts(durations.snapshot())))
    near = grpc.aio.server(options=server_options(), interceptors=[Admission(config.cluster_id)])
    observe_pb2_grpc.add_ObserveServiceServicer_to_server(observed, near)
    failing = asyncio.create_task(server.wait_failed(), name="registry-failure")
    try:
        ends: set[asyncio.Future[Any]] = {stopping, failing}
        async with listening(near, config.registry_socket), watching_crowds():
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise RegistryError(f"this voter stops, to be started anew: {failing.result()}")
    finally:
        failing.cancel()
        beating.cancel()
        await server.stop()
