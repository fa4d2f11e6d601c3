"""Where the chunks of a shard go that is being fetched: a draft of the store, or memory of the caller."""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import Protocol

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.encoder import Use
from ..store.draft import Draft


class Target(Protocol):
    """Where a shard's chunks go. Used by the threads of connections, each for chunks of its own."""

    @property
    def base_step(self) -> int | None:
        """The step that chunks may be encoded against."""

    @property
    def lean(self) -> bool:
        """Whether room is short, so that chunks should come encoded against the base."""

    def place(self, index: int) -> memoryview:
        """Where a chunk's bytes belong, writable; raises StoreError when there is no room."""

    def base(self, index: int) -> AbstractContextManager[memoryview | None]:
        """The bytes of the base's chunk; None without a base."""

    def received(self, index: int, payload: memoryview | None, uses: tuple[Use, ...]) -> None:
        """A chunk is in its place and was checked.

        Args:
            payload: as it came, if it was encoded against the base.
            uses: which codecs it came by.
        """


class MemoryTarget:
    """A shard's place in memory that the caller gives: `into` has its size."""

    base_step: int | None = None
    lean = False

    def __init__(self, into: memoryview, table: ChunkTable) -> None:
        self._into = into
        self._table = table

    def place(self, index: int) -> memoryview:
        """See `Target`."""
        start, stop = self._table.range(index)
        return self._into[start:stop]

    def base(self, index: int) -> AbstractContextManager[memoryview | None]:
        """See `Target`."""
        return contextlib.nullcontext(None)

    def received(self, index: int, payload: memoryview | None, uses: tuple[Use, ...]) -> None:
        """See `Target`: it is in its place."""


class CopyTarget:
    """A draft as the place of a fetch's chunks, and an account of how they came."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._lock = threading.Lock()
        self._raw: dict[str, int] = {}
        self._encoded: dict[str, int] = {}
        missing = sum(stop - start for start, stop in map(draft.chunks.range, draft.missing))
        if here := draft.manifest.bytes - missing:
            self._raw["same"], self._encoded["same"] = here, 0

    @property
    def base_step(self) -> int | None:
        """See `Target`."""
        return None if self.draft.base is None else self.draft.base.key.step

    @property
    def lean(self) -> bool:
        """See `Target`."""
        return self.draft.lean

    def place(self, index: int) -> memoryview:
        """See `Target`."""
        return self.draft.place(index)

    def base(self, index: int) -> AbstractContextManager[memoryview | None]:
        """See `Target`."""
        return self.draft.base_chunk(index)

    def received(self, index: int, payload: memoryview | None, uses: tuple[Use, ...]) -> None:
        """See `Target`."""
        self.draft.received(index, payload)
        with self._lock:
            for use in uses:
                self._raw[use.codec] = self._raw.get(use.codec, 0) + use.raw_bytes
                self._encoded[use.codec] = self._encoded.get(use.codec, 0) + use.encoded_bytes

    def codecs(self) -> list[pb.CodecUse]:
        """What each codec did, by name."""
        with self._lock:
            return [
                pb.CodecUse(codec=name, raw_bytes=self._raw[name], encoded_bytes=self._encoded[name])
                for name in sorted(self._raw)
            ]
