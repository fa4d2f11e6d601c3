"""Chunks that a reader gets: raw ones straight into their place, encoded ones decoded into it."""

from __future__ import annotations

from collections.abc import Callable

from ..chunks import ChunkTable
from ..codec.decoder import decode
from ..digests import DIGEST_BYTES, chunk_digest
from ..errors import CodecError
from .codec_pool import CodecPool, call_off, outcome
from .frames import CODEC_OVERHEAD_BYTES_MAX, Codec, FrameHeader


class Arriving:
    """Used by one connection's thread.

    Args:
        digests: of all chunks, proved.
        pool: decodes; without one only raw chunks may come.
    """

    def __init__(self, table: ChunkTable, digests: bytes, pool: CodecPool | None) -> None:
        self._table, self._digests, self._pool = table, digests, pool
        #: Made when first needed.
        self._buffer: bytearray | None = None

    @property
    def codecs(self) -> frozenset[Codec]:
        """What may come."""
        return frozenset(Codec) if self._pool is not None else frozenset({Codec.RAW})

    def payload_place(self, header: FrameHeader, place: memoryview) -> memoryview:
        """Where a chunk's payload is to be received whose bytes belong at `place`."""
        if header.codec == Codec.RAW:
            return place
        if self._buffer is None:
            self._buffer = bytearray(self._table.longest + CODEC_OVERHEAD_BYTES_MAX)
        return memoryview(self._buffer)[: header.encoded_bytes]

    def settle(
        self, header: FrameHeader, payload: memoryview, place: memoryview, still_wanted: Callable[[], None]
    ) -> bool:
        """The payload is whole: put the chunk in its place. Whether it is what it should be.

        Raises:
            PeerError: the pool was closed. Whatever `still_wanted` raises.
        """
        if header.codec != Codec.RAW:
            assert self._pool is not None
            job = self._pool.submit(_decoded, payload, place)
            try:
                if not outcome(job, still_wanted):
                    return False
            except BaseException:
                call_off(job)  # nobody writes to the place any more
                raise
        index = header.chunk
        return chunk_digest(place) == self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _decoded(payload: memoryview, place: memoryview) -> bool:
    try:
        decode(payload, None, place)
    except CodecError:
        return False  # counted as any chunk that is not what it should be
    return True
