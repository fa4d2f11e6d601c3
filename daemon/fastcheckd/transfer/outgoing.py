"""A held shard's chunks on their way to a reader, as they are or encoded without a base.

One for each connection. The next chunks are encoded while one is sent, so a connection has at most AHEAD + 1 encoded
chunks in memory. Nothing here sends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future

from ..chunks import ChunkTable
from ..codec.encoder import Encoded
from ..codec.get_planner import GetPlanner
from ..codec.standalone import encode_alone
from ..counters import Counters
from ..digests import DIGEST_BYTES
from .codec_pool import CodecPool, call_off, outcome
from .frames import Codec
from .lane import Lane
from .shard_source import Payload

#: Chunks that are made ready while another one is sent.
AHEAD = 2


class Outgoing:
    """Chunks of `source`, cut by `table`, with those `digests` of 16 bytes each. Used by one connection's thread.

    Without a `planner` the reader takes raw chunks only.
    """

    def __init__(
        self,
        source: memoryview,
        table: ChunkTable,
        digests: bytes,
        step: int,
        *,
        pool: CodecPool,
        planner: GetPlanner | None,
        counters: Counters,
    ) -> None:
        self._source, self._table, self._digests, self._step = source, table, digests, step
        self._pool, self._planner, self._counters = pool, planner, counters

    def digest(self, index: int) -> bytes:
        """A chunk's."""
        return self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def payloads(self, chunks: Sequence[int], lane: Lane) -> Generator[tuple[int, Payload], None, None]:
        """The payloads of `chunks` in order, each to be sent over `lane` before the next is asked for.

        Close it: then no thread works on the source for it any more.

        Raises:
            PeerError: the lane or the pool was ended.
        """
        planner = self._planner
        orders: deque[tuple[int, Future[Encoded | None] | None]] = deque()
        rest = iter(chunks)
        if planner is not None:
            planner.begin()
        try:
            while True:
                while len(orders) <= AHEAD and (index := next(rest, None)) is not None:
                    encode = planner is not None and planner.choose()
                    orders.append((index, self._pool.submit(self._encode, index) if encode else None))
                if not orders:
                    return
                index, job = orders[0]
                encoded = None if job is None else outcome(job, lane.check)
                orders.popleft()
                if encoded is None:
                    start, stop = self._table.range(index)
                    payload = Payload(Codec.RAW, self._source[start:stop], ())
                else:
                    payload = Payload(Codec.ENCODED, encoded.payload, encoded.uses)
                before_s = lane.sending_s
                yield index, payload
                if planner is not None:
                    planner.sent(len(payload.data), lane.sending_s - before_s)
        finally:
            if planner is not None:
                planner.end()
            for _, job in reversed(orders):  # first those that have not begun, or they would
                if job is not None:
                    call_off(job)

    def _encode(self, index: int) -> Encoded | None:
        assert self._planner is not None
        start, stop = self._table.range(index)
        started = time.perf_counter()
        with self._source[start:stop] as data:
            encoded = encode_alone(data, step=self._step, digest=self.digest(index))
        seconds, size = time.perf_counter() - started, stop - start
        self._planner.encoded(size, size if encoded is None else len(encoded.payload), seconds)
        self._counters.add("encode_cpu_ms", round(seconds * 1000))
        if encoded is not None:
            self._counters.add("chunks_encoded")
        return encoded
