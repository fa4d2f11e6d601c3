"""A file that is being written: memory until it is closed, then handed over whole.

The memory is a file without a name, so that a writer who syncs what it wrote finds something to sync. Without one DCP
would sync all of the machine's disks instead.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class Spool(io.RawIOBase):
    """A writable stream.

    Args:
        path: For messages, and for whoever is handed the file.
        closed: Called once with this object when it is closed; not if a `with` block ends by an exception.
    """

    def __init__(self, path: str, closed: Callable[[Spool], None]) -> None:
        super().__init__()
        self.path = path
        self._hand_over = closed
        self._fd = os.memfd_create("fastcheck-spool", os.MFD_CLOEXEC)
        self._size = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any, /) -> int:
        """Append all of `data`; its size in bytes."""
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            written += os.write(self._fd, view[written:])
        self._size += written
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def fileno(self) -> int:
        """The memory's."""
        return self._fd

    def tensor(self) -> torch.Tensor:
        """What was written: flat uint8, over the file's own memory."""
        if not self._size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self._fd, self._size), dtype=torch.uint8)

    def close(self) -> None:
        """Hand the file over; raises what that raises. A second time does nothing."""
        if self.closed:
            return
        super().close()
        self._hand_over(self)

    def discard(self) -> None:
        """Close without handing it over."""
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        """What was never closed is not handed over."""
        if not self.closed:
            self.discard()
        os.close(self._fd)
