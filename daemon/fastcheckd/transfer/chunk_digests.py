"""Digests of one shard's chunks, each computed once, by whichever sending thread needs it first.

A shard goes to several holders over several connections at once. Hashing just before sending means
that the bytes are in the cache when the kernel copies them; the table makes it one pass for all of
them. Nothing here sends or knows of holders.
"""

from __future__ import annotations

import threading

from ..digests import chunk_count, chunk_digest, chunk_range

#: Two threads wait for each other only when their chunks share a lock.
_LOCKS = 64


class ChunkDigests:
    """Table of the chunk digests of `view`. Thread-safe; the bytes must not change any more."""

    def __init__(self, view: memoryview, chunk_bytes: int) -> None:
        self._view = view
        self._digests: list[bytes | None] = [None] * chunk_count(len(view), chunk_bytes)
        self._locks = [threading.Lock() for _ in range(min(_LOCKS, len(self._digests)))]
        self.chunk_bytes = chunk_bytes

    def __len__(self) -> int:
        return len(self._digests)

    def chunk(self, index: int) -> bytes:
        """16-byte digest of one chunk."""
        known = self._digests[index]
        if known is not None:
            return known
        with self._locks[index % len(self._locks)]:
            known = self._digests[index]
            if known is None:
                start, stop = chunk_range(index, len(self._view), self.chunk_bytes)
                with self._view[start:stop] as data:
                    known = self._digests[index] = chunk_digest(data)
        return known

    def complete(self) -> bytes:
        """All digests, 16 bytes each, in order; computes what is missing, so it may take a while."""
        return b"".join(self.chunk(index) for index in range(len(self)))
