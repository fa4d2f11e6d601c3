"""The connecting end of the bulk lane: one connection's work in a put and in a get. Blocking.

Which connections there are, and what becomes of the shard, is decided in `peer_client.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..counters import Counters
from ..errors import CorruptError, FrameError
from .arriving import Arriving
from .chunk_stream import receive_chunks, send_chunks
from .codec_pool import CodecPool
from .frames import RESENDS_MAX, FrameHeader, Hello, check_data_frame
from .lane import Lane
from .put_pacing import Course
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


class ChunkAsker(Protocol):
    """Says what one connection of a get on demand is to ask for. Asked by the thread that reads it."""

    def next(self, still_wanted: Callable[[], None]) -> Sequence[int] | None:
        """Chunks to ask for now, none if enough is under way; None: it is of no more use.

        Returns nothing only while something is under way: else it waits, and `still_wanted` raises when nobody
        needs the connection any more.
        """

    def wanted(self, chunk: int) -> bool:
        """A chunk that was asked for begins to arrive: whether it is still for its place, which then is this one's."""

    def got(self, chunk: int) -> None:
        """It is whole, and what it should be if it was for its place."""

    def came_bad(self, chunk: int) -> None:
        """It is not what it should be; raises CorruptError if there is no point in going on."""


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
    gate: ChunkGate | None = None,
    course: Course | None = None,
) -> None:
    """Send this connection's chunks, and again, as they are, those that arrived bad.

    A chunk goes when `gate` lets it pass; `course` hears of each that went.

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
    with passing(gate, lane):
        for sending in range(RESENDS_MAX + 1):
            if sending:
                counters.add("chunks_resent", len(chunks))
            made = _made_ahead(
                source,
                chunks,
                against_base=against_base,
                plain=sending > 0,
                tally=tally,
                still_wanted=lane.check,
            )
            let = _let_pass(made, gate=gate, course=course, lane=lane, table=source.table)
            with contextlib.closing(made):
                send_chunks(lane, let, table=source.table, digest_of=source.digest, moved=sent)
            tally.sending_s(hello.first, lane.sending_s)
            chunks = lane.receive_result(own)
            if not chunks:
                return
    raise CorruptError(
        f"{len(chunks)} chunks, chunk {chunks[0]} first, arrive bad however often they are sent"
    )


def _let_pass(
    made: Iterable[tuple[int, Payload]],
    *,
    gate: ChunkGate | None,
    course: Course | None,
    lane: Lane,
    table: ChunkTable,
) -> Iterator[tuple[int, Payload]]:
    """Each payload when its turn has come. Waiting for it counts as sending: to the planner the link is that slow."""
    for index, payload in made:
        if gate is not None:
            started = time.perf_counter()
            gate.wait(lane, len(payload.data), lane.check)
            lane.sending_s += time.perf_counter() - started
        yield index, payload
        if course is not None:
            start, stop = table.range(index)
            course.sent(raw_bytes=stop - start, sent_bytes=len(payload.data))


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
    rest = deque(chunks)
    try:
        while rest or orders:
            while rest and len(orders) <= AHEAD:
                index = rest.popleft()
                orders.append((index, source.order(index, against_base=against_base, plain=plain)))
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
    with passing(gate, lane):
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


def get_asked(
    lane: Lane,
    hello: Hello,
    *,
    manifest: pb.ShardManifest,
    table: ChunkTable,
    into: memoryview,
    counters: Counters,
    asker: ChunkAsker,
    pool: CodecPool | None = None,
) -> None:
    """Receive the chunks that `asker` has this connection ask for, each into its place; a bad one is told to it.

    Those that are not for their place any more are received, and thrown away. Without a `pool` to decode, none may come
    encoded.

    Raises:
        CorruptError: `asker` gives the source up.
        FrameError, PeerError: see `Lane`.
    """
    arriving = Arriving(table, manifest.chunk_digests, pool)
    due: set[int] = set()
    scrap = bytearray(0)
    lane.send_hello(hello)
    while (run := asker.next(lane.check)) is not None:
        if run:
            lane.send_want(run)
            due.update(run)
        header = lane.receive_header()
        check_data_frame(header, table=table, first=0, stride=1)
        index = header.chunk
        if header.codec not in arriving.codecs or index not in due:
            raise FrameError(f"chunk {index} comes as {header.codec.name}, or was not asked for")
        due.discard(index)
        start, stop = table.range(index)
        in_place = asker.wanted(index)
        if not in_place and len(scrap) < stop - start:
            scrap = bytearray(stop - start)
        with (
            into[start:stop] if in_place else memoryview(scrap)[: stop - start] as place,
            arriving.payload_place(header, place) as payload,
        ):
            lane.receive_into(payload)
            good = arriving.settle(header, payload, place, lane.check)
        counters.add("bytes_received", header.encoded_bytes)
        if good:
            asker.got(index)
        else:
            counters.add("corrupt_received")
            asker.came_bad(index)
    if not due:
        lane.send_end(0)


@contextlib.contextmanager
def passing(gate: ChunkGate | None, lane: Lane) -> Iterator[None]:
    """While a lane's chunks are held up by the gate, if there is one."""
    if gate is None:
        yield
        return
    gate.begin(lane)
    try:
        yield
    finally:
        gate.end(lane)
