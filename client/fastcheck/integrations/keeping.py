"""What the integrations have in common: an object for whatever was saved, and one decision for all ranks."""

from __future__ import annotations

import logging
from typing import Any

from ..checkpointer import Checkpointer
from ..errors import (
    DaemonUnavailableError,
    LoadFailedError,
    OutOfMemoryError,
    RegistryUnavailableError,
)
from ..exchanging import from_all

logger = logging.getLogger("fastcheck")

#: What a rank tells instead of a step: there is none; memory is out of reach; it raises.
_NONE, _FAILED, _RAISES = -1, -2, -3


class Kept:
    """Takes the place of an object in a state that is loaded before the object exists.

    `value` is what the object's state_dict() had returned: containers, plain values and tensors in CPU memory.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """What is kept."""
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep it."""
        self.value = state_dict


def load_newer(ckpt: Checkpointer, state: object, disk_step: int | None) -> int | None:
    """Load the newest step unless a checkpoint on disk is newer, or FastCheck fails: then None, and the disk's counts.

    All ranks of the Checkpointer take part, and decide alike. `state` should hold `Kept` objects: it may be filled on
    some ranks and not be used.

    Args:
        disk_step: of the newest checkpoint on disk; None: there is none.

    Raises, then on every rank:
        StateMismatchError, ...: what `Checkpointer.load` raises where neither memory nor the way to it is at fault.
        LoadFailedError: another rank raised such an error.
    """
    error: Exception | None = None
    try:
        step = ckpt.load(state)
        mine = _NONE if step is None else step
    except (DaemonUnavailableError, RegistryUnavailableError, LoadFailedError, OutOfMemoryError) as found:
        mine, error = _FAILED, found
    except Exception as found:  # noqa: BLE001  it is raised below
        # The others only know that this rank failed, and are about to ask it what it has: a rank that does not answer
        # leaves them waiting in the collective.
        mine, error = _RAISES, found
    told = from_all([mine, _NONE if disk_step is None else disk_step], ckpt.world_size)
    in_memory = {theirs[0] for theirs in told}
    if _RAISES in in_memory:
        raising = [rank for rank, theirs in enumerate(told) if theirs[0] == _RAISES]
        raise error or LoadFailedError(f"ranks {raising} cannot load: see what they raised")
    if error is not None:
        # Training comes first (G4), and there is another checkpoint: but nobody should overlook it.
        logger.warning("nothing is loaded from memory, the newest checkpoint on disk counts: %s", error)
    if len(in_memory) == 1 and mine >= 0 and mine >= max(theirs[1] for theirs in told):
        return mine
    if mine >= 0 and in_memory != {mine}:
        logger.warning(
            "other ranks could not load step %d from memory, the newest checkpoint on disk counts", mine
        )
    return None


def newest_step(ckpt: Checkpointer) -> int | None:
    """The newest committed step; None when there is none, or when it cannot be known, which is logged."""
    try:
        return max(ckpt.steps(), default=None)
    except (DaemonUnavailableError, RegistryUnavailableError) as error:
        logger.warning("nothing is loaded from memory, the newest checkpoint on disk counts: %s", error)
        return None
