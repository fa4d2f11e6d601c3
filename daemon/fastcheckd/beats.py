"""Signs of life of a child process over a pipe: that its work goes on, where being there says nothing.

A pipe and not a port: there is nobody to authenticate, nothing to bound but the pipe itself, and it works before and
without everything that the process serves. A sign says nothing but that it was given, so its bytes are thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

#: How often a process that works says so.
BEAT_INTERVAL_S = 1.0
#: Environment variable that hands a child its end.
CHILD_BEAT = "FASTCHECKD_CHILD_BEAT"
_READ_BYTES_MAX = 4096


class BeatGiver:
    """The child's end; without one, in processes that nobody watches, giving a sign does nothing."""

    def __init__(self) -> None:
        text = os.environ.pop(CHILD_BEAT, "")
        self._fd = int(text) if text else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)
            os.set_blocking(self._fd, False)

    def give(self) -> None:
        """Once more. A full pipe has signs enough; a parent that is gone ends this process by other means."""
        if self._fd is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._fd, b".")


class BeatTaker:
    """The parent's end, for one life of the child. Use it in the event loop; `heard` is called for each sign."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._fd, self.child_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._take)
        self._heard = heard
        self._started = False

    def _take(self) -> None:
        try:
            taken = os.read(self._fd, _READ_BYTES_MAX)
        except BlockingIOError:
            return
        if taken:
            self._heard()
        else:  # the child has ended
            self._loop.remove_reader(self._fd)

    def started(self) -> None:
        """The child has its end."""
        self._started = True
        os.close(self.child_fd)

    def close(self) -> None:
        """Stop to listen."""
        if not self._started:
            os.close(self.child_fd)
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
