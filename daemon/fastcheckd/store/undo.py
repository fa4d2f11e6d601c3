"""Turns chunks of a replica back to the older step, in place.

The same for a patch that is taken back, for a newest step that is dropped while older ones depend
on it, and for what a killed process left. Each chunk's digest says which step it belongs to, so it
may be begun anew any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..codec.decoder import decode
from ..digests import chunk_digest
from ..errors import CodecError, CorruptError
from .copying import copy_bytes
from .held import HeldShard
from .spread import spread
from .way_back import WayBackFile


class Undo:
    """One replica whose bytes become those of `older` again. The caller sees to it that nobody reads them."""

    def __init__(self, older: HeldShard, way: WayBackFile) -> None:
        self.older = older
        self.way = way
        self._bytes = older.segment.view[older.offset : older.offset + older.manifest.bytes]

    def chunk(self, index: int) -> memoryview:
        """The chunk's bytes in the replica, writable."""
        start, stop = self.older.chunks.range(index)
        return self._bytes[start:stop]

    def is_old(self, index: int) -> bool:
        """Whether the chunk is that of the older step."""
        return chunk_digest(self.chunk(index)) == self.older.chunk_digest(index)

    def put_back(self, index: int, slot: memoryview) -> None:
        """Make a chunk that of the older step, unless it is already.

        Raises:
            CorruptError: neither the chunk nor the way back gives the older bytes.
            StoreError: the system refuses.
        """
        if self.is_old(index):
            return
        chunk = self.chunk(index)
        record = self.way.read(index, len(chunk))
        if record is None:
            raise CorruptError(f"chunk {index} changed without a way back")
        out = slot[: len(chunk)]
        try:
            decode(record, chunk, out)
        except CodecError as error:
            raise CorruptError(f"the way back of chunk {index}: {error}") from error
        if chunk_digest(out) != self.older.chunk_digest(index):
            raise CorruptError(f"the way back of chunk {index} leads to other bytes")
        copy_bytes(chunk, out)

    def put_all_back(self, indexes: Sequence[int], slots: Sequence[memoryview]) -> None:
        """`put_back` of many chunks, on as many threads as there are slots."""
        spread(indexes, slots, self.put_back)
