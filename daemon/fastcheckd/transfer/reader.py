"""What the connections of a fetch share: the schedule behind a lock and a clock, and how a chunk gets to its place.

Also the node's loads among each other: each may ask for an equal part of what is asked for on this node at a time, so
that ranks which restore together share its link.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.decoder import decode, read_header
from ..codec.encoder import Use
from ..counters import Counters
from ..digests import DIGEST_BYTES, chunk_digest
from ..errors import CodecError, CorruptError
from .channel import Channel
from .codec_pool import CodecPool, call_off, outcome
from .frames import CODEC_OVERHEAD_BYTES_MAX, Codec, FrameHeader, check_data_frame
from .scheduler import Scheduler, WantedChunks
from .target import Target

#: Asked for at once by all loads of a node: a quarter second of a link of 4 Gbit/s, and more than that of none.
IN_FLIGHT_BYTES = 128 << 20
#: A reader without work looks again this often, whether somebody has become slow.
_LOOK_AGAIN_S = 0.1


class FairTurns:
    """How much each of the node's loads may ask for at a time. Entered and left on the event loop, read by threads."""

    def __init__(self, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._in_flight_bytes = in_flight_bytes
        self._loads = 0

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """A load is under way."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1

    @property
    def allowance_bytes(self) -> int:
        """An equal part for each load."""
        return self._in_flight_bytes // max(1, self._loads)


class FetchProgress:
    """The shards of one load, or the one of a copy, on their way here. Thread-safe.

    Args:
        shards: those that may have to be fetched, by number.
        parts: of which of them only some chunks are wanted.
        on_bytes: told how many good bytes came from which node; called by the threads that read them, one at a time.
    """

    def __init__(
        self,
        shards: Iterable[int],
        turns: FairTurns,
        on_bytes: Callable[[str, int], None] = lambda _node, _count: None,
        clock: Callable[[], float] = time.monotonic,
        parts: Mapping[int, WantedChunks] | None = None,
    ) -> None:
        self._scheduler = Scheduler(shards, parts)
        self._turns = turns
        self._on_bytes = on_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._ends: dict[int, Callable[[], None]] = {}
        self._manifests: dict[int, pb.ShardManifest] = {}
        self._received_bytes = 0

    @property
    def received_bytes(self) -> int:
        """Payload bytes that came over the lane, good ones."""
        with self._changed:
            return self._received_bytes

    def source(self, shard: int, node_id: str) -> Source:
        """One node's part in bringing a shard."""
        return Source(self, shard, node_id)

    def manifest(self, shard: int) -> pb.ShardManifest | None:
        """What its holders say of a shard, once all of its chunks that are wanted are here."""
        with self._changed:
            return self._manifests[shard] if self._scheduler.finished(shard) else None

    def bad_chunks(self, shard: int, node_id: str) -> int:
        """How many of a shard's chunks came bad from a node as they are."""
        with self._changed:
            return self._scheduler.bad_chunks(node_id, shard)

    def was_too_slow(self, shard: int, node_id: str) -> bool:
        """Whether a node's connection was ended so that others could take over what it was asked for."""
        with self._changed:
            return self._scheduler.was_too_slow(node_id, shard)

    def is_read(self, shard: int) -> bool:
        """Whether somebody is reading a shard now."""
        with self._changed:
            return self._scheduler.is_read(shard)

    def describe(
        self, shard: int, manifest: pb.ShardManifest, table: ChunkTable, missing: Sequence[int] | None = None
    ) -> bool:
        """What a source says of the shard, proved by its digest; False if it is cut in another way."""
        with self._changed:
            if fits := self._scheduler.describe(shard, table, missing):
                self._manifests[shard] = manifest
            return fits

    @contextlib.contextmanager
    def _reader(self, source: Source, end: Callable[[], None], bad: list[int]) -> Iterator[SourceReader]:
        with self._changed:
            number = self._scheduler.join(source.shard, source.node_id, self._clock())
            self._ends[number] = end
        try:
            yield SourceReader(self, source, number, bad)
        finally:
            with self._changed:
                del self._ends[number]
                self._scheduler.leave(number)
                self._changed.notify_all()

    def _next(self, number: int, still_wanted: Callable[[], None], *, idle: bool) -> Sequence[int] | None:
        while True:
            with self._changed:
                turn = self._scheduler.turn(number, self._clock(), self._turns.allowance_bytes)
                if turn.end is not None:
                    self._ends[turn.end]()
                if turn.over:
                    self._changed.notify_all()
                    return None
                if turn.ask or not idle:
                    return turn.ask
                self._changed.wait(_LOOK_AGAIN_S)
            still_wanted()

    def _wanted(self, number: int, chunk: int) -> bool:
        with self._changed:
            return self._scheduler.wanted(number, chunk)

    def _got(self, number: int, source: Source, chunk: int, received_bytes: int) -> None:
        with self._changed:
            self._received_bytes += received_bytes
            size = self._scheduler.got(number, chunk, self._clock())
            if size:
                self._on_bytes(source.node_id, size)
            self._changed.notify_all()

    def _came_bad(self, number: int, chunk: int, *, encoded: bool) -> bool:
        with self._changed:
            self._changed.notify_all()
            return self._scheduler.came_bad(number, chunk, self._clock(), encoded=encoded)


class Source:
    """One node's part in bringing a shard."""

    def __init__(self, progress: FetchProgress, shard: int, node_id: str) -> None:
        self._progress = progress
        self.shard = shard
        self.node_id = node_id

    def reading(self, end: Callable[[], None], bad: list[int]) -> AbstractContextManager[SourceReader]:
        """In the thread of a connection, while it reads. `end` makes it fail soon; bad chunks are noted in `bad`."""
        return self._progress._reader(self, end, bad)


class SourceReader:
    """Says what one connection is to ask for. Used by its thread."""

    def __init__(self, progress: FetchProgress, source: Source, number: int, bad: list[int]) -> None:
        self._progress = progress
        self._source = source
        self._number = number
        self._bad = bad
        self._under_way = 0

    def next(self, still_wanted: Callable[[], None]) -> Sequence[int] | None:
        """Chunks to ask for now, none if enough is under way; None: the connection is of no more use.

        Returns nothing only while something is under way: else it waits, and `still_wanted` raises when nobody
        needs the connection any more.
        """
        run = self._progress._next(self._number, still_wanted, idle=self._under_way == 0)
        self._under_way += len(run or ())
        return run

    def wanted(self, chunk: int) -> bool:
        """A chunk that was asked for begins to arrive: whether it is still for its place, which then is this one's."""
        return self._progress._wanted(self._number, chunk)

    def got(self, chunk: int, received_bytes: int) -> None:
        """It is whole, and what it should be if it was for its place."""
        self._under_way -= 1
        self._progress._got(self._number, self._source, chunk, received_bytes)

    def came_bad(self, chunk: int, *, encoded: bool) -> None:
        """It is not what it should be; raises CorruptError if there is no point in going on."""
        self._under_way -= 1
        if not encoded:
            self._bad.append(chunk)
        if not self._progress._came_bad(self._number, chunk, encoded=encoded):
            raise CorruptError(f"chunk {chunk} is the last of too many that are not what was committed")


class _Buffers:
    """Memory of one connection's thread for what is not received where it belongs. Made when first needed."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._payload: memoryview | None = None
        self._scrap: memoryview | None = None

    def payload(self, size: int) -> memoryview:
        """For an encoded chunk."""
        if self._payload is None:
            self._payload = memoryview(bytearray(self._longest + CODEC_OVERHEAD_BYTES_MAX))
        return self._payload[:size]

    def scrap(self, size: int) -> memoryview:
        """For what is thrown away."""
        if self._scrap is None:
            self._scrap = memoryview(bytearray(self._longest + CODEC_OVERHEAD_BYTES_MAX))
        return self._scrap[:size]


class ChunkReceiver:
    """Gets chunks of one shard to their places: raw ones straight, encoded ones decoded by `pool`. Thread-safe.

    Args:
        digests: 16 bytes for each chunk, proved.
    """

    def __init__(
        self, table: ChunkTable, digests: bytes, target: Target, pool: CodecPool, counters: Counters
    ) -> None:
        self._table = table
        self._digests = digests
        self._target = target
        self._pool = pool
        self._counters = counters

    @contextlib.contextmanager
    def buffers(self) -> Iterator[_Buffers]:
        """For one connection."""
        yield _Buffers(self._table.longest)

    def check(self, header: FrameHeader) -> None:
        """Raise FrameError unless a frame is one of the shard's chunks, with the size and place it must have."""
        check_data_frame(header, self._table)

    def receive(self, channel: Channel, header: FrameHeader, buffers: _Buffers, *, in_place: bool) -> bool:
        """Receive a chunk's payload and put the chunk in its place, or throw it away; whether it is good.

        Raises:
            PeerError, FrameError: see `Channel`; PeerError, too, when the pool was closed.
            StoreError: the target has no room.
        """
        size = header.encoded_bytes
        if not in_place:
            channel.receive_into(buffers.scrap(size))
            self._counters.add("bytes_received", size)
            return True
        with self._target.place(header.chunk) as place:
            if header.codec == Codec.RAW:
                channel.receive_into(place)
                good = self._is_good(header.chunk, place)
                if good:
                    self._target.received(header.chunk, None, (Use("raw", size, size),))
            else:
                with buffers.payload(size) as payload:
                    channel.receive_into(payload)
                    good = self._decode(channel, header.chunk, payload, place)
        self._counters.add("bytes_received", size)
        self._counters.add("corrupt_received", not good)
        return good

    def _is_good(self, index: int, place: memoryview) -> bool:
        return chunk_digest(place) == self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def _decode(self, channel: Channel, index: int, payload: memoryview, place: memoryview) -> bool:
        job = self._pool.submit(self._settle, index, payload, place)
        try:
            return outcome(job, channel.check)
        except BaseException:
            call_off(job)  # nobody writes to the place any more
            raise

    def _settle(self, index: int, payload: memoryview, place: memoryview) -> bool:
        """In a thread of the pool."""
        try:
            needs_base = read_header(payload).needs_base
            with self._target.base(index) as base:
                uses = decode(payload, base, place)
        except CodecError:
            return False  # counted as any chunk that is not what it should be
        if not self._is_good(index, place):
            return False
        self._target.received(index, payload if needs_base else None, uses)
        return True
