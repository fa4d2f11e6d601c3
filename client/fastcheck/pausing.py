"""How often a training loop may pay for a daemon that is away: one quick attempt now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .daemon import CONNECT_S, RECONNECT_S
from .errors import DaemonUnavailableError, FastCheckError, RegistryUnavailableError

logger = logging.getLogger("fastcheck")

_PAUSE_S_MIN = 1.0
_PAUSE_S_MAX = 8.0


class Pause:
    """After a failure to reach the daemon or the registry, saves fail at once for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._pause_s = 0.0
        self._error: FastCheckError | None = None

    @property
    def connect_s(self) -> float:
        """How long an attempt may look for the daemon now."""
        return CONNECT_S if self._error is None else RECONNECT_S

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._error is not None

    @property
    def error(self) -> FastCheckError | None:
        """The failure to report without another attempt; None when it is time for one."""
        if self._error is None or self._clock() >= self._until:
            return None
        return type(self._error)(str(self._error))

    def note(self, error: FastCheckError | None) -> None:
        """Note how an attempt ended; only what is out of reach makes later ones wait."""
        if isinstance(error, DaemonUnavailableError | RegistryUnavailableError):
            self._error = error
            self._pause_s = min(max(_PAUSE_S_MIN, self._pause_s * 2), _PAUSE_S_MAX)
            self._until = self._clock() + self._pause_s
        else:
            self._error = None
            self._pause_s = 0.0


class FailureLog:
    """Warns once per kind of failure: a training loop saves thousands of times."""

    def __init__(self) -> None:
        self._seen: set[type[FastCheckError]] = set()

    def note(self, step: int, error: FastCheckError) -> None:
        """Log a failed save."""
        first = type(error) not in self._seen
        self._seen.add(type(error))
        logger.log(
            logging.WARNING if first else logging.DEBUG,
            "step %d was not saved, training goes on (%s; logged once per kind): %s",
            step,
            type(error).__name__,
            error,
        )
