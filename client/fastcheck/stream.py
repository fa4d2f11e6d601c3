"""One stream to the daemon: messages out of a queue, and answers read by one thread.

Posting never waits: what is posted goes as soon as the daemon takes it. How much can be waiting is bounded by the
segments that the session holds.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import grpc

from fastcheck_proto.v1 import trainer_pb2 as pb

from .connection import Link, translate
from .daemon import WHOM
from .errors import DaemonUnavailableError, FastCheckError

logger = logging.getLogger("fastcheck")


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
