"""The daemon's calls as functions with deadlines, each failing with an error of ours.

Calls that may rightly take long (an upload, a restore) wait as long as the daemon still shakes hands on a fresh
connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from fastcheck_proto.v1 import trainer_pb2 as pb

from .connection import Address, Link, connect, is_alive, translate
from .errors import ClosedError, DaemonUnavailableError, FastCheckError

T = TypeVar("T")

#: First attempt to find the daemon, and the ones right after it could not be found.
CONNECT_S = 1.0
RECONNECT_S = 0.3
#: For what has no training waiting behind it and fails if the daemon is only busy: reading, listing.
PATIENT_CONNECT_S = 5.0
#: A daemon that may just be starting is looked for during this long, where the caller can wait.
_START_S = 3.0
_START_PAUSE_S = 0.2
#: A long call is left alone for this long, and then between two looks whether the daemon lives.
_GUARD_INTERVAL_S = 1.0
WHOM = "the daemon on this node"


class Daemon:
    """One daemon. A link to it is used until a call shows that it is gone, then it is found anew.

    Safe to use from several threads.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False

    @property
    def local(self) -> bool:
        """Whether it is on this machine."""
        return self._address.local

    def find(self, timeout_s: float) -> None:
        """Give a daemon that is just starting a moment; raises DaemonUnavailableError after it."""
        until = time.monotonic() + min(_START_S, timeout_s)
        while True:
            try:
                self.link(CONNECT_S)
            except DaemonUnavailableError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_START_PAUSE_S)
            else:
                return

    def link(self, connect_s: float) -> Link:
        """The link, made within about `connect_s` if there is none.

        Raises:
            DaemonUnavailableError: it is not there.
            ClosedError: after close().
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this Checkpointer is closed: make a new one")
            if self._link is None:
                self._link = connect(self._address, connect_s)
            return self._link

    def drop(self, link: Link) -> None:
        """Give up a link: the next use finds the daemon anew. Calls that still run on it are cancelled."""
        with self._lock:
            if self._link is link:
                self._link = None
        link.channel.close()

    def upload(self, requests: Iterator[pb.UploadRequest], *, connect_s: float, timeout_s: float) -> int:
        """Send bytes into a segment; returns how many the daemon has."""
        with self.errors(connect_s) as link:
            call = link.trainer.Upload.future(requests, timeout=timeout_s)
            with self.guarded(link, call):
                return int(call.result().bytes)

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

    def _ask(self, call: Callable[[Link], T], connect_s: float) -> T:
        """Make a call; one that meets a link gone stale is made again over a fresh one."""
        if self._link is not None:
            try:
                with self.errors(connect_s) as link:
                    return call(link)
            except DaemonUnavailableError:
                if self._link is not None:
                    raise  # it lives, but was too slow
        with self.errors(connect_s) as link:
            return call(link)

    @contextmanager
    def errors(self, connect_s: float) -> Iterator[Link]:
        """A link to make calls on; their failures become ours, and a dead link is given up."""
        link = self.link(connect_s)
        try:
            yield link
        except grpc.RpcError as error:
            found = translate(error, WHOM)
            if isinstance(found, DaemonUnavailableError):
                self._give_up(link, error)
            raise found from None
        except FastCheckError:
            raise
        except (grpc.FutureCancelledError, ValueError) as error:
            # What gRPC raises for calls on a channel that another thread gave up.
            self.drop(link)
            raise DaemonUnavailableError(f"{WHOM} went away during a call") from error

    def _give_up(self, link: Link, error: grpc.RpcError) -> None:
        assert isinstance(error, grpc.Call)
        too_slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # Dropping a link cancels the calls of other threads: not for one call that took too long.
        if not (too_slow and is_alive(link)):
            self.drop(link)

    @contextmanager
    def guarded(self, link: Link, call: Any) -> Iterator[None]:
        """While inside, cancel `call` as soon as the daemon does not even shake hands any more."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_GUARD_INTERVAL_S):
                if not is_alive(link):
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
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.channel.close()
