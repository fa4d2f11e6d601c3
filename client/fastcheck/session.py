"""This process' session: one rank of a job, held through one stream to the daemon for as long as the process lives.

    none ── take ──▶ open ── fenced, or a load ──▶ over ── take ──▶ another session, if nobody took the place since
                      │ ▲                                     └────▶ FencedError: a newer process has it
                 cut  ▼ │ the same session
                    lost

A session ends while its process lives when a newer process takes the place, or when the newest step of the job is
deleted. Only the registry can tell one from the other. A stream that breaks says nothing about the session: it is
opened again in the background, and the steps that have no verdict yet are said to be sealed once more.

Two threads: one keeps the stream (`_keep`), the other one reads it (`stream.Stream`). Training waits for neither, but
for a segment when it holds none.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable

from fastcheck_proto.v1 import trainer_pb2 as pb

from .config import RankConfig
from .daemon import CONNECT_S, RECONNECT_S, Daemon
from .errors import (
    ClosedError,
    DaemonUnavailableError,
    FastCheckError,
    FencedError,
    RegistryUnavailableError,
    SaveFailedError,
    from_code,
)
from .handle import SaveHandle
from .lent import HeldSegment, LentMemory
from .pending import PendingSteps
from .stream import Stream
from .transport import Staged

logger = logging.getLogger("fastcheck")

#: A daemon that may just be starting is looked for during this long, where the caller can wait.
_START_S = 3.0
#: Taking the rank's place goes through the registry, which may just be choosing a leader. Training waits for so long,
#: once.
_TAKE_S = 5.0
#: A daemon that has not opened a session within this does not.
_OPEN_S_MAX = 12.0
#: Between two attempts to reach a daemon or a registry that is away.
_PAUSE_S_MIN = 0.25
_PAUSE_S_MAX = 1.0
#: A daemon that is away for longer than this does not come back in time to matter for steps without a verdict.
_AWAY_S_MAX = 30.0
#: How long somebody waits for a segment, and how long nothing is heard of a step, before the session looks whether the
#: daemon lives.
_GUARD_INTERVAL_S = 1.0
_QUIET_S = 60.0
#: A trainer that ends waits no longer for that to be noted.
_CLOSE_S = 2.0
#: Two clocks of whole machines go apart by at most this share of the time, both being slewed by NTP at its limit.
_DRIFT = 1e-3


def _clock_at(known: tuple[float, float], now: float) -> float:
    """The daemon's clock at a moment of ours, never too late: what it said, and the time since that came. Pure."""
    clock_s, at = known
    return clock_s + (now - at) * (1 - _DRIFT) if clock_s else 0.0


