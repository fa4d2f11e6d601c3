"""This process' session: one rank of a job, held through a stream to the daemon for as long as the process lives.

    none ── take ──▶ open ── fenced, or a load ──▶ over ── take ──▶ another session, if nobody took the place since
                      │ ▲                                     └────▶ FencedError: a newer process has it
                 cut  ▼ │ the same session
                    lost

A session ends while its process lives when a newer process takes the place, or when the newest step of the job is
deleted. Only the registry can tell one from the other. A stream that breaks says nothing about the session: it is
opened again in the background (`session_stream`), and the steps that have no verdict yet are said to be sealed once
more.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable

from fastcheck_proto.v1 import trainer_pb2 as pb

from .config import RankConfig
from .daemon import CONNECT_S, Daemon
from .errors import ClosedError, DaemonUnavailableError, FastCheckError, FencedError, from_code
from .handle import PendingSteps, SaveHandle
from .session_memory import HeldSegment, LentMemory
from .session_stream import Stream, StreamKeeper, StreamLostError, copy_of
from .transport import Staged

logger = logging.getLogger("fastcheck")

#: Taking the rank's place goes through the registry, which may just be choosing a leader. Training waits for so long,
#: once.
_TAKE_S = 5.0
#: How long somebody waits for a segment, and how long nothing is heard of a step, before the session looks whether the
#: daemon lives.
_WAIT_S = 1.0
_QUIET_S = 60.0
#: A trainer that ends waits no longer for that to be noted.
_CLOSE_S = 2.0


class Session:
    """A rank's place, its memory and its steps under way. Safe to use from several threads."""

    def __init__(self, identity: RankConfig, daemon: Daemon, timeout_s: float, max_in_flight: int) -> None:
        self.job = identity.job
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.daemon = daemon
        #: Longest wait for the registry, and for a segment.
        self.timeout_s = timeout_s
        #: Called with each segment that is lent to this process, to have it made ready.
        self.offered: Callable[[pb.SegmentRef], None] = lambda _: None
        self.client_id = uuid.uuid4().hex
        self._max_in_flight = max_in_flight
        #: Guards what follows; notified at every change.
        self._changed = threading.Condition()
        self._keeper = StreamKeeper(daemon, self._changed, self)
        self._number = 0
        #: How the next stream is to be opened: the session before it is over, is to be followed by one to load in, ...
        self._fenced = False
        self._renews = 0
        self._loads = False
        #: Nothing was saved in the session, and it was opened to load.
        self._fresh = False
        self._lent = LentMemory(self._changed, self._goes_on, timeout_s)
        self._pending = PendingSteps()
        self._heard_at = 0.0
        #: By the daemon's clock, when the session was opened.
        self._opened_s = 0.0

    # --- the place -------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the session that is open, or was last; 0: none was."""
        return self._number

    @property
    def is_open(self) -> bool:
        """Whether steps can be sealed now."""
        return self._keeper.is_open

    def take(self) -> None:
        """Have a session to save in; the first call gets it, through the registry, and the first one after it ended.

        While daemon or registry are away it fails at once, but for the first time: attempts go on in the background.

        Raises:
            FencedError: a newer process has had the place since.
            DaemonUnavailableError, RegistryUnavailableError, ...: there is none now.
        """
        with self._changed:
            self._take(loads=False, now=False)
            self._fresh = False

    def take_to_load(self) -> None:
        """Have a session from which on no step is committed that any rank of the job has begun before.

        A session in which something was saved is followed by a new one: what is not committed of it is void. Not where
        there is one rank only: no other one could load another step, or save its part of the same one anew.

        Raises:
            FencedError: a newer process has had the place since.
        """
        with self._changed:
            had = self._number and not self._fenced
            if had and not self._fresh and self.world_size > 1:
                self._renews = self._number
                self._keeper.end_stream()
            self._take(loads=True, now=True)

    def take_again(self) -> None:
        """As `take`, for who can wait: the daemon is asked now."""
        with self._changed:
            self._take(loads=False, now=True)
            self._fresh = False

    def _take(self, *, loads: bool, now: bool) -> None:
        keeper = self._keeper
        self._check_open()
        if keeper.is_open and not self._fenced:
            return
        if self._fenced and keeper.stream is not None:
            keeper.end_stream()
        self._loads = loads
        keeper.open(CONNECT_S + min(_TAKE_S, self.timeout_s), now=now)

    def _check_open(self) -> None:
        if self._keeper.closed:
            raise ClosedError("this Checkpointer is closed: make a new one")

    # --- for the keeper of the stream: under the lock, but for `on_message` -----------------------

    def opening(self) -> pb.OpenSession:
        """The first message of the next stream."""
        return pb.OpenSession(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            client_id=self.client_id,
            again=self._number > 0,
            loads=self._loads or self._renews > 0,
            renews=self._renews,
            max_in_flight=self._max_in_flight,
            session=0 if self._fenced else self._number,
        )

    def overdue(self, now: float) -> bool:
        """Whether a segment or news of a step is waited for so long that the daemon may be gone."""
        since = self._lent.waiting_since
        waits = since is not None and now - since > _WAIT_S
        return waits or (bool(self._pending) and now - self._heard_at > _QUIET_S)

    def _goes_on(self, stream: Stream) -> bool:
        """Whether something may still come of what was asked for on a stream."""
        self._check_open()
        return self._keeper.stream is stream and not self._fenced

    def on_alive(self, now: float) -> None:
        """The daemon lives, though it has nothing to say."""
        self._heard_at = now

    def on_lost(self) -> None:
        """The stream has ended, and with it all loans."""
        self._lent.drop()

    def on_given_up(self, error: FastCheckError) -> None:
        """Nobody will say what becomes of the steps under way."""
        self._fenced = self._fenced or isinstance(error, FencedError)
        self._pending.fail(lambda: copy_of(error))

    def on_message(self, stream: Stream, message: pb.DaemonMessage) -> None:
        """The daemon says something; on the stream's thread, and without the lock."""
        now = time.monotonic()
        kind = message.WhichOneof("event")
        with self._changed:
            if self._keeper.stream is not stream or self._keeper.closed:
                return
            self._keeper.clock.note(message.clock_s, now)
            self._heard_at = now
            if kind == "opened":
                self._on_opened(stream, message.opened, self._keeper.clock.at(now))
            elif kind == "segment":
                offered = message.segment
                held = HeldSegment(offered.segment_id, offered.segment, stream, self._number)
                self._lent.held.append(held)
            elif kind == "reserved":
                self._lent.on_reserved(message.reserved)
            elif kind == "progress":
                fenced = self._pending.on_progress(message.progress)
                if fenced and message.progress.session == self._number:
                    self._on_fenced()
            elif kind == "refused":
                self._on_refused(message.refused)
            elif kind == "fenced":
                self._on_fenced()
            self._changed.notify_all()
        if kind == "segment":
            self.offered(message.segment.segment)

    def _on_opened(self, stream: Stream, opened: pb.Opened, clock_s: float) -> None:
        if self._fenced and self._number and opened.session != self._number:
            logger.warning(
                "rank %d of job %s has a new session: steps of the job were deleted, which ended the one before; what "
                "it had not committed by then is void",
                self.rank,
                self.job,
            )
        if opened.session != self._number:
            self._fresh = self._loads
        self._number = opened.session
        self._opened_s = clock_s
        self._fenced, self._renews, self._loads = False, 0, False
        self._keeper.on_opened()
        for sealed in self._pending.sealed_again():
            stream.post(pb.TrainerMessage(sealed=sealed))
        self._lent.ask_again(stream)

    def _on_refused(self, refused: pb.Refused) -> None:
        error = from_code(refused.error.code, refused.error.message)
        if not refused.HasField("step"):
            self._lent.refused = error
            return
        if not self._pending.refuse(refused.session, refused.step, error):
            self._lent.refused_steps[refused.step] = error
        if isinstance(error, FencedError) and refused.session == self._number:
            self._on_fenced()

    def _on_fenced(self) -> None:
        """The session is over. What it has sealed is still followed, until the next one is taken."""
        self._fenced = True
        self._lent.drop()

    # --- memory ----------------------------------------------------------------------------------

    def reserve(self, state_bytes: int, record_bytes: int) -> pb.Reserved:
        """Have memory set aside for states of this size; returns when the daemon has said how much.

        Raises:
            OutOfMemoryError: it does not fit.
            FastCheckError: nobody could say.
        """
        self.take_again()
        with self._changed:
            return self._lent.reserve(self._require_stream(), state_bytes, record_bytes)

    def wait_held(self, count: int, deadline: float) -> list[HeldSegment]:
        """The segments that this process holds, once there are so many, or at the deadline; raises as `reserve`."""
        with self._changed:
            return self._lent.wait_held(self._require_stream(), count, deadline)

    def segment(self, state_bytes: int, record_bytes: int, step: int) -> tuple[HeldSegment, float]:
        """A segment to fill with a step; and how long it was waited for, in seconds.

        Raises:
            OutOfMemoryError: there is no memory for it.
            FastCheckError: there is none in time.
        """
        began = time.monotonic()
        deadline = began + self._lent.timeout_s
        while True:
            self.take()
            with self._changed:
                self._pending.check_new(self._number, step)
                found = self._lent.pick(state_bytes + record_bytes)
                if found is not None:
                    return found, 0.0
                try:
                    found = self._lent.wait_for_one(
                        self._require_stream(), state_bytes, record_bytes, step, deadline
                    )
                except StreamLostError:
                    # The daemon restarted, or the session is over: the next one has another segment.
                    if time.monotonic() < deadline:
                        continue
                    raise
                return found, time.monotonic() - began

    def _require_stream(self) -> Stream:
        stream = self._keeper.stream
        if stream is None or not self._keeper.is_open or self._fenced:
            raise StreamLostError("the session's stream was lost")
        return stream

    def give_back(self, held: HeldSegment) -> None:
        """A segment will not be sealed: the next step gets it. Nobody writes to it any more."""
        with self._changed:
            if held.stream is self._keeper.stream and held.session == self._number and not self._fenced:
                self._lent.held.insert(0, held)
                self._changed.notify_all()

    # --- sealed ----------------------------------------------------------------------------------

    def begun(self) -> Callable[[], float]:
        """To be called when a save begins: what it returns says when that was, by the daemon's clock, never too late.

        Before there is a session nothing can have been loaded since it was opened, so that moment will do. 0: it is not
        known, since the stream was lost just then.
        """
        if now_s := self._keeper.clock.at(time.monotonic()):
            return lambda: now_s
        return (lambda: 0.0) if self._number else (lambda: self._opened_s)

    def seal(
        self,
        held: HeldSegment,
        sealed: pb.Sealed,
        handle: SaveHandle,
        staged: Staged,
        record: Callable[[bytes], None] | None,
    ) -> None:
        """Hand a filled segment over and return: the handle is told what becomes of it.

        Args:
            record: writes the record of the seal into the segment, where the daemon looks if this process dies.

        Raises:
            NotNewerError: the step is under way already.
            DaemonUnavailableError: the daemon that lent it has gone.
            FencedError: the session has ended meanwhile.
        """
        with self._changed:
            self._check_open()
            if held.session == self._number and self._fenced:
                raise FencedError(
                    "the session ended while the state was copied; the next save goes on in a new one"
                )
            if held.stream is not self._keeper.stream:
                raise DaemonUnavailableError(
                    "the daemon restarted, or its stream broke, while the state was copied: this step is not saved, "
                    "the next one can be"
                )
            self._pending.check_new(held.session, sealed.step)
            handle._stage(staged.waited_s, staged.stage_s, staged.lazy_bytes, self._lent.contract)
            self._pending.add(held.session, sealed, handle)
            self._heard_at = time.monotonic()
            if record is not None:
                record(sealed.SerializeToString())
            held.stream.post(pb.TrainerMessage(sealed=sealed))

    def wait_heard(self, handle: SaveHandle) -> None:
        """Returns when the daemon has said anything of a sealed step, or has not for a while."""
        with self._changed:
            self._changed.wait_for(lambda: handle._told or handle.done or self._keeper.closed, self.timeout_s)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Say that this process is done with the rank, if anybody is there to hear it; pending handles end."""
        keeper = self._keeper
        with self._changed:
            stream = keeper.stream
            keeper.closing = True
            heard = stream is not None and keeper.is_open and not self._fenced
            if stream is not None and heard:
                stream.post(pb.TrainerMessage(close=pb.CloseSession()))
        if stream is not None and heard:
            stream.ended.wait(_CLOSE_S)
        with self._changed:
            keeper.closed = True
            self._lent.drop()
            self._pending.close()
            self._changed.notify_all()
        self.cut()
        keeper.join(_CLOSE_S)
        if stream is not None and stream.thread is not threading.current_thread():
            stream.thread.join(_CLOSE_S)

    def cut(self) -> None:
        """End threads and stream without a word, and without waiting."""
        self._keeper.cut()
