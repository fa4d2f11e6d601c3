"""Progress of a load: to the caller's callback, or as one line on a terminal that is rewritten."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from fastcheck_proto.v1 import trainer_pb2 as pb

#: A load that takes less shows no line.
QUIET_S = 1.0


@dataclass(frozen=True)
class LoadProgress:
    """The argument of the callback of `load(state, progress=...)`, called a few times a second and once at the end."""

    #: Bytes of this rank that are here and verified.
    bytes_done: int
    bytes_total: int
    #: The recent rate; in the last call the mean of the whole load.
    bytes_per_s: float
    #: Nodes that have sent something so far.
    holders: int


class CallbackFailedError(Exception):
    """The caller's callback raised; the load is over. The error is this one's cause."""


class Reporter:
    """Reports one load.

    Args:
        callback: the caller's; without one, a line is shown if `stream` is a terminal.
    """

    def __init__(
        self,
        callback: Callable[[LoadProgress], None] | None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._callback = callback
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._shown = False

    def news(self, news: pb.LoadProgress) -> None:
        """Report news from the daemon.

        Raises:
            CallbackFailedError: the caller's callback raised.
        """
        self._tell(LoadProgress(news.bytes_done, news.bytes_total, news.bytes_per_s, news.holders))

    def all_here(self, size: int, holders: int) -> None:
        """Report the end: so many bytes, from so many other nodes. Raises as `news` does."""
        taken_s = self._clock() - self._started
        self._tell(LoadProgress(size, size, size / taken_s if taken_s > 0 else 0.0, holders))

    def close(self) -> None:
        """End the line, if there is one."""
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
            self._shown = False

    def _tell(self, progress: LoadProgress) -> None:
        if self._callback is not None:
            try:
                self._callback(progress)
            except Exception as error:
                raise CallbackFailedError from error
        elif self._clock() - self._started >= QUIET_S and _is_terminal(self._stream):
            # Back to the beginning of the line, which is erased.
            self._stream.write(f"\r\x1b[K{_line(progress)}")
            self._stream.flush()
            self._shown = True


def _line(progress: LoadProgress) -> str:
    done, total = progress.bytes_done / 1e9, progress.bytes_total / 1e9
    whom = "this node" if not progress.holders else f"{progress.holders} node{'s' * (progress.holders > 1)}"
    return f"FastCheck loads {done:.2f} of {total:.2f} GB from {whom}, {progress.bytes_per_s / 1e6:.0f} MB/s"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # replaced by something simpler, or closed
        return False
