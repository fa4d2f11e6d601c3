"""The stream to the daemon that a session holds, opened again when it breaks, for as long as somebody needs it.

Two threads: one keeps the stream (`StreamKeeper`), the other one reads it (`Stream`). Training waits for neither, but
for the first stream. A stream that breaks says nothing about the session that it carried.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from fastcheck_proto.v1 import trainer_pb2 as pb

from .connection import Link, is_alive, translate
from .daemon import CONNECT_S, RECONNECT_S, WHOM, Daemon
from .errors import ClosedError, DaemonUnavailableError, FastCheckError, RegistryUnavailableError

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger("fastcheck")

#: A daemon that has not opened a session within this does not.
_OPEN_S_MAX = 12.0
#: Between two attempts to reach a daemon or a registry that is away.
_PAUSE_S_MIN = 0.25
_PAUSE_S_MAX = 1.0
#: A daemon that is away for longer than this does not come back in time to matter for steps without a verdict.
_AWAY_S_MAX = 30.0
#: Between two looks whether a stream makes its user wait.
_GUARD_INTERVAL_S = 1.0
#: Two clocks of whole machines go apart by at most this share of the time, both being slewed by NTP at its limit.
_DRIFT = 1e-3


class StreamLostError(DaemonUnavailableError):
    """The stream ended while something was waited for on it."""


class DaemonClock:
    """The daemon's clock, never too late: it is told by the message that was least delayed."""

    def __init__(self) -> None:
        #: By the daemon's clock, and by ours when that came.
        self._known = (0.0, 0.0)

    def note(self, clock_s: float, now: float) -> None:
        """A message says what it is."""
        self._known = max((clock_s, now), self._known, key=lambda known: _clock_at(known, now))

    def at(self, now: float) -> float:
        """What it is at a moment of ours; 0: not known."""
        return _clock_at(self._known, now)


def _clock_at(known: tuple[float, float], now: float) -> float:
    clock_s, at = known
    return clock_s + (now - at) * (1 - _DRIFT) if clock_s else 0.0


class Stream:
    """Begins when it is made.

    Args:
        link: the daemon.
        opening: the first message.
        on_message: called with each answer, on the reader's thread.
        on_end: called once, likewise, with why it ended.
    """

    def __init__(
        self,
        link: Link,
        opening: pb.OpenSession,
        on_message: Callable[[Stream, pb.DaemonMessage], None],
        on_end: Callable[[Stream, FastCheckError], None],
    ) -> None:
        self.link = link
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: queue.SimpleQueue[pb.TrainerMessage | None] = queue.SimpleQueue()
        self._outgoing.put(pb.TrainerMessage(open=opening))
        #: The daemon cannot be reached over this link any more.
        self.broken = False
        #: Set when nothing more comes, and `on_end` was told.
        self.ended = threading.Event()
        try:
            self._call = link.trainer.Session(iter(self._outgoing.get, None))
        except ValueError as error:  # gRPC's, of a channel that another thread gave up
            raise DaemonUnavailableError(f"{WHOM} went away") from error
        self.thread = threading.Thread(target=self._read, name="fastcheck-session-reader", daemon=True)
        self.thread.start()

    def post(self, message: pb.TrainerMessage) -> None:
        """Send a message, in order; returns at once."""
        self._outgoing.put(message)

    def cut(self) -> None:
        """End it now. What was posted and not sent is lost."""
        self._call.cancel()

    def _read(self) -> None:
        error: FastCheckError
        try:
            for message in self._call:
                self._on_message(self, message)
            error = DaemonUnavailableError(f"{WHOM} ended the session's stream")
        except grpc.RpcError as found:
            error = translate(found, WHOM)
            self.broken = isinstance(error, DaemonUnavailableError)
        except FastCheckError as found:
            error = found
        except Exception as found:
            logger.exception("a session met a defect in FastCheck")
            error = FastCheckError(f"defect in FastCheck while reading a session's stream: {found!r}")
            self._call.cancel()
        self._outgoing.put(None)
        self._on_end(self, error)
        self.ended.set()


