"""The daemon's calls as functions with deadlines, each failing with an error of ours.

Two kinds of waiting: calls that are answered at once have a short deadline; calls that may rightly take
long (room for a save, a restore) wait as long as the daemon still shakes hands on a fresh connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from fastcheck_proto.v1 import trainer_pb2 as pb

from .connection import Connection, Link, translate
from .errors import DaemonUnavailableError, FastCheckError

T = TypeVar("T")

#: First attempt to find the daemon, and the ones right after it could not be found.
CONNECT_S = 1.0
RECONNECT_S = 0.3
#: For what has no training waiting behind it and fails if the daemon is only busy: reading, listing.
PATIENT_CONNECT_S = 5.0
#: Calls that the daemon answers from memory.
_PROMPT_S = 5.0
#: A trainer that ends waits no longer for that to be noted.
_CLOSE_S = 2.0
#: A watch is quiet while a step is on its way; asking again this often finds a daemon that hangs.
_WATCH_S = 60.0
#: A long call is left alone for this long, and then between two looks whether the daemon lives.
_GUARD_INTERVAL_S = 1.0
_WHOM = "the daemon on this node"


class Daemon:
    """One daemon, over whatever link is good. Safe to use from several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def local(self) -> bool:
        """Whether it is on this machine."""
        return self._connection.address.local

    def connect(self, connect_s: float) -> None:
        """Find the daemon; raises DaemonUnavailableError when it is not there."""
        self._connection.link(connect_s)

    def open_session(
        self, request: pb.OpenSessionRequest, *, connect_s: float, timeout_s: float
    ) -> pb.OpenSessionResponse:
        """Take the rank's place; repeating it is harmless."""
        return self._ask(lambda link: link.trainer.OpenSession(request, timeout=timeout_s), connect_s)

    def close_session(self, request: pb.CloseSessionRequest) -> None:
        """Say that the rank's trainer is done; not over a link that would have to be made first."""
        if self._connection.connected:
            self._ask(lambda link: link.trainer.CloseSession(request, timeout=_CLOSE_S), RECONNECT_S, tries=1)

    def begin_save(
        self, request: pb.BeginSaveRequest, *, connect_s: float, timeout_s: float
    ) -> pb.BeginSaveResponse:
        """Reserve a segment; waits while too many steps are in flight."""

        def ask(link: Link) -> pb.BeginSaveResponse:
            call = link.trainer.BeginSave.future(request, timeout=timeout_s)
            with self.guarded(link, call):
                return call.result()

        return self._ask(ask, connect_s)

    def seal_save(self, request: pb.SealSaveRequest) -> None:
        """Hand the filled segment over."""
        self._ask(lambda link: link.trainer.SealSave(request, timeout=_PROMPT_S), CONNECT_S, tries=1)

    def abandon_save(self, save_id: str) -> None:
        """Give a segment back."""
        request = pb.AbandonSaveRequest(save_id=save_id)
        self._ask(lambda link: link.trainer.AbandonSave(request, timeout=CONNECT_S), RECONNECT_S, tries=1)

    def watch_save(self, request: pb.WatchSaveRequest) -> Iterator[pb.WatchSaveResponse]:
        """Follow a save; ends or fails like the stream does, latest after a minute of silence."""
        with self.errors(CONNECT_S) as link:
            yield from link.trainer.WatchSave(request, timeout=_WATCH_S)

    def list_steps(
        self, request: pb.ListStepsRequest, *, connect_s: float, timeout_s: float
    ) -> pb.ListStepsResponse:
        """Steps that can be loaded, oldest first."""
        return self._ask(lambda link: link.trainer.ListSteps(request, timeout=timeout_s), connect_s)

    def delete(
        self, request: pb.TrainerServiceDeleteRequest, *, connect_s: float, timeout_s: float
    ) -> pb.TrainerServiceDeleteResponse:
        """Have committed steps kept no more; repeating it is harmless."""
        return self._ask(lambda link: link.trainer.Delete(request, timeout=timeout_s), connect_s)

    def _ask(self, call: Callable[[Link], T], connect_s: float, tries: int = 2) -> T:
        """Make a call; one that meets a link gone stale is made again over a fresh one."""
        for _ in range(tries - 1):
            if not self._connection.connected:
                break
            try:
                with self.errors(connect_s) as link:
                    return call(link)
            except DaemonUnavailableError:
                if self._connection.connected:
                    raise  # it lives, but was too slow
        with self.errors(connect_s) as link:
            return call(link)

    @contextmanager
    def errors(self, connect_s: float) -> Iterator[Link]:
        """A link to make calls on; their failures become ours, and a dead link is given up."""
        link = self._connection.link(connect_s)
        try:
            yield link
        except grpc.RpcError as error:
            found = translate(error, _WHOM)
            if isinstance(found, DaemonUnavailableError):
                self._give_up(link, error)
            raise found from None
        except FastCheckError:
            raise
        except (grpc.FutureCancelledError, ValueError) as error:
            # What gRPC raises for calls on a channel that another thread gave up.
            self._connection.drop(link)
            raise DaemonUnavailableError(f"{_WHOM} went away during a call") from error

    def _give_up(self, link: Link, error: grpc.RpcError) -> None:
        assert isinstance(error, grpc.Call)
        too_slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # Dropping a link cancels the calls of other threads: not for one call that took too long.
        if not (too_slow and self._connection.alive(link)):
            self._connection.drop(link)

    @contextmanager
    def guarded(self, link: Link, call: Any) -> Iterator[None]:
        """While inside, cancel `call` as soon as the daemon does not even shake hands any more."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_GUARD_INTERVAL_S):
                if not self._connection.alive(link):
                    call.cancel()
                    return

        guard = threading.Thread(target=look, name="fastcheck-guard", daemon=True)
        guard.start()
        try:
            yield
        finally:
            over.set()

    def close(self) -> None:
        """Drop the link; running calls fail."""
        self._connection.close()
