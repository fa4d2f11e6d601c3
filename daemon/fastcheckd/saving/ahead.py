"""What is known of a save before its bytes are there, and whether it is worth sending them as they come."""

from __future__ import annotations

import asyncio

from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import InvalidRequestError
from .content import of_layout
from .save import Save
from .shared import Shared

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
