"""One trainer's stream as the daemon sees it: the segments that it may fill, and what it is still to be told.

Owned by the event loop's thread. What is told waits in an outbox: of a step only the newest state, so a trainer that
reads slowly costs a bounded amount.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Hashable

from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import FastCheckdError, InvalidRequestError
from ..rpc import detail
from ..store.segments import Segment
from .save import Save

#: Messages that a trainer has not read: it asks for more than one for each of its steps.
OUTBOX_MAX = 4096


class TrainerSession:
    """A process' tenure of one rank, for as long as its stream lasts.

    Args:
        number: as the registry gave it.
        in_flight: steps that may be under way at once.
    """

    def __init__(self, job: str, rank: int, number: int, world_size: int, in_flight: int) -> None:
        self.job = job
        self.rank = rank
        self.number = number
        self.world_size = world_size
        self.in_flight = in_flight
        #: By loan: the trainer may be copying into them.
        self.held: dict[str, Segment] = {}
        #: Segments that it has sealed and whose steps are not under way yet, since what it says of them is being read.
        self.sealing = 0
        #: Another process has the place, its steps were deleted, or the stream has ended: it gets no memory any more.
        self.over = False
        #: A reservation that is not answered yet.
        self.reserving: asyncio.Task[None] | None = None
        self._outbox: dict[Hashable, tpb.DaemonMessage] = {}
        self._filled = asyncio.Event()
        self._ended = False

    def offer(self, segment: Segment) -> None:
        """Lend a segment to the trainer."""
        segment_id = secrets.token_hex(16)
        self.held[segment_id] = segment
        ref = tpb.SegmentRef(path=str(segment.path), bytes=segment.size_bytes)
        self._post(
            ("segment", segment_id),
            tpb.DaemonMessage(segment=tpb.OfferedSegment(segment_id=segment_id, segment=ref)),
        )

    def holds(self, size_bytes: int) -> bool:
        """Whether the trainer has a segment of that size to fill."""
        return any(segment.size_bytes >= size_bytes for segment in self.held.values())

    def tell_opened(self) -> None:
        """The first message."""
        self._post("opened", tpb.DaemonMessage(opened=tpb.Opened(session=self.number)))

    def tell_reserved(self, reserved: tpb.Reserved) -> None:
        """What is set aside."""
        self._post("reserved", tpb.DaemonMessage(reserved=reserved))

    def follow(self, save: Save) -> None:
        """Tell of a save from now on."""
        save.on_change = self._tell_progress
        self._tell_progress(save)

    def _tell_progress(self, save: Save) -> None:
        self.tell_progress(save.report())

    def tell_progress(self, progress: tpb.SaveProgress) -> None:
        """Where a step stands."""
        self._post(("step", progress.session, progress.step), tpb.DaemonMessage(progress=progress))

    def refuse(self, error: FastCheckdError, step: int | None = None, session: int = 0) -> None:
        """A step, or without one the reservation, comes to nothing."""
        refused = tpb.Refused(step=step, session=session or self.number, error=detail(error))
        self._post(("refused", refused.session, step), tpb.DaemonMessage(refused=refused))

    def fence(self, error: FastCheckdError) -> None:
        """It is over. Steps that it sealed are still told of."""
        if not self.over:
            self.over = True
            self._post("fenced", tpb.DaemonMessage(fenced=tpb.Fenced(error=detail(error))))

    def _post(self, key: Hashable, message: tpb.DaemonMessage) -> None:
        if self._ended:
            return
        self._outbox.pop(key, None)  # what is told anew takes its turn anew
        self._outbox[key] = message
        self._filled.set()

    def check_read(self) -> None:
        """To be called with each message of the trainer.

        Raises:
            InvalidRequestError: it does not read what it asked for.
        """
        if len(self._outbox) > OUTBOX_MAX:
            raise InvalidRequestError("this trainer reads none of the answers to its messages")

    async def messages(self) -> AsyncIterator[tpb.DaemonMessage]:
        """What the trainer is told, in order, until `hang_up`."""
        while True:
            await self._filled.wait()
            while self._outbox:
                message = self._outbox.pop(next(iter(self._outbox)))
                message.clock_s = time.monotonic()
                yield message
            if self._ended:
                return
            self._filled.clear()

    def hang_up(self) -> None:
        """Nothing more is told; `messages` ends with what is there."""
        self._ended = True
        self._filled.set()
