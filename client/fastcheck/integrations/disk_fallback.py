"""Resuming from memory or from disk, whichever is newer: one decision for all ranks, for every integration."""

from __future__ import annotations

import logging
from typing import Any

from ..checkpointer import Checkpointer
from ..collectives import from_all
from ..errors import (
    DaemonUnavailableError,
    LoadFailedError,
    OutOfMemoryError,
    RegistryUnavailableError,
)

logger = logging.getLogger("fastcheck")

#: Sent in place of a step: there is none; memory is out of reach; the rank raises.
_NONE, _FAILED, _RAISES = -1, -2, -3


class PlainState:
    """An object whose state_dict() is a plain value: stands for one that does not exist yet when a state is loaded.

    `value` is what the object's state_dict() had returned: containers, plain values and tensors in CPU memory.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """The value."""
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the value."""
        self.value = state_dict


def load_newer(ckpt: Checkpointer, state: object, disk_step: int | None) -> int | None:
    """Load the newest step; None if the checkpoint on disk is to be used, since it is newer or FastCheck fails.

    All ranks of the Checkpointer take part, and decide alike. `state` should hold `PlainState` objects: it may be
    filled on some ranks and then not be used.

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
        # The other ranks enter the collective below in any case: a rank that does not would leave them waiting.
        mine, error = _RAISES, found
    reports = from_all([mine, _NONE if disk_step is None else disk_step], ckpt.world_size)
    in_memory = {theirs[0] for theirs in reports}
    if _RAISES in in_memory:
        raising = [rank for rank, theirs in enumerate(reports) if theirs[0] == _RAISES]
        raise error or LoadFailedError(f"ranks {raising} cannot load: see what they raised")
    if error is not None:
        # Training comes first (G4), and there is another checkpoint: but nobody should overlook it.
        logger.warning("nothing is loaded from memory, the newest checkpoint on disk counts: %s", error)
    if len(in_memory) == 1 and mine >= 0 and mine >= max(theirs[1] for theirs in reports):
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
