"""The chunks of one load, gathered by the threads of many connections: `sharing` behind a lock and a clock.

Also the node's loads among each other: each may have an equal part of what is asked for on this node at a time, so
that ranks which restore together share its link.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..errors import CorruptError
from .sharing import Part, Sharing

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


class Gathering:
    """One load's shards on their way here. Thread-safe.

    Args:
        shards: those that may have to be fetched, by number.
        parts: of which of them only some chunks are wanted.
        on_bytes: told how many good bytes came from which node; called by the threads that read them, one at a time.
    """

    def __init__(
        self,
        shards: Iterable[int],
        turns: FairTurns,
        on_bytes: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
        parts: Mapping[int, Part] | None = None,
    ) -> None:
        self._sharing = Sharing(shards, parts)
        self._turns = turns
        self._on_bytes = on_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._ends: dict[int, Callable[[], None]] = {}
        self._manifests: dict[int, pb.ShardManifest] = {}

    def source(self, shard: int, node_id: str) -> Source:
        """One node's part in bringing a shard."""
        return Source(self, shard, node_id)

    def manifest(self, shard: int) -> pb.ShardManifest | None:
        """What its holders say of a shard, once all of its chunks that are wanted are here."""
        with self._changed:
            return self._manifests[shard] if self._sharing.finished(shard) else None

    def bad_chunks(self, shard: int, node_id: str) -> int:
        """How many of a shard's chunks came bad from a node."""
        with self._changed:
            return self._sharing.bad_chunks(node_id, shard)

    def was_too_slow(self, shard: int, node_id: str) -> bool:
        """Whether a node's connection was ended so that others could take over what it was asked for."""
        with self._changed:
            return self._sharing.was_too_slow(node_id, shard)

    def is_read(self, shard: int) -> bool:
        """Whether somebody is reading a shard now."""
        with self._changed:
            return self._sharing.is_read(shard)

    def _describe(self, shard: int, manifest: pb.ShardManifest, table: ChunkTable) -> bool:
        with self._changed:
            if fits := self._sharing.describe(shard, table):
                self._manifests[shard] = manifest
            return fits

    @contextlib.contextmanager
    def _reader(self, source: Source, end: Callable[[], None], bad: list[int]) -> Iterator[_Reader]:
        with self._changed:
            number = self._sharing.join(source.shard, source.node_id, self._clock())
            self._ends[number] = end
        try:
            yield _Reader(self, source, number, bad)
        finally:
            with self._changed:
                del self._ends[number]
                self._sharing.leave(number)
                self._changed.notify_all()

    def _next(self, number: int, still_wanted: Callable[[], None], *, idle: bool) -> Sequence[int] | None:
        while True:
            with self._changed:
                turn = self._sharing.turn(number, self._clock(), self._turns.allowance_bytes)
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
            return self._sharing.wanted(number, chunk)

    def _got(self, number: int, source: Source, chunk: int) -> None:
        with self._changed:
            size = self._sharing.got(number, chunk, self._clock())
            if size:
                self._on_bytes(source.node_id, size)
            self._changed.notify_all()

    def _came_bad(self, number: int, chunk: int) -> bool:
        with self._changed:
            self._changed.notify_all()
            return self._sharing.came_bad(number, chunk, self._clock())


class Source:
    """What `PeerClient.read_shard` asks about one node and one shard."""

    def __init__(self, gathering: Gathering, shard: int, node_id: str) -> None:
        self._gathering = gathering
        self.shard = shard
        self.node_id = node_id

    def describe(self, manifest: pb.ShardManifest, table: ChunkTable) -> bool:
        """See `ShardDesk`."""
        return self._gathering._describe(self.shard, manifest, table)

    def reader(self, end: Callable[[], None], bad: list[int]) -> contextlib.AbstractContextManager[_Reader]:
        """See `ShardDesk`."""
        return self._gathering._reader(self, end, bad)


class _Reader:
    """One connection's questions; see `ChunkAsker`. Used by its thread."""

    def __init__(self, gathering: Gathering, source: Source, number: int, bad: list[int]) -> None:
        self._gathering = gathering
        self._source = source
        self._number = number
        self._bad = bad
        self._under_way = 0

    def next(self, still_wanted: Callable[[], None]) -> Sequence[int] | None:
        run = self._gathering._next(self._number, still_wanted, idle=self._under_way == 0)
        self._under_way += len(run or ())
        return run

    def wanted(self, chunk: int) -> bool:
        return self._gathering._wanted(self._number, chunk)

    def got(self, chunk: int) -> None:
        self._under_way -= 1
        self._gathering._got(self._number, self._source, chunk)

    def came_bad(self, chunk: int) -> None:
        self._under_way -= 1
        self._bad.append(chunk)
        if not self._gathering._came_bad(self._number, chunk):
            raise CorruptError(f"chunk {chunk} is the last of too many that are not what was committed")
