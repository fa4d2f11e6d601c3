"""The registry process of a voter."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import observe_pb2_grpc

from ..beats import BEAT_INTERVAL_S, BeatGiver
from ..config import Config
from ..durations import REGISTRY, Durations
from ..errors import RegistryError
from ..observe import registry_metrics
from ..registry.raft.adapter import Raft
from ..registry.raft.disk import free_bytes
from ..registry_server import RegistryServer, Surroundings
from ..rpc import server_options
from ..services.admission import Admission
from ..services.observe import ObserveService
from .server import listening, private_directory, stop_signal, watching_crowds

logger = logging.getLogger(__name__)

#: Below this a voter doesn't begin: its log and snapshot are written anew now and then, beside the old ones.
ROOM_BYTES_MIN = 16 << 20
ROOM_PAUSE_S = 1.0
ROOM_TOLD_S = 60.0


class Liveness:
    """Tells the parent that both go on, the event loop and the engine's thread."""

    def __init__(self, giver: BeatGiver) -> None:
        self._giver = giver
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


async def _room(config: Config, progress: Liveness) -> None:
    """Return when the state directory has room to vote and to acknowledge.

    A voter on a full disk would be elected, fail at its first entry and end, again and again.
    """
    folder = next(path for path in (config.state_dir, *config.state_dir.parents) if path.exists())
    told_at = float("-inf")
    while (free := free_bytes(folder)) < ROOM_BYTES_MIN:
        progress.tick()
        now = asyncio.get_running_loop().time()
        if now - told_at >= ROOM_TOLD_S:
            told_at = now
            logger.error(
                "registry: %s has %d bytes free, and a voter needs %d: this one takes no part until there are. "
                "The others go on; free some space there",
                config.state_dir,
                free,
                ROOM_BYTES_MIN,
            )
        await asyncio.sleep(ROOM_PAUSE_S)
    if told_at > float("-inf"):
        logger.warning("registry: %s has room again: this voter takes part", config.state_dir)


async def run(config: Config, giver: BeatGiver) -> None:
    """The registry process of a voter; returns after SIGTERM, raises when this voter can go on no more."""
    stopping = stop_signal()
    durations, progress = Durations(REGISTRY), Liveness(giver)
    beating = asyncio.create_task(progress.tell(), name="signs of life")
    room = asyncio.create_task(_room(config, progress), name="room on disk")
    await asyncio.wait({stopping, room}, return_when=asyncio.FIRST_COMPLETED)
    if not room.done():
        room.cancel()
        beating.cancel()
        return
    room.result()
    server = RegistryServer(
        config, Surroundings(engine=partial(Raft, durations=durations, on_tick=progress.tick))
    )
    await server.start()
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
