"""One of the processes that the parent forks, as the parent knows it."""

from __future__ import annotations

import logging
import os
import signal
import socket

from fastcheck_proto.v1 import node_pb2 as pb

from ..config import Config
from ..health.vitals import ProcessVitals
from ..log import Episode
from .restarts import BACKOFF_MAX_S, Restarts
from .runtime import LIVENESS_INTERVAL_S

logger = logging.getLogger(__name__)


class Child:
    """Its lives, one after the other.

    Args:
        name: agent, data or registry.
        now: by the monotonic clock, as all times here.
    """

    def __init__(self, name: str, config: Config, now: float) -> None:
        self.name = name
        self.config = config
        self.restarts = Restarts(now)
        self.vitals = ProcessVitals(hung_after_s=config.data_hung_after_s, step_s=2 * LIVENESS_INTERVAL_S)
        #: When it was last known to go on.
        self.went_on_at = now
        #: When it is killed, having been told to end; None: it has not been.
        self.kill_at: float | None = None
        #: The parent's end of its line to the agent; None in others.
        self.line: socket.socket | None = None
        #: The parent's end of the pipe for signs of life; None where it gives none.
        self.liveness_fd: int | None = None
        self._not_starting = Episode(logger, f"the {name} process cannot be started", level=logging.ERROR)

    def started(self, pid: int, now: float) -> None:
        """It runs."""
        self.restarts.started(pid, now)
        self.went_on_at = now
        self._not_starting.over()

    def not_started(self, error: Exception, now: float) -> None:
        """The system could not start it."""
        self.close()
        reason = str(error) or repr(error)
        self.restarts.not_started(reason, now)
        self._not_starting.again("%s; it is tried again every %g s at least", reason, BACKOFF_MAX_S)

    def end(self, now: float, grace_s: float) -> None:
        """SIGTERM, once; SIGKILL when its time is over."""
        if self.restarts.pid is None:
            return
        if self.kill_at is None:
            self.kill_at = now + grace_s
            os.kill(self.restarts.pid, signal.SIGTERM)
        elif now >= self.kill_at:
            logger.warning("the %s process did not stop in time; killing it", self.name)
            self.kill()
            self.kill_at = now + BACKOFF_MAX_S

    def kill(self) -> None:
        """SIGKILL it."""
        if self.restarts.pid is not None:  # not reaped yet: the id is still its own
            os.kill(self.restarts.pid, signal.SIGKILL)

    def state(self, now: float) -> pb.ProcessState:
        """As the agent is told of it."""
        return pb.ProcessState(
            pid=self.restarts.pid or 0,
            restarts=self.restarts.restarts,
            start_failures=self.restarts.start_failures,
            trouble=self.restarts.trouble(now),
        )

    def close(self) -> None:
        """Close what the parent shares with it, once nobody waits for that."""
        close(self.line, self.liveness_fd)
        self.line = self.liveness_fd = None


def close(*ends: socket.socket | int | None) -> None:
    """Close sockets and descriptors."""
    for end in ends:
        if isinstance(end, socket.socket):
            end.close()
        elif end is not None:
            os.close(end)
