"""One connection's chunks on their way into an incoming shard, so that decoding and receiving overlap.

A raw chunk that may lie in its place at once is received there and hashed by the connection's own
thread. Any other is received into one of two buffers, and while the codec pool puts it in place the next one
is received into the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from ..counters import Counters
from ..errors import CodecError, MispredictedError
from .codec_pool import CodecPool, call_off, outcome
from .frames import CODEC_OVERHEAD_BYTES_MAX, FrameHeader
from .incoming import IncomingShard

logger = logging.getLogger(__name__)


class Intake:
    """Used by one connection's thread. `still_wanted` raises when the transfer is over."""

    def __init__(
        self,
        incoming: IncomingShard,
        pool: CodecPool,
        counters: Counters,
        still_wanted: Callable[[], None],
    ) -> None:
        self._incoming = incoming
        self._pool = pool
        self._counters = counters
        self._still_wanted = still_wanted
        self._buffer_bytes = incoming.table.longest + CODEC_OVERHEAD_BYTES_MAX
        #: The one to receive into, and the one that the job under way reads. Made when first needed.
        self._receiving: bytearray | None = None
        self._settling: bytearray | None = None
        self._job: Future[None] | None = None

    def place_of(self, header: FrameHeader) -> memoryview:
        """Where a payload goes. FrameError when the chunk came already."""
        self._incoming.expect(header.chunk)
        place = self._incoming.target.place(header)
        if place is not None:
            return place
        if self._receiving is None:
            self._receiving = bytearray(self._buffer_bytes)
        return memoryview(self._receiving)[: header.encoded_bytes]

    def accept(self, header: FrameHeader, place: memoryview) -> None:
        """A payload is whole. Waits for the one before, and raises what stopped that."""
        buffer = self._receiving
        if buffer is None or place.obj is not buffer:
            self._settle(header, place)
            return
        self.drain()
        self._receiving, self._settling = self._settling, buffer
        payload = memoryview(buffer)[: header.encoded_bytes]
        self._job = self._pool.submit(self._settle, header, payload)

    def drain(self) -> None:
        """Wait until everything that came is in place or known to be bad.

        Raises:
            PeerError: the transfer or the pool was ended. Whatever the target raises, StoreError for one.
        """
        if self._job is not None:
            outcome(self._job, self._still_wanted)
            self._job = None

    def close(self) -> None:
        """No thread works for this connection any more when this returns."""
        if self._job is not None:
            call_off(self._job)
            self._job = None

    def _settle(self, header: FrameHeader, payload: memoryview) -> None:
        index = header.chunk
        try:
            uses = self._incoming.target.settle(header, payload)
        except CodecError as error:
            mispredicted = isinstance(error, MispredictedError)
            self._counters.add("chunks_mispredicted" if mispredicted else "corrupt_received")
            logger.info("chunk %d has to be sent again: %s", index, error)
            self._incoming.came_bad(index)
        else:
            self._incoming.arrived(index, header.digest, uses)
