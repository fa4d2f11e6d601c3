"""Touching the pages of a segment before a save needs them, in the background.

A page's first use costs seven times a warm copy. The kernel does it for us with the interpreter lock
free (MADV_POPULATE_WRITE, Linux 5.14), without changing a byte; an older kernel refuses and the next
save merely finds cold pages, as the first one does.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import FastCheckError
from .segments import FileIdentity, SegmentCache

logger = logging.getLogger("fastcheck")

_MADV_POPULATE_WRITE = 23
#: One call: a few dozen milliseconds, after which closing is noticed.
_SLICE_BYTES = 64 << 20
_REMEMBERED_MAX = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """Warms one segment at a time; offers that come meanwhile are dropped, the daemon repeats them."""

    def __init__(self, cache: SegmentCache) -> None:
        self._cache = cache
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._warm: dict[FileIdentity, None] = {}

    def offer(self, ref: pb.SegmentRef) -> None:
        """Map and warm a segment in the background unless that was done already."""
        if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            segment = self._cache.get(ref)
        except FastCheckError as error:
            logger.debug("not warming the spare segment: %s", error)
            return
        if segment.identity is None or segment.identity in self._warm:
            return
        self._remember(segment.identity)
        self._thread = threading.Thread(
            target=_populate, args=(segment.tensor, self._stop), name="fastcheck-prefault", daemon=True
        )
        self._thread.start()

    def _remember(self, identity: FileIdentity) -> None:
        self._warm[identity] = None
        while len(self._warm) > _REMEMBERED_MAX:
            del self._warm[next(iter(self._warm))]

    def close(self) -> None:
        """Stop within one slice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)


def _populate(tensor: object, stop: threading.Event) -> None:
    start, size = tensor.data_ptr(), tensor.numel()  # type: ignore[attr-defined]
    for offset in range(0, size, _SLICE_BYTES):
        if stop.is_set():
            return
        if _libc.madvise(start + offset, min(_SLICE_BYTES, size - offset), _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                logger.debug("cannot warm the spare segment: %s", os.strerror(code))
            return