class StreamKeeper:
    """Keeps one stream. Its fields and methods are used under `changed`, the session's lock, which it notifies.

    Args:
        daemon: to whom.
        changed: guards the session.
        session: says how the next stream is to be opened, and is told what becomes of this one.
    """

    def __init__(self, daemon: Daemon, changed: threading.Condition, session: Session) -> None:
        self._daemon = daemon
        self._changed = changed
        self._session = session
        self._thread: threading.Thread | None = None
        self.stream: Stream | None = None
        #: The daemon has answered the stream's first message.
        self.is_open = False
        self.clock = DaemonClock()
        #: Nobody asks for a stream any more; everything is over.
        self.closing = self.closed = False
        #: Somebody has asked for a stream, and no error has said that asking again would not help.
        self._wanted = False
        #: What the last attempt failed with, how many have, and when the next one may be made.
        self._error: FastCheckError | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._pause_s = 0.0
        self._lost_at: float | None = None

    def open(self, wait_s: float, *, now: bool) -> None:
        """Returns when there is an open stream. Attempts go on in the background when it raises.

        Args:
            now: ask the daemon also where the last attempt did not find it, or its registry.

        Raises:
            FastCheckError: why there is none.
        """
        self._wanted = True
        if isinstance(self._error, DaemonUnavailableError | RegistryUnavailableError) and not now:
            raise copy_of(self._error)
        self._retry_at = 0.0
        failures = self._failures
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="fastcheck-session", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        self._changed.wait_for(lambda: self.is_open or self.closed or self._failures > failures, wait_s)
        if self.is_open:
            return
        if self.closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        if self._failures > failures and self._error is not None:
            raise copy_of(self._error)
        raise DaemonUnavailableError(
            "the daemon on this node did not open a session in time: it hangs, is overloaded, or its registry does "
            "not answer"
        )

    def on_opened(self) -> None:
        """The daemon has opened the session."""
        self.is_open = True
        self._error, self._pause_s, self._retry_at, self._lost_at = None, 0.0, 0.0, None

    def end_stream(self) -> None:
        """End the stream, on purpose; the next one is for another session."""
        stream, self.stream, self.is_open = self.stream, None, False
        self._session.on_lost()
        if stream is not None:
            stream.cut()

    def cut(self) -> None:
        """End threads and stream without a word, and without waiting. Without the lock."""
        with self._changed:
            self.closed = True
            stream, self.stream = self.stream, None
            self._changed.notify_all()
        if stream is not None:
            stream.cut()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread that keeps the stream, after `cut`. Without the lock."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or self._is_due(), self._until_due_s())
                if self.closed:
                    return
                if not self._is_due():
                    continue
                opening = self._session.opening()
                connect_s = CONNECT_S if self._error is None else RECONNECT_S
            try:
                link = self._daemon.link(connect_s)
                with self._changed:
                    if self.closed:
                        return
                    self.clock = DaemonClock()
                    self.stream = stream = Stream(link, opening, self._session.on_message, self._on_end)
                self._guard(stream)
            except FastCheckError as error:
                self._failed(error)
            except Exception as error:
                # This thread must go on: without it no later save has a session.
                logger.exception("a session met a defect in FastCheck")
                self._failed(FastCheckError(f"defect in FastCheck while keeping a session: {error!r}"))

    def _is_due(self) -> bool:
        may_open = self._wanted and self.stream is None and not self.closing
        return may_open and time.monotonic() >= self._retry_at

    def _until_due_s(self) -> float | None:
        if self._wanted and self.stream is None:
            return max(0.01, self._retry_at - time.monotonic())
        return None

    def _guard(self, stream: Stream) -> None:
        """Until the stream ends: cut it if the daemon does not even shake hands any more."""
        began = time.monotonic()
        while not stream.ended.wait(_GUARD_INTERVAL_S):
            now = time.monotonic()
            with self._changed:
                if self.closed or self.stream is not stream:
                    return
                slow = not self.is_open and now - began > _OPEN_S_MAX
                overdue = self._session.overdue(now)
            if not slow and not overdue:
                continue
            if not is_alive(stream.link):
                self._daemon.drop(stream.link)
                stream.cut()
            elif slow:
                stream.cut()
            else:
                with self._changed:
                    self._session.on_alive(now)

    def _on_end(self, stream: Stream, error: FastCheckError) -> None:
        with self._changed:
            if self.stream is not stream:
                self._changed.notify_all()
                return  # ended on purpose
            was_open = self.is_open
            self.stream, self.is_open = None, False
            self._session.on_lost()
        if stream.broken:
            self._daemon.drop(stream.link)
        if was_open and isinstance(error, DaemonUnavailableError):
            with self._changed:
                # It may be back at once: the next attempt is made now.
                self._wanted = True
                self._retry_at = 0.0
                self._lost_at = time.monotonic()
                self._changed.notify_all()
        else:
            self._failed(error)

    def _failed(self, error: FastCheckError) -> None:
        with self._changed:
            now = time.monotonic()
            self.stream, self.is_open = None, False
            self._error = error
            self._failures += 1
            if isinstance(error, DaemonUnavailableError | RegistryUnavailableError):
                self._pause_s = min(max(_PAUSE_S_MIN, self._pause_s * 2), _PAUSE_S_MAX)
                self._retry_at = now + self._pause_s
                self._lost_at = now if self._lost_at is None else self._lost_at
                if now - self._lost_at > _AWAY_S_MAX:
                    self._session.on_given_up(error)
            else:
                # Somebody has to ask again: it will not be better by itself.
                self._wanted = False
                self._retry_at = 0.0
                self._session.on_given_up(error)
            self._changed.notify_all()


def copy_of(error: FastCheckError) -> FastCheckError:
    """The same error for another handle: an exception keeps the traceback of where it was raised last."""
    return type(error)(str(error))
