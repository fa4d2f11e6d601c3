"""The connecting end of the bulk lane: one connection's work in a put and in a get. Blocking.

Which connections there are, and what becomes of the shard, is decided in `peer_client.py`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..counters import Counters
from ..errors import CorruptError, FrameError
from .arriving import Arriving
from .chunk_stream import receive_chunks, send_chunks
from .codec_pool import CodecPool
from .frames import RESENDS_MAX, FrameHeader, Hello
from .lane import Lane
from .put_tally import PutTally
from .shard_source import Order, Payload, ShardSource


class ChunkGate(Protocol):
    """Holds up the chunks of transfers that can wait. Asked by the threads that move them."""

    def begin(self, stream: object) -> None:
        """A connection begins."""

    def end(self, stream: object) -> None:
        """It has ended."""

    def wait(self, stream: object, size_bytes: int, still_wanted: Callable[[], None]) -> None:
        """Return when the next piece may move; `still_wanted` raises when it need not any more."""


#: Chunks that a connection has made ready while it sends the one before.
AHEAD = 2


def put_stream(
    lane: Lane,
    hello: Hello,
    *,
    source: ShardSource,
    against_base: bool,
    counters: Counters,
    moved: Callable[[int], None],
    tally: PutTally,
) -> None:
    """Send this connection's chunks, and again, as they are, those that arrived bad.

    While one chunk is sent the next AHEAD are encoded, so a connection keeps at most AHEAD + 1 encoded
    chunks in memory, besides what the source keeps for all of them.

    Raises:
        CorruptError: chunks are bad after all repeats: the bytes change here, or the way there is broken.
        FrameError, PeerError: see `Lane`. PeerError, too, when the codec pool is closed.
    """

    def sent(count: int) -> None:
        counters.add("bytes_sent", count)
        tally.sent(count)
        moved(count)

    lane.send_hello(hello)
    own = range(hello.first, len(source), hello.stride)
    chunks: Sequence[int] = own
    for sending in range(RESENDS_MAX + 1):
        if sending:
            counters.add("chunks_resent", len(chunks))
        made = _made_ahead(
            source, chunks, against_base=against_base, plain=sending > 0, tally=tally, still_wanted=lane.check
        )
        with contextlib.closing(made):
            send_chunks(lane, made, table=source.table, digest_of=source.digest, moved=sent)
        tally.sending_s(hello.first, lane.sending_s)
        chunks = lane.receive_result(own)
        if not chunks:
            return
    raise CorruptError(
        f"{len(chunks)} chunks, chunk {chunks[0]} first, arrive bad however often they are sent"
    )


def _made_ahead(
    source: ShardSource,
    chunks: Sequence[int],
    *,
    against_base: bool,
    plain: bool,
    tally: PutTally,
    still_wanted: Callable[[], None],
) -> Generator[tuple[int, Payload], None, None]:
    """The payloads of `chunks` in order, the next ones under way; close it to call those off."""
    orders: deque[tuple[int, Order]] = deque()
    rest = iter(chunks)
    try:
        while True:
            while len(orders) <= AHEAD and (index := next(rest, None)) is not None:
                orders.append((index, source.order(index, against_base=against_base, plain=plain)))
            if not orders:
                return
            index, order = orders[0]
            payload = order.take(still_wanted)
            orders.popleft()
            tally.used(index, payload.uses)
            yield index, payload
    finally:
        for _, order in reversed(orders):  # first those that have not begun, or they would
            order.drop()


def get_stream(
    lane: Lane,
    hello: Hello,
    *,
    manifest: pb.ShardManifest,
    table: ChunkTable,
    into: memoryview,
    counters: Counters,
    moved: Callable[[int], None],
    gate: ChunkGate | None = None,
    pool: CodecPool | None = None,
) -> None:
    """Receive this connection's chunks into their places; `manifest` has the proved digests.

    A chunk is taken from the connection when `gate` lets it pass. Without a `pool` to decode, none may come encoded.

    Raises:
        CorruptError: a chunk is not what the manifest says.
        FrameError, PeerError: see `Lane`.
    """
    own = range(hello.first, len(table), hello.stride)
    due = set(own)
    arriving = Arriving(table, manifest.chunk_digests, pool)

    def place_of(header: FrameHeader) -> memoryview:
        start, stop = table.range(header.chunk)
        if gate is not None:
            gate.wait(lane, stop - start, lane.check)
        return arriving.payload_place(header, into[start:stop])

    def accept(header: FrameHeader, payload: memoryview) -> None:
        start, stop = table.range(header.chunk)
        with into[start:stop] as place:
            if not arriving.settle(header, payload, place, lane.check):
                counters.add("corrupt_received")
                raise CorruptError(f"chunk {header.chunk} is not what was committed")
        due.discard(header.chunk)

    def received(count: int) -> None:
        counters.add("bytes_received", count)
        moved(count)

    lane.send_hello(hello)
    with _passing(gate, lane):
        receive_chunks(
            lane,
            own,
            table=table,
            codecs=arriving.codecs,
            place_of=place_of,
            accept=accept,
            moved=received,
        )
    if due:
        raise FrameError(f"the sender ended with {len(due)} of {len(own)} chunks not sent")


@contextlib.contextmanager
def _passing(gate: ChunkGate | None, lane: Lane) -> Iterator[None]:
    if gate is None:
        yield
        return
    gate.begin(lane)
    try:
        yield
    finally:
        gate.end(lane)
