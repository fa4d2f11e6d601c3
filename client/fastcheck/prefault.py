"""Touching the pages of a segment before a save needs them, in the background (see `segments`)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import FastCheckError
from .segments import MappedSegment, SegmentCache, populate

logger = logging.getLogger("fastcheck")

#: One call: a few dozen milliseconds, after which closing is noticed.
_SLICE_BYTES = 64 << 20


class Prefaulter:
    """Warms segments, each once; `warmed` is called with each that is. Safe to use from several threads."""

    def __init__(self, cache: SegmentCache, warmed: Callable[[MappedSegment], object]) -> None:
        self._cache = cache
        self._warmed = warmed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        #: Segments with the offset of the slice to be touched; the last one of each says that it is warm.
        self._slices: deque[tuple[MappedSegment, int]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Condition(self._lock)

    def offer(self, refs: Iterable[pb.SegmentRef], threads: int = 1) -> None:
        """Map segments and warm them, unless that was done already.

        One thread is enough beside training; before it, several are faster.
        """
        for ref in refs:
            try:
                segment = self._cache.get(ref)
            except FastCheckError as error:
                logger.debug("not warming a segment: %s", error)
                continue
            with self._lock:
                if (
                    self._stop.is_set()
                    or segment.warm
                    or any(segment is queued for queued, _ in self._slices)
                ):
                    continue
                self._slices.extend((segment, at) for at in range(0, segment.tensor.numel(), _SLICE_BYTES))
                for _ in range(threads - len(self._threads)):
                    thread = threading.Thread(target=self._run, name="fastcheck-prefault", daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._slices or self._stop.is_set():
                    self._slices.clear()
                    self._threads.remove(threading.current_thread())
                    self._idle.notify_all()
                    return
                segment, at = self._slices.popleft()
            size = segment.tensor.numel()
            good = segment.warm or populate(segment.tensor.data_ptr() + at, min(_SLICE_BYTES, size - at))
            if good and at + _SLICE_BYTES >= size:
                segment.warm = True
                self._warmed(segment)

    def wait(self, deadline: float) -> None:
        """Returns when nothing is left to be touched, or at the deadline of the monotonic clock."""
        with self._idle:
            self._idle.wait_for(lambda: not self._threads, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop within one slice."""
        self._stop.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout=1.0)
