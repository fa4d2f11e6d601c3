"""Signs of life of a process over a pipe to its parent: that its work goes on, where being there says nothing.

A pipe and not a port: there is nobody to authenticate, nothing to bound but the pipe itself, and it works before and
without everything that the process serves. A sign says nothing but that it was given, so its bytes are thrown away.
"""

from __future__ import annotations

import contextlib
import os

#: How often a process that works says so.
BEAT_INTERVAL_S = 1.0
_READ_BYTES_MAX = 4096


class BeatGiver:
    """The end of the process that is watched; `fd` is its own from now on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    def give(self) -> None:
        """Once more. A full pipe has signs enough; a parent that is gone ends this process by other means."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, b".")


def take_beats(fd: int) -> bool | None:
    """Whether a sign of life was given since the last call; None: there is nobody any more who could give one."""
    try:
        return True if os.read(fd, _READ_BYTES_MAX) else None
    except BlockingIOError:
        return False
