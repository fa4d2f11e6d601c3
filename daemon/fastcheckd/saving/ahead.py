"""What is known of a save before its bytes are there, and sending them as they come where that is worth it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable

from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError, InvalidRequestError
from ..transfer.filling import Filling
from .content import of_layout
from .save import Save
from .shared import Shared

logger = logging.getLogger(__name__)

#: Smaller states are copied before their placement is known.
STATE_BYTES_MIN = 64 << 20
#: Four threads copy and half of the cores encode: with so many they need not take each other's. Not measured.
CORES_MIN = 8
#: Of `transfer_timeout_s`: a holder that waits for a chunk must never think that this node is gone.
PATIENCE_SHARE = 0.25


def worth_it(policy: str, state_bytes: int, cores: int) -> bool:
    """Whether a state is sent while it is copied, by the config key `overlap_staging`; `cores` may be used here."""
    if policy == "auto":
        return state_bytes >= STATE_BYTES_MIN and cores >= CORES_MIN
    return policy == "always"


async def read(save: Save, said: tpb.SealSaveRequest | tpb.PushSeal, chunk_bytes: int) -> None:
    """Check what a trainer says of its state, and note it in the save.

    Raises:
        InvalidRequestError: header, layout or shared part do not fit the state.
    """
    if said.header_bytes == 0 or said.header_offset + said.header_bytes > save.state_bytes:
        raise InvalidRequestError("the state header lies outside of the state")
    shared = Shared.of(said)
    if shared is not None:
        shared.check(save.state_bytes)
    layout = said.layout if said.HasField("layout") else None
    # A large model's layout has a million runs.
    content = await asyncio.to_thread(of_layout, layout, save.state_bytes, chunk_bytes)
    save.header_offset, save.header_bytes = said.header_offset, said.header_bytes
    save.content, save.lossy = content, content.lossy
    save.shared, save.shared_digests = (shared.part, shared.digests) if shared is not None else (None, ())


class Ahead:
    """Begins to send saves while their trainers still copy, and takes that back where it comes to nothing.

    Args:
        attach: lets a save know of its rank's others; called before it is sent.
        send: has a save replicated and, once it is sealed, committed.
    """

    def __init__(
        self,
        *,
        config: Config,
        counters: Counters,
        attach: Callable[[Save], None],
        send: Callable[[Save], Awaitable[None]],
    ) -> None:
        self._config = config
        self._counters = counters
        self._attach = attach
        self._send = send

    def begin(self, save: Save, said: tpb.PushSeal) -> None:
        """Read what the trainer says of its state, and send the bytes as they come if that is worth it."""
        save.reading = asyncio.create_task(read(save, said, self._config.chunk_bytes))
        # The seal tells of what is wrong; without one nobody asks.
        save.reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())
        if not worth_it(self._config.overlap_staging, save.state_bytes, len(os.sched_getaffinity(0))):
            return
        save.filling = Filling(
            PATIENCE_SHARE * self._config.transfer_timeout_s,
            lambda: self.stop(save, "its trainer is slow, or paused"),
        )
        self._counters.add("saves_ahead")
        self._attach(save)
        save.task = asyncio.create_task(self._run(save), name=f"save-{save.key}")

    async def _run(self, save: Save) -> None:
        assert save.reading is not None
        with contextlib.suppress(FastCheckdError):  # the seal tells
            await asyncio.shield(save.reading)
            # What is made lossy is changed in place, and could not be sent anew.
            if save.sealed or not save.lossy:
                await self._send(save)

    def fill(self, save: Save, filled_bytes: int) -> bool:
        """The trainer has copied so much of its state; False if nobody needs to know."""
        if save.filling is None:
            return False
        save.filling.fill(min(filled_bytes, save.state_bytes))
        return True

    def stop(self, save: Save, why: str) -> None:
        """Take back what was sent before the seal. A seal that comes after all begins anew."""
        if save.task is None or save.sealed or save.task.done() or save.task.cancelling():
            return
        logger.info("%s is not sent any more while it is copied: %s", save.key, why)
        self._counters.add("saves_ahead_stopped")
        save.task.cancel()