class Session:
    """A rank's place, its memory and its steps under way. Safe to use from several threads.

    Args:
        offered: called with each segment that is lent to this process, to have it made ready.
    """

    def __init__(
        self,
        identity: RankConfig,
        daemon: Daemon,
        timeout_s: float,
        max_in_flight: int,
        offered: Callable[[pb.SegmentRef], None] = lambda _: None,
    ) -> None:
        self.job = identity.job
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.daemon = daemon
        #: Longest wait for the registry, and for a segment.
        self.timeout_s = timeout_s
        #: Called with each segment that is lent to this process.
        self.offered = offered
        self.client_id = uuid.uuid4().hex
        self._max_in_flight = max_in_flight
        #: Guards what follows; notified at every change.
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._keeper: threading.Thread | None = None
        self._stream: Stream | None = None
        #: The daemon has answered the stream's first message.
        self._open = False
        self._number = 0
        #: Somebody needs a session.
        self._wanted = False
        #: What the last attempt failed with, how many have, and when the next one may be made.
        self._error: FastCheckError | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._pause_s = 0.0
        self._lost_at: float | None = None
        #: How the next stream is to be opened: the session before it is over, is to be followed by one to load in, ...
        self._fenced = False
        self._renews = 0
        self._loads = False
        #: Nothing was saved in the session, and it was opened to load.
        self._fresh = False
        self._lent = LentMemory()
        self._pending = PendingSteps()
        #: Somebody has waited for a segment since then.
        self._waiting_since: float | None = None
        self._heard_at = 0.0
        #: The daemon's clock by the message that was least delayed, and when that came by ours; its clock when the
        #: session was opened.
        self._clock = (0.0, 0.0)
        self._opened_s = 0.0

    # --- the place -------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the session that is open, or was last; 0: none was."""
        return self._number

    @property
    def is_open(self) -> bool:
        """Whether steps can be sealed now."""
        return self._open

    def find_daemon(self) -> None:
        """Give a daemon that is just starting a moment; raises DaemonUnavailableError after it."""
        until = time.monotonic() + min(_START_S, self.timeout_s)
        while True:
            try:
                self.daemon.connect(CONNECT_S)
            except DaemonUnavailableError:
                if time.monotonic() >= until:
                    raise
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, 0.2)
            else:
                return

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
                self._end_stream()
            self._take(loads=True, now=True)

    def take_again(self) -> None:
        """As `take`, for who can wait: the daemon is asked now."""
        with self._changed:
            self._take(loads=False, now=True)
            self._fresh = False

    def _take(self, *, loads: bool, now: bool) -> None:
        if self._closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        if self._open and not self._fenced:
            return
        if self._fenced and self._stream is not None:
            self._end_stream()
        self._loads = loads
        self._wanted = True
        if isinstance(self._error, DaemonUnavailableError | RegistryUnavailableError) and not now:
            raise _copy(self._error)  # attempts go on in the background
        self._retry_at = 0.0
        failures = self._failures
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="fastcheck-session", daemon=True)
            self._keeper.start()
        self._changed.notify_all()
        wait_s = CONNECT_S + min(_TAKE_S, self.timeout_s)
        self._changed.wait_for(lambda: self._open or self._closed or self._failures > failures, wait_s)
        if self._open:
            return
        if self._closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        raise (
            _copy(self._error)
            if self._failures > failures
            else DaemonUnavailableError(
                "the daemon on this node did not open a session in time: it hangs, is overloaded, or its registry does "
                "not answer"
            )
        )

    def _end_stream(self) -> None:
        stream, self._stream, self._open = self._stream, None, False
        self._lent.drop()
        if stream is not None:
            stream.cut()

    # --- keeping the stream ----------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_due(), self._until_due_s())
                if self._closed:
                    return
                if not self._is_due():
                    self._fail_pending_if_away()
                    continue
                opening = self._opening()
                connect_s = CONNECT_S if self._error is None else RECONNECT_S
            try:
                link = self.daemon.link(connect_s)
                with self._changed:
                    if self._closed:
                        return
                    self._clock = (0.0, 0.0)
                    self._stream = stream = Stream(link, opening, self._on_message, self._on_end)
                self._guard(stream)
            except FastCheckError as error:
                self._failed(error)
            except Exception as error:
                # This thread must go on: without it no later save has a session.
                logger.exception("a session met a defect in FastCheck")
                self._failed(FastCheckError(f"defect in FastCheck while keeping a session: {error!r}"))

    def _is_due(self) -> bool:
        needed = self._wanted or (bool(self._pending) and not self._fenced)
        return self._stream is None and needed and not self._closing and time.monotonic() >= self._retry_at

    def _until_due_s(self) -> float | None:
        if self._stream is None and (self._wanted or self._pending):
            return max(0.01, self._retry_at - time.monotonic())
        return None

    def _opening(self) -> pb.OpenSession:
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

    def _guard(self, stream: Stream) -> None:
        """Until the stream ends: cut it if the daemon does not even shake hands any more."""
        began = time.monotonic()
        while not stream.ended.wait(_GUARD_INTERVAL_S):
            now = time.monotonic()
            with self._changed:
                if self._closed or self._stream is not stream:
                    return
                slow = not self._open and now - began > _OPEN_S_MAX
                waits = self._waiting_since is not None and now - self._waiting_since > _GUARD_INTERVAL_S
                quiet = bool(self._pending) and now - self._heard_at > _QUIET_S
            if (slow or waits or quiet) and not self.daemon.alive(stream.link):
                self.daemon.drop(stream.link)
                stream.cut()
            elif slow:
                stream.cut()
            elif quiet:
                self._heard_at = now

    def _on_end(self, stream: Stream, error: FastCheckError) -> None:
        with self._changed:
            if self._stream is not stream:
                self._changed.notify_all()
                return  # ended on purpose
            was_open = self._open
            self._stream, self._open = None, False
            self._lent.drop()
        if stream.broken:
            self.daemon.drop(stream.link)
        with self._changed:
            if was_open and isinstance(error, DaemonUnavailableError):
                # It may be back at once: the next attempt is made now.
                self._wanted = True
                self._retry_at = 0.0
                self._lost_at = time.monotonic()
                self._changed.notify_all()
                return
        self._failed(error)

    def _failed(self, error: FastCheckError) -> None:
        with self._changed:
            now = time.monotonic()
            self._stream, self._open = None, False
            self._error = error
            self._failures += 1
            away = isinstance(error, DaemonUnavailableError | RegistryUnavailableError)
            if away:
                self._pause_s = min(max(_PAUSE_S_MIN, self._pause_s * 2), _PAUSE_S_MAX)
                self._retry_at = now + self._pause_s
                self._lost_at = now if self._lost_at is None else self._lost_at
                self._fail_pending_if_away()
            else:
                # Somebody has to ask again: it will not be better by itself.
                self._wanted = False
                self._retry_at = 0.0
                if isinstance(error, FencedError):
                    self._fenced = True
                self._pending.fail(lambda: _copy(error))
            self._changed.notify_all()

    def _fail_pending_if_away(self) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > _AWAY_S_MAX and self._error:
            error = self._error
            self._pending.fail(lambda: _copy(error))

    # --- what the daemon says --------------------------------------------------------------------

    def _on_message(self, stream: Stream, message: pb.DaemonMessage) -> None:
        now = time.monotonic()
        kind = message.WhichOneof("event")
        with self._changed:
            if self._stream is not stream or self._closed:
                return
            self._clock = max((message.clock_s, now), self._clock, key=lambda clock: _clock_at(clock, now))
            self._heard_at = now
            if kind == "opened":
                self._on_opened(stream, message.opened)
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

    def _on_opened(self, stream: Stream, opened: pb.Opened) -> None:
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
        self._opened_s = self._clock[0]
        self._open = True
        self._fenced, self._renews, self._loads = False, 0, False
        self._error, self._pause_s, self._retry_at, self._lost_at = None, 0.0, 0.0, None
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
        deadline = time.monotonic() + self.timeout_s
        lent = self._lent
        with self._changed:
            stream = self._require_stream()
            lent.ask(stream, state_bytes, record_bytes)
            self._wait_for_news(
                stream, lambda: lent.refused is not None or lent.reserved is not None, deadline
            )
            # Said to be there, but not there yet: it is on its way, or will be refused.
            self._wait_for_news(stream, lambda: lent.refused is not None or bool(lent.held), deadline)
            if lent.refused is not None:
                raise lent.refused
            assert lent.reserved is not None
            return lent.reserved

    def wait_held(self, count: int, deadline: float) -> list[HeldSegment]:
        """The segments that this process holds, once there are so many, or at the deadline; raises as `reserve`."""
        with self._changed:
            stream = self._require_stream()
            with contextlib.suppress(DaemonUnavailableError):
                self._wait_for_news(
                    stream, lambda: len(self._lent.held) >= count or self._lent.refused is not None, deadline
                )
            if self._lent.refused is not None:
                raise self._lent.refused
            return list(self._lent.held)

    def segment(self, state_bytes: int, record_bytes: int, step: int) -> tuple[HeldSegment, float]:
        """A segment to fill with a step; and how long it was waited for, in seconds.

        Raises:
            OutOfMemoryError: there is no memory for it.
            FastCheckError: there is none in time.
        """
        size = state_bytes + record_bytes
        began = time.monotonic()
        deadline = began + self.timeout_s
        while True:
            self.take()
            with self._changed:
                self._pending.check_new(self._number, step)
                found = self._lent.pick(size)
                if found is not None:
                    return found, 0.0
                try:
                    self._wait_for_segment(state_bytes, record_bytes, step, deadline)
                except _StreamLostError:
                    # The daemon restarted, or the session is over: the next one has another segment.
                    if time.monotonic() < deadline:
                        continue
                    raise
                found = self._lent.pick(size)
                assert found is not None
                return found, time.monotonic() - began

    def _wait_for_segment(self, state_bytes: int, record_bytes: int, step: int, deadline: float) -> None:
        stream, lent = self._require_stream(), self._lent
        lent.ask(stream, state_bytes, record_bytes, step)

        def answered() -> bool:
            lent.abandon_below(state_bytes + record_bytes)
            return bool(lent.held) or step in lent.refused_steps

        self._wait_for_news(stream, answered, deadline)
        if step in lent.refused_steps:
            raise lent.refused_steps.pop(step)

    def _require_stream(self) -> Stream:
        if self._stream is None or not self._open or self._fenced:
            raise _StreamLostError("the session's stream was lost")
        return self._stream

    def _wait_for_news(self, stream: Stream, answered: Callable[[], bool], deadline: float) -> None:
        self._waiting_since = time.monotonic()
        try:
            self._changed.wait_for(
                lambda: answered() or self._stream is not stream or self._closed or self._fenced,
                max(0.0, deadline - time.monotonic()),
            )
        finally:
            self._waiting_since = None
        if answered():
            return
        if self._closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        if self._stream is not stream or self._fenced:
            raise _StreamLostError("the session's stream was lost")
        raise DaemonUnavailableError(
            f"the daemon on this node has no memory free for this step within {self.timeout_s:g} s: older steps are "
            "under way, or it hangs or is overloaded"
        )

    def give_back(self, held: HeldSegment) -> None:
        """A segment will not be sealed: the next step gets it. Nobody writes to it any more."""
        with self._changed:
            if held.stream is self._stream and held.session == self._number and not self._fenced:
                self._lent.held.insert(0, held)
                self._changed.notify_all()

    # --- sealed ----------------------------------------------------------------------------------

    def begun(self) -> Callable[[], float]:
        """To be called when a save begins: what it returns says when that was, by the daemon's clock, never too late.

        Before there is a session nothing can have been loaded since it was opened, so that moment will do. 0: it is not
        known, since the stream was lost just then.
        """
        if self._clock[0]:
            now_s = _clock_at(self._clock, time.monotonic())
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
            if self._closed:
                raise ClosedError("this Checkpointer is closed: make a new one")
            if held.session == self._number and self._fenced:
                raise FencedError(
                    "the session ended while the state was copied; the next save goes on in a new one"
                )
            if held.stream is not self._stream:
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
            self._changed.wait_for(lambda: handle._told or handle.done or self._closed, self.timeout_s)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Say that this process is done with the rank, if anybody is there to hear it; pending handles end."""
        with self._changed:
            stream, keeper = self._stream, self._keeper
            said = stream is not None and self._open and not self._fenced
            self._closing = True
            if said:
                assert stream is not None
                stream.post(pb.TrainerMessage(close=pb.CloseSession()))
        if said and stream is not None:
            stream.ended.wait(_CLOSE_S)
        with self._changed:
            self._closed = True
            self._lent.drop()
            self._pending.close()
            self._changed.notify_all()
        self.cut()
        for thread in (keeper, stream.thread if stream is not None else None):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=_CLOSE_S)

    def cut(self) -> None:
        """End threads and stream without a word, and without waiting."""
        with self._changed:
            self._closed = True
            stream, self._stream = self._stream, None
            self._changed.notify_all()
        if stream is not None:
            stream.cut()


class _StreamLostError(DaemonUnavailableError):
    """The stream ended while something was waited for on it."""


def _copy(error: FastCheckError | None) -> FastCheckError:
    """The same error for another handle: an exception keeps the traceback of where it was raised last."""
    return SaveFailedError("there is no session") if error is None else type(error)(str(error))
