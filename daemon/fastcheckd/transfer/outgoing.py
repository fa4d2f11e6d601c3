"""A shard of a save while its copies are made: how it is to be sent, and an account of how that goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..codec.chunk_plan import ChunkPlan
from ..codec.fit import Fits
from .replication_pacing import Course


class OutgoingShard:
    """A shard of a save under way: what its bytes mean, how much of it is to be encoded, and how its sending goes.

    Thread-safe.

    Args:
        plans: what each chunk consists of.
        fraction: share of the chunks to encode against the base.
        alone: encode what has no base, too.
        lean: encode all that can be, whatever `fraction` says.
        readers: holders that are going to read it.
        fits: learning rates that other shards of the save have found.
        course: tells the pacing how much is left.
        on_encoded: gets (index, encoded chunk, its raw bytes) in the thread that encoded it against the base.
    """

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        *,
        fraction: float,
        alone: bool = False,
        lean: bool = False,
        readers: int = 1,
        fits: Fits | None = None,
        course: Course | None = None,
        on_encoded: Callable[[int, memoryview | bytes, memoryview], None] | None = None,
    ) -> None:
        self.plans = plans
        self.fraction = fraction
        self.alone = alone
        self.lean = lean
        self.readers = readers
        self.fits = fits or Fits()
        self.course = course
        self.on_encoded = on_encoded
        self._lock = threading.Lock()
        #: Connections that are inside a send, and since when there is one.
        self._active = 0
        self._active_since = 0.0
        self._busy_s = 0.0
        self._sent_bytes = 0
        self._raw_encoded = 0
        self._encoded_bytes = 0
        self._encode_s = 0.0
        self._chunks_encoded = 0
        self._moved_at: dict[str, float] = {}

    @contextlib.contextmanager
    def connection_sends(self) -> Iterator[None]:
        """While a connection is inside a send."""
        with self._lock:
            if not self._active:
                self._active_since = time.monotonic()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self._busy_s += time.monotonic() - self._active_since

    def sent(self, reader: str, *, raw_bytes: int, sent_bytes: int) -> None:
        """A chunk went to a node."""
        with self._lock:
            self._sent_bytes += sent_bytes
            self._moved_at[reader] = time.monotonic()
        if self.course is not None:
            self.course.sent(raw_bytes=raw_bytes, sent_bytes=sent_bytes)

    def encoded(self, raw_bytes: int, encoded_bytes: int, cpu_s: float, *, shrunk: bool) -> None:
        """A chunk was encoded; `encoded_bytes` is `raw_bytes` where it did not shrink."""
        with self._lock:
            self._raw_encoded += raw_bytes
            self._encoded_bytes += encoded_bytes
            self._encode_s += cpu_s
            self._chunks_encoded += shrunk

    def moved_at(self, reader: str) -> float:
        """When a chunk last went to a node, by the monotonic clock; 0: none did."""
        with self._lock:
            return self._moved_at.get(reader, 0.0)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one connection was sending."""
        with self._lock:
            return self._busy_s

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that went to all readers."""
        with self._lock:
            return self._sent_bytes

    @property
    def encode_s(self) -> float:
        """Thread seconds that encoding took."""
        with self._lock:
            return self._encode_s

    @property
    def chunks_encoded(self) -> int:
        """Chunks that became smaller."""
        with self._lock:
            return self._chunks_encoded

    @property
    def encoding(self) -> tuple[int, int, float]:
        """Raw bytes that were encoded, what they became, and the thread seconds it took."""
        with self._lock:
            return self._raw_encoded, self._encoded_bytes, self._encode_s
