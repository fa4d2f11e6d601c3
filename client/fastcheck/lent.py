"""The memory that the daemon has set aside for a session, and the segments of it that this process may fill now.

Used under the session's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import FastCheckError
from .stream import Stream


@dataclass(eq=False)
class HeldSegment:
    """A segment that this process may fill: until it is sealed or given back, or its stream ends."""

    segment_id: str
    ref: pb.SegmentRef
    stream: Stream
    session: int


class LentMemory:
    """Of one session."""

    def __init__(self) -> None:
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

    def ask(self, stream: Stream, state_bytes: int, record_bytes: int, step: int | None = None) -> None:
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
