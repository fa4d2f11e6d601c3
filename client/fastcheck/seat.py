"""This process' seat: one rank of a job, taken from the daemon for as long as the process lives.

    none ── take ──▶ session ── fenced, or a load ──▶ ended ── take ──▶ another session, if nobody took the place since
                                                                 └────▶ FencedError: a newer process has it

A session ends while its process lives when a newer process takes the place, or when the newest step of the job is
deleted. Only the registry can tell one from the other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid

from fastcheck_proto.v1 import trainer_pb2 as pb

from .config import Identity
from .daemon import CONNECT_S, Daemon
from .errors import DaemonUnavailableError, FastCheckError
from .transport import Patience

logger = logging.getLogger("fastcheck")

#: A daemon that may just be starting is looked for during this long, where the caller can wait.
_START_S = 3.0


class Seat:
    """A rank's daemon and session. Used under the Checkpointer's lock."""

    def __init__(
        self, identity: Identity, daemon: Daemon, timeout_s: float, closing: threading.Event
    ) -> None:
        self.job = identity.job
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.daemon = daemon
        #: Longest wait for the registry.
        self.timeout_s = timeout_s
        #: Set once, when the Checkpointer is closed.
        self.closing = closing
        #: Guards what follows: the end of a session is found out by whoever follows a save.
        self._ending = threading.Lock()
        self.client_id = uuid.uuid4().hex
        self._session: int | None = None
        #: The last session has ended, and there is no other one yet.
        self._fenced = False
        #: The session that the next one is to follow, of this process as well.
        self._renews = 0
        #: Nothing was saved in the session, and it was opened to load. Used under the Checkpointer's lock.
        self._fresh = False

    def find_daemon(self) -> None:
        """Give a daemon that is just starting a moment; raises DaemonUnavailableError after it."""
        until = time.monotonic() + min(_START_S, self.timeout_s)
        while True:
            try:
                self.daemon.connect(CONNECT_S)
            except DaemonUnavailableError:
                if time.monotonic() >= until:
                    raise
                self.closing.wait(0.2)
            else:
                return

    def leave(self) -> None:
        """Say that this process is done with the rank, if anybody is there to hear it."""
        session = self._session or self._renews
        if session:
            request = pb.CloseSessionRequest(job=self.job, rank=self.rank, session=session)
            # Unheard, its job counts as running: then deleting its newest step takes an explicit word.
            with contextlib.suppress(FastCheckError):
                self.daemon.close_session(request)

    def fenced(self, session: int) -> None:
        """The registry holds a session to be over. May be called from any thread."""
        with self._ending:
            if session == self._session:
                self._session, self._fenced = None, True

    def take(self, patience: Patience) -> int:
        """The session to save in; the first call gets it, through the registry, and the first one after it has ended.

        Raises:
            FencedError: a newer process has had the place since.
        """
        session = self._take(patience, loads=False)
        self._fresh = False
        return session

    def take_to_load(self, patience: Patience) -> None:
        """Have a session from which on no step is committed that any rank of the job has begun before.

        A session in which something was saved is followed by a new one: what is not committed of it is void. Not where
        there is one rank only: no other one could load another step, or save its part of the same one anew.

        Raises:
            FencedError: a newer process has had the place since.
        """
        with self._ending:
            if self._session is not None and not self._fresh and self.world_size > 1:
                self._renews, self._session = self._session, None
        self._take(patience, loads=True)

    def _take(self, patience: Patience, *, loads: bool) -> int:
        with self._ending:
            session, fenced, renews = self._session, self._fenced, self._renews
        if session is not None:
            return session
        request = pb.OpenSessionRequest(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            client_id=self.client_id,
            again=fenced or renews > 0,
            loads=loads or renews > 0,
            renews=renews,
        )
        opened = self.daemon.open_session(request, connect_s=patience.connect_s, timeout_s=patience.timeout_s)
        with self._ending:
            self._session, self._fenced, self._renews = opened.session, False, 0
        self._fresh = loads
        if fenced:
            logger.warning(
                "rank %d of job %s has a new session: steps of the job were deleted, which ended the one before; what "
                "it had not committed by then is void",
                self.rank,
                self.job,
            )
        return opened.session
