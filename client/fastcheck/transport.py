"""What both ways of moving a rank's bytes have in common: shared memory (`shared_memory`) and uploads (`upload`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from fastcheck_proto.v1 import state_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import CorruptError, LossyCheckpointError
from .handle import SaveHandle
from .progress import Reporter
from .state.flatten import FlatState
from .state.header import parse
from .state.records import Pour, pour_plainly


@dataclass(frozen=True)
class Timeouts:
    """How long to try to find the daemon, and how long one call may take. Seconds."""

    connect_s: float
    timeout_s: float


@dataclass(frozen=True)
class Staged:
    """How long a save waited for room and how long its bytes took, in seconds; how many came after `save`."""

    waited_s: float
    stage_s: float
    lazy_bytes: int = 0


class Staging(Protocol):
    """A save that has a segment; what may not wait is copied."""

    def hold(self) -> None:
        """Returns when what is left to copy may change."""
        ...

    def finish(self, handle: SaveHandle) -> None:
        """Copy what is left and hand it over; the handle is told what becomes of it."""
        ...


@dataclass
class Loaded:
    """A checkpoint's place and bytes: flat uint8, exactly `ready.state_bytes` long."""

    ready: pb.LoadReady
    state: torch.Tensor
    #: Moves bytes out of it.
    pour: Pour = pour_plainly
    #: Reads the header of a state that is no part of one that ranks share.
    parse: Callable[[bytes, int], state_pb2.StateHeader] = parse


class Transport(Protocol):
    """A way to hand a rank's bytes to the daemon and to get them back."""

    #: Whether pieces may be left for `Staging.finish`.
    lazy: bool

    def begin(self, step: int, flat: FlatState) -> Staging:
        """Take a segment and copy all pieces but those that may come later."""
        ...

    def load(
        self, request: pb.LoadRequest, patience: Timeouts, *, allow_lossy: bool, reporter: Reporter
    ) -> AbstractContextManager[Loaded | None]:
        """The bytes of a committed step, valid inside the block; None when there is none. Tells `reporter`."""
        ...

    def prepare(self, state_bytes: int, record_bytes: int) -> None:
        """Have memory set aside for states of this size, and made ready; returns when it is.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        ...

    def interrupt(self) -> None:
        """End what `prepare` is still waiting for: nobody will save."""
        ...

    def close(self) -> None:
        """End threads, forget memory."""
        ...


def sealed_of(step: int, flat: FlatState) -> pb.Sealed:
    """What the daemon is told of a state beside its bytes."""
    return pb.Sealed(
        step=step,
        state_bytes=flat.state_bytes,
        header_offset=flat.header_offset,
        header_bytes=len(flat.header),
        layout=flat.layout,
        shared=flat.shared,
        shared_digests=flat.shared_digests,
    )


def check_ready(ready: pb.LoadReady, request: pb.LoadRequest, *, allow_lossy: bool) -> None:
    """Raise CorruptError unless the daemon's answer makes sense, LossyCheckpointError unless it may be had."""
    if request.HasField("step") and ready.step != request.step:
        raise CorruptError(f"the daemon answered a load of step {request.step} with step {ready.step}")
    if ready.lossy and not allow_lossy:
        raise LossyCheckpointError(
            f"step {ready.step} was saved with a lossy coding (precision= of its Checkpointer): "
            "pass allow_lossy=True to load it, or load another step (see steps()); nothing was changed"
        )
    if ready.header_offset + ready.header_bytes > ready.state_bytes:
        raise CorruptError(f"step {ready.step} has a header outside of its state")
    if ready.HasField("segment") and ready.state_bytes > ready.segment.bytes:
        raise CorruptError(f"step {ready.step} is larger than the segment that it lies in")
