"""An incoming copy of a shard: reserved memory, and which of its chunks are there and proved.

Bytes land in place, in the mapped segment; this side hashes them there and compares. Memory goes
back only when the last connection that might write into it has let go. Sockets live in
`lane_server.py`, the decision who may put in `put_desk.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fastcheck_proto.v1 import common_pb2 as pb

from ..digests import DIGEST_BYTES, chunk_count, chunk_digest, chunk_range
from ..errors import FrameError, InvalidRequestError
from ..store.ram_store import Segment


class IncomingShard:
    """One shard under way to this node. Thread-safe.

    Chunks are divided among connections by `first`; no two connections may have the same one, so no
    chunk is ever written by two threads, and none after `seal`.
    """

    def __init__(
        self,
        manifest: pb.ShardManifest,
        segment: Segment,
        *,
        streams: int,
        release: Callable[[Segment], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.segment = segment
        self.streams = streams
        self.shard_bytes = manifest.bytes
        self.chunk_bytes = manifest.chunk_bytes
        self.chunks = chunk_count(self.shard_bytes, self.chunk_bytes)
        self._view = segment.view[: self.shard_bytes]
        self._release = release
        self._clock = clock
        self._lock = threading.Lock()
        #: Open connections by their first chunk, and how to end each.
        self._lanes: dict[int, Callable[[], None]] = {}
        self._used_firsts: set[int] = set()
        #: No byte is written any more: sealed or abandoned.
        self._shut = False
        self._abandoned = False
        self._released = False
        self._last_progress_s = clock()
        # Written by the one thread that owns the chunk, read after its connection is done.
        self._arrived = bytearray(self.chunks)
        self._digests = bytearray(self.chunks * DIGEST_BYTES)

    @property
    def idle_s(self) -> float:
        """Seconds since the last sign of life; 0 while a connection is open: that has its own deadline."""
        with self._lock:
            return 0.0 if self._lanes else self._clock() - self._last_progress_s

    def attach(self, first: int, stride: int, end: Callable[[], None]) -> None:
        """A connection starts; `end` makes its thread stop soon.

        Raises:
            FrameError: its chunks are not its own, or the transfer is over.
        """
        with self._lock:
            if self._shut:
                raise FrameError("the transfer is over; begin a new one")
            if stride != self.streams:
                raise FrameError(f"the transfer has {self.streams} connections; stride {stride} does not fit")
            if first in self._used_firsts:
                raise FrameError(f"another connection already carries the chunks from {first}")
            self._used_firsts.add(first)
            self._lanes[first] = end

    def detach(self, first: int) -> None:
        """The connection will write no more. Harmless when repeated."""
        with self._lock:
            self._last_progress_s = self._clock()
            self._lanes.pop(first, None)
        self._release_if_unused()

    def chunk_view(self, index: int) -> memoryview:
        """Where the chunk's bytes go; until `accept` it counts as not there."""
        self._arrived[index] = 0
        start, stop = chunk_range(index, self.shard_bytes, self.chunk_bytes)
        return self._view[start:stop]

    def accept(self, index: int, data: memoryview, claimed_digest: bytes) -> bool:
        """Hash a chunk where it lies; whether it is what the sender meant to send."""
        digest = chunk_digest(data)
        if digest != claimed_digest:
            return False
        self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest
        self._arrived[index] = 1
        return True

    def missing(self, chunks: range) -> list[int]:
        """Those of `chunks` that are not there."""
        return [index for index in chunks if not self._arrived[index]]

    def seal(self) -> bytes:
        """End of the transfer: all chunk digests, as computed here. Nothing is written after it.

        Raises:
            InvalidRequestError: a connection is still open, or chunks are missing.
        """
        with self._lock:
            if self._lanes:
                raise InvalidRequestError(f"{len(self._lanes)} connections of the transfer are still open")
            self._shut = True
        missing = self.missing(range(self.chunks))
        if missing:
            raise InvalidRequestError(
                f"{len(missing)} of {self.chunks} chunks never arrived, the first is {missing[0]}"
            )
        return bytes(self._digests)

    def abandon(self) -> None:
        """Give the memory back as soon as no connection writes into it. Also after success, when the
        published shard keeps the segment alive. Harmless when repeated."""
        with self._lock:
            self._shut = self._abandoned = True
            ends = list(self._lanes.values())
        for end in ends:
            end()
        self._release_if_unused()

    def _release_if_unused(self) -> None:
        with self._lock:
            if not self._abandoned or self._lanes or self._released:
                return
            self._released = True
            self._view.release()
        self._release(self.segment)
