"""The memory that the daemon has set aside for a session: how it is asked for, and which segments may be filled now."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import DaemonUnavailableError, FastCheckError
from .session_stream import Stream, StreamLostError


@dataclass(eq=False)
class HeldSegment:
    """A segment that this process may fill: until it is sealed or given back, or its stream ends."""

    segment_id: str
    ref: pb.SegmentRef
    stream: Stream
    session: int


class LentMemory:
    """The memory that the daemon has set aside for a session, and the segments of it that this process may fill now.

    Args:
        changed: the session's lock. Everything here is used under it, and waits on it.
        goes_on: whether something may still come of what was asked for on a stream; raises when all is over.
        timeout_s: longest wait for a segment.
    """

    def __init__(
        self, changed: threading.Condition, goes_on: Callable[[Stream], bool], timeout_s: float
    ) -> None:
        self._changed = changed
        self._goes_on = goes_on
        self.timeout_s = timeout_s
        #: Somebody has waited for a segment since then.
        self.waiting_since: float | None = None
        self.held: list[HeldSegment] = []
        #: What the daemon answered to the last reservation, or why that came to nothing.
        self.reserved: pb.Reserved | None = None
        #: What the daemon has set aside for this rank: "full", "lean" where memory is short, empty if not known yet. A
        #: reservation that is refused leaves it as it was.
        self.contract = ""
        self.refused: FastCheckError | None = None
        #: Why waits for steps came to nothing.
        self.refused_steps: dict[int, FastCheckError] = {}
        #: What was asked for last: a daemon that has restarted is asked for it before the next save.
        self._reservation: pb.ReserveMemory | None = None

    def on_reserved(self, reserved: pb.Reserved) -> None:
        """The daemon says what it has set aside."""
        self.reserved = reserved
        kinds = {pb.MEMORY_CONTRACT_FULL: "full", pb.MEMORY_CONTRACT_LEAN: "lean"}
        self.contract = kinds.get(reserved.contract, "")

    def drop(self) -> None:
        """The stream has ended, and with it all loans."""
        self.held.clear()
        self.reserved = None
        self.contract = ""

    def pick(self, size: int) -> HeldSegment | None:
        """A segment of at least that size, now the caller's."""
        found = next((held for held in self.held if held.ref.bytes >= size), None)
        if found is not None:
            self.held.remove(found)
        return found

    def abandon_below(self, size: int) -> None:
        """Give back what is too small: the daemon makes larger ones of it."""
        for held in [held for held in self.held if held.ref.bytes < size]:
            self.held.remove(held)
            held.stream.post(pb.TrainerMessage(abandon=pb.AbandonSegment(segment_id=held.segment_id)))

    def _ask(self, stream: Stream, state_bytes: int, record_bytes: int, step: int | None = None) -> None:
        """Ask for segments of a size; with `step`, for one now."""
        self.reserved = self.refused = None
        self.refused_steps.clear()
        self.abandon_below(state_bytes + record_bytes)
        self._reservation = pb.ReserveMemory(state_bytes=state_bytes, record_bytes=record_bytes)
        asked = pb.ReserveMemory(state_bytes=state_bytes, record_bytes=record_bytes, step=step)
        stream.post(pb.TrainerMessage(reserve=asked))

    def ask_again(self, stream: Stream) -> None:
        """The same on a new stream, if anything was asked for."""
        if self._reservation is not None:
            stream.post(pb.TrainerMessage(reserve=self._reservation))

    def reserve(self, stream: Stream, state_bytes: int, record_bytes: int) -> pb.Reserved:
        """Have memory set aside for states of this size; raises why it cannot be had."""
        deadline = time.monotonic() + self.timeout_s
        self._ask(stream, state_bytes, record_bytes)
        self._wait(stream, lambda: self.refused is not None or self.reserved is not None, deadline)
        # Said to be there, but not there yet: it is on its way, or will be refused.
        self._wait(stream, lambda: self.refused is not None or bool(self.held), deadline)
        if self.refused is not None:
            raise self.refused
        assert self.reserved is not None
        return self.reserved

    def wait_held(self, stream: Stream, count: int, deadline: float) -> list[HeldSegment]:
        """The segments held, once there are so many, or at the deadline; raises as `reserve`."""
        with contextlib.suppress(DaemonUnavailableError):
            self._wait(stream, lambda: len(self.held) >= count or self.refused is not None, deadline)
        if self.refused is not None:
            raise self.refused
        return list(self.held)

    def wait_for_one(
        self, stream: Stream, state_bytes: int, record_bytes: int, step: int, deadline: float
    ) -> HeldSegment:
        """A segment for a step, asked for now; raises why there is none."""
        size = state_bytes + record_bytes
        self._ask(stream, state_bytes, record_bytes, step)

        def answered() -> bool:
            self.abandon_below(size)
            return bool(self.held) or step in self.refused_steps

        self._wait(stream, answered, deadline)
        if step in self.refused_steps:
            raise self.refused_steps.pop(step)
        found = self.pick(size)
        assert found is not None
        return found

    def _wait(self, stream: Stream, answered: Callable[[], bool], deadline: float) -> None:
        self.waiting_since = time.monotonic()
        try:
            self._changed.wait_for(
                lambda: answered() or not self._goes_on(stream), max(0.0, deadline - time.monotonic())
            )
        finally:
            self.waiting_since = None
        if answered():
            return
        if not self._goes_on(stream):
            raise StreamLostError("the session's stream was lost")
        raise DaemonUnavailableError(
            f"the daemon on this node has no memory free for this step within {self.timeout_s:g} s: older steps are "
            "under way, or it hangs or is overloaded"
        )
