"""Where a shard's chunks begin and end. Pure.

A shard whose layout is known has chunks of various sizes, so that what belongs together is encoded
together; any other has chunks of one size. Both ends take it from the manifest and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from fastcheck_proto.v1 import common_pb2 as pb

from .errors import InvalidRequestError

#: A chunk is held in memory as a whole, several at a time.
CHUNK_LENGTH_MAX = 16 << 20
#: What says how long chunks are comes from elsewhere, and a few bytes of it may stand for a table of any size.
CHUNKS_MAX = 1 << 22


class ChunkTable:
    """Byte ranges of a shard's chunks, in order, without gaps. Immutable."""

    __slots__ = ("_ends", "longest")

    def __init__(self, lengths: Sequence[int]) -> None:
        """Chunks of these sizes; none is empty."""
        assert all(length > 0 for length in lengths)
        self._ends = list(accumulate(lengths))
        #: Size of the largest chunk in bytes; 0 if there is none.
        self.longest = max(lengths, default=0)

    @classmethod
    def uniform(cls, shard_bytes: int, chunk_bytes: int) -> ChunkTable:
        """All of `chunk_bytes`, but for the last, which has the rest; none for an empty shard."""
        whole, rest = divmod(shard_bytes, chunk_bytes)
        return cls([chunk_bytes] * whole + [rest] * (rest > 0))

    @classmethod
    def of(cls, manifest: pb.ShardManifest) -> ChunkTable:
        """As a manifest tells it.

        Raises:
            InvalidRequestError: its chunk lengths are not the shard's size together, out of bounds, or too many.
        """
        lengths = manifest.chunk_lengths
        if not lengths:
            if not manifest.bytes:
                return cls([])
            if not 0 < manifest.chunk_bytes <= CHUNK_LENGTH_MAX:
                raise InvalidRequestError(f"chunk_bytes {manifest.chunk_bytes} is not from 1 byte to 16 MiB")
            if manifest.bytes > CHUNKS_MAX * manifest.chunk_bytes:
                raise InvalidRequestError(
                    f"{manifest.bytes} bytes in chunks of {manifest.chunk_bytes} are more than {CHUNKS_MAX} chunks"
                )
            return cls.uniform(manifest.bytes, manifest.chunk_bytes)
        if sum(lengths) != manifest.bytes or not all(0 < n <= CHUNK_LENGTH_MAX for n in lengths):
            raise InvalidRequestError(
                f"{len(lengths)} chunk lengths do not make a shard of {manifest.bytes} bytes"
            )
        return cls(lengths)

    def __len__(self) -> int:
        return len(self._ends)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and self._ends == other._ends

    def __hash__(self) -> int:
        return hash((len(self._ends), self.shard_bytes, self.longest))

    @property
    def shard_bytes(self) -> int:
        """All chunks together."""
        return self._ends[-1] if self._ends else 0

    @property
    def lengths(self) -> list[int]:
        """Size of each chunk in bytes."""
        return [stop - start for start, stop in pairwise([0, *self._ends])]

    def range(self, index: int) -> tuple[int, int]:
        """Byte range [start, stop) of a chunk within its shard."""
        return (self._ends[index - 1] if index else 0), self._ends[index]

    def touched(self, start: int, stop: int) -> Sequence[int]:
        """The chunks that have some of bytes [start, stop) of the shard."""
        if start >= stop:
            return range(0)
        return range(bisect_right(self._ends, start), min(len(self), bisect_left(self._ends, stop) + 1))
