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
from collections import deque
from collections.abc import Iterable

import torch

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import FastCheckError
from .segments import FileIdentity, Segment, SegmentCache

logger = logging.getLogger("fastcheck")

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
#: One call: a few dozen milliseconds, after which closing is noticed.
_SLICE_BYTES = 64 << 20
_REMEMBERED_MAX = 64

# Through ctypes, since mmap.madvise keeps the interpreter lock.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """Warms the segments that the daemon offers, one at a time, each once."""

    def __init__(self, cache: SegmentCache) -> None:
        self._cache = cache
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._waiting: deque[Segment] = deque()
        self._thread: threading.Thread | None = None
        self._warm: dict[FileIdentity, None] = {}

    def offer(self, refs: Iterable[pb.SegmentRef]) -> None:
        """Map segments and warm them in the background, unless that was done already. Any thread may call it."""
        for ref in refs:
            try:
                segment = self._cache.get(ref)
            except FastCheckError as error:
                logger.debug("not warming a spare segment: %s", error)
                continue
            with self._lock:
                if self._stop.is_set() or segment.identity is None or segment.identity in self._warm:
                    continue
                self._remember(segment.identity)
                self._waiting.append(segment)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="fastcheck-prefault", daemon=True)
                    self._thread.start()

    def _remember(self, identity: FileIdentity) -> None:
        self._warm[identity] = None
        while len(self._warm) > _REMEMBERED_MAX:
            del self._warm[next(iter(self._warm))]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._stop.is_set():
                    self._thread = None
                    return
                segment = self._waiting.popleft()
            populate(segment.tensor, self._stop, MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Stop within one slice."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=1.0)


def populate(tensor: torch.Tensor, stop: threading.Event, advice: int) -> None:
    """Have the kernel map all pages of a tensor, slice by slice until told to stop."""
    start, size = tensor.data_ptr(), tensor.numel()
    for offset in range(0, size, _SLICE_BYTES):
        if stop.is_set():
            return
        if _libc.madvise(start + offset, min(_SLICE_BYTES, size - offset), advice):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                logger.debug("cannot warm a segment: %s", os.strerror(code))
            return
