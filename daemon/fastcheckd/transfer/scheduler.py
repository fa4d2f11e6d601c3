"""Who of several readers gets which chunks of a load's shards, while it goes on. Pure: `now` is a parameter.

A reader is one connection to one source that has one of the shards. Nobody is given a share beforehand: each asks
for a few chunks at a time, as many as it has lately received in `AHEAD_S`, so that whoever is fast takes more.
When a shard has no chunk left that nobody was asked for, a reader that is done takes over what a much slower one was
asked for: one chunk at a time, the one that would come last. What that one sends of it all the same is thrown away,
unless its bytes are arriving at this moment: then its connection is ended first, so that no two readers write to one
place. What a reader leaves behind is anybody's again; what has come, and was checked, stays.

A source that is asked for several shards is asked first for the one of which most is left per source that has it:
what only it has may not wait for what others could give as well.

Nothing here knows of sockets, threads or digests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..chunks import ChunkTable

#: Seconds' worth of bytes that a reader is asked for ahead: far above a round trip, far below a load.
AHEAD_S = 0.25
#: Asked for ahead of any measurement, if that is more than two chunks.
AHEAD_BYTES_MIN = 1 << 20
#: Chunks in one request.
RUN_CHUNKS_MAX = 1024
#: A chunk is taken over if its reader needs this many times as long as the other one, and a little more.
SLOWER = 2.0
TAKE_OVER_S = 0.05
#: The same where a connection has to be ended for it.
END_S = 0.5
#: Guess for a reader before its first chunk, when no other one has an average either.
RATE_GUESS_BYTES_PER_S = 50e6
#: A source is asked this often at most for a chunk that comes bad: the wire may have been it.
TRIES_MAX = 2
#: So many bad chunks, and a source is not asked for the shard any more.
BAD_CHUNKS_MAX = 16
#: A shard counts as needier than another one of the same source when it is by so much.
NEEDIER = 1.25
#: A reader that yields to a needier shard asks for something all the same after this long: it shows that it lives.
YIELD_S_MAX = 1.0
#: Weight of the newest measurement in a reader's rate.
_NEWEST = 0.3


@dataclass(frozen=True)
class WantedChunks:
    """Only these chunks of a shard are wanted, as it is cut here."""

    table: ChunkTable
    #: Rising.
    chunks: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """All of them together."""
        return sum(stop - start for start, stop in map(self.table.range, self.chunks))


@dataclass(frozen=True)
class Turn:
    """What a reader is to do now."""

    #: Chunks to ask its source for.
    ask: tuple[int, ...] = ()
    #: A reader whose connection is to be ended, so that what it leaves can be taken over.
    end: int | None = None
    #: It is of no more use.
    over: bool = False


@dataclass
class _Shard:
    #: None: all of it is wanted, however it is cut.
    part: WantedChunks | None = None
    table: ChunkTable | None = None
    #: How many chunks are wanted.
    count: int = 0
    #: Chunks that nobody was asked for, as a heap.
    waiting: list[int] = field(default_factory=list)
    waiting_bytes: int = 0
    #: Chunks that came good.
    done: set[int] = field(default_factory=set)
    finished: bool = False


@dataclass
class _Reader:
    shard: int
    source: str
    #: When it was asked while it had nothing to do, or last received a chunk.
    since: float
    #: Chunks that it was asked for and that did not come yet, in order; False for those that were taken over.
    pending: dict[int, bool] = field(default_factory=dict)
    pending_bytes: int = 0
    #: The chunk whose bytes are arriving in its place.
    arriving: int | None = None
    rate: float | None = None
    ended: bool = False


class Scheduler:
    """The chunks of one load and its readers. Used by one thread at a time.

    Args:
        shards: that are to be brought, by any key.
        parts: of which of them not all is wanted.
    """

    def __init__(self, shards: Iterable[int], parts: Mapping[int, WantedChunks] | None = None) -> None:
        self._shards = {key: _Shard((parts or {}).get(key)) for key in shards}
        self._readers: dict[int, _Reader] = {}
        self._next_reader = 0
        #: (source, shard) → chunk → how often it came bad from there.
        self._bad: dict[tuple[str, int], dict[int, int]] = {}
        #: (source, shard) → chunks that came bad from there as they are.
        self._bad_raw: dict[tuple[str, int], set[int]] = {}
        #: (source, shard) whose connections were ended for being slow.
        self._too_slow: set[tuple[str, int]] = set()

    # --- what there is ---------------------------------------------------------------------------

    def describe(self, shard: int, table: ChunkTable, missing: Sequence[int] | None = None) -> bool:
        """Say how a shard is cut, before its readers join; False when it is known to be cut in another way.

        Args:
            missing: the chunks that are wanted, rising, where only now it is known that others are here.
        """
        found = self._shards[shard]
        if missing is not None and found.part is None:
            found.part = WantedChunks(table, tuple(missing))
        if found.table == table:
            return True
        # The first to say it may have been wrong: it is believed no longer than it is of use.
        if found.done or self.is_read(shard):
            return False
        part = found.part or WantedChunks(table, tuple(range(len(table))))
        if part.table != table:
            return False
        found.table = table
        found.waiting = list(part.chunks)
        found.waiting_bytes = part.bytes
        found.count = len(part.chunks)
        found.finished = not part.chunks
        return True

    def is_read(self, shard: int) -> bool:
        """Whether a shard has readers."""
        return any(reader.shard == shard for reader in self._readers.values())

    def finished(self, shard: int) -> bool:
        """Whether all chunks of a shard are here."""
        return self._shards[shard].finished

    def bad_chunks(self, source: str, shard: int) -> int:
        """How many chunks of a shard came bad from a source as they are."""
        return len(self._bad_raw.get((source, shard), ()))

    def was_too_slow(self, source: str, shard: int) -> bool:
        """Whether a connection to a source was ended so that others could take over."""
        return (source, shard) in self._too_slow

    # --- readers ---------------------------------------------------------------------------------

    def join(self, shard: int, source: str, now: float) -> int:
        """A reader begins; its number."""
        number = self._next_reader
        self._next_reader += 1
        self._readers[number] = _Reader(shard, source, now)
        return number

    def leave(self, number: int) -> None:
        """A reader has ended: nothing writes for it any more, and what it had not received is anybody's."""
        reader = self._readers.pop(number)
        shard = self._shards[reader.shard]
        for chunk, own in reader.pending.items():
            if own:
                self._give_back(shard, chunk)

    def turn(self, number: int, now: float, allowance_bytes: int) -> Turn:
        """What a reader should ask for, so that all together ask for about `allowance_bytes`, or for a chunk each."""
        reader = self._readers[number]
        shard = self._shards[reader.shard]
        if reader.ended or shard.finished:
            return Turn(over=True)
        ask = self._run(reader, shard, now, allowance_bytes // max(1, len(self._readers)))
        if ask or reader.pending:
            return Turn(ask=ask)
        if any(self._may_have(reader, chunk) for chunk in shard.waiting):
            return Turn()  # it yields to another shard of its source
        stolen = self._take_over(number, now)
        if stolen.ask or stolen.end is not None:
            return stolen
        return Turn(over=not self._may_ever_help(reader))

    def wanted(self, number: int, chunk: int) -> bool:
        """The bytes of a chunk begin to arrive at a reader: whether they are for their place."""
        reader = self._readers[number]
        own = reader.pending[chunk]
        if own:
            reader.arriving = chunk
        return own

    def got(self, number: int, chunk: int, now: float) -> int:
        """A chunk arrived, good; its size in bytes if it is in its place, 0 if it was thrown away."""
        reader = self._readers[number]
        shard = self._shards[reader.shard]
        if not self._received(reader, chunk, now):
            return 0
        assert chunk not in shard.done, "no chunk is got twice"
        shard.done.add(chunk)
        shard.finished = len(shard.done) == shard.count
        return self._size(shard, chunk)

    def came_bad(self, number: int, chunk: int, now: float, *, encoded: bool = False) -> bool:
        """A chunk is not what it should be. False: the source is not worth asking any more.

        One that came encoded says nothing of the source: this node's base may be bad. It comes again as it is.
        """
        reader = self._readers[number]
        name = reader.source, reader.shard
        counts = self._bad.setdefault(name, {})
        counts[chunk] = counts.get(chunk, 0) + 1
        bad_raw = self._bad_raw.setdefault(name, set())
        if not encoded:
            bad_raw.add(chunk)
        if self._received(reader, chunk, now):
            self._give_back(self._shards[reader.shard], chunk)
        return len(bad_raw) < BAD_CHUNKS_MAX

    # --- rules -----------------------------------------------------------------------------------

    def _run(self, reader: _Reader, shard: _Shard, now: float, share_bytes: int) -> tuple[int, ...]:
        """The next chunks that nobody was asked for; none if enough of the reader's are under way."""
        if not shard.waiting:
            return ()
        assert shard.table is not None
        ahead = max(AHEAD_BYTES_MIN, 2 * shard.table.longest, int((reader.rate or 0.0) * AHEAD_S))
        limit = min(ahead, max(share_bytes, 1))
        if reader.pending and reader.pending_bytes > limit // 2:
            return ()
        if self._yields(reader, shard, now):
            return ()
        run: list[int] = []
        passed: list[int] = []
        was_idle = not reader.pending
        while shard.waiting and len(run) < RUN_CHUNKS_MAX:
            size = self._size(shard, shard.waiting[0])
            if reader.pending and reader.pending_bytes + size > limit:
                break
            chunk = heapq.heappop(shard.waiting)
            if not self._may_have(reader, chunk):
                passed.append(chunk)
                continue
            shard.waiting_bytes -= size
            self._ask(reader, shard, chunk)
            run.append(chunk)
        for chunk in passed:
            heapq.heappush(shard.waiting, chunk)
        if was_idle and run:
            reader.since = now
        return tuple(run)

    def _yields(self, reader: _Reader, shard: _Shard, now: float) -> bool:
        """Whether the source is busy with a shard that needs it more."""
        if not reader.pending and now - reader.since > YIELD_S_MAX:
            return False
        need = self._need(reader.shard)
        return any(
            other.source == reader.source
            and other.shard != reader.shard
            and other.pending
            and not other.ended
            and self._need(other.shard) > NEEDIER * need
            for other in self._readers.values()
        )

    def _need(self, shard: int) -> float:
        """Bytes that nobody was asked for, per source."""
        sources = {reader.source for reader in self._live(shard)}
        return self._shards[shard].waiting_bytes / max(1, len(sources))

    def _take_over(self, number: int, now: float) -> Turn:
        """For a reader that has nothing to do: the chunk of a slower one that would come last of all."""
        reader = self._readers[number]
        shard = self._shards[reader.shard]
        latest: tuple[float, int, int] | None = None
        for victim_number, victim in self._readers.items():
            if victim.shard != reader.shard or victim.ended or victim.source == reader.source:
                continue
            ahead_bytes = 0
            for chunk, own in victim.pending.items():
                ahead_bytes += self._size(shard, chunk)
                if own and self._may_have(reader, chunk):
                    found = self._due_in_s(victim, ahead_bytes, now), victim_number, chunk
                    latest = found if latest is None else max(latest, found)
        if latest is None:
            return Turn()
        due_in_s, victim_number, chunk = latest
        victim = self._readers[victim_number]
        is_arriving = victim.arriving == chunk
        own_s = self._size(shard, chunk) / self._rate(reader)
        if due_in_s <= SLOWER * own_s + (END_S if is_arriving else TAKE_OVER_S):
            return Turn()
        if is_arriving:
            victim.ended = True
            self._too_slow.add((victim.source, victim.shard))
            return Turn(end=victim_number)
        victim.pending[chunk] = False
        self._ask(reader, shard, chunk)
        reader.since = now
        return Turn(ask=(chunk,))

    def _due_in_s(self, reader: _Reader, ahead_bytes: int, now: float) -> float:
        """When a reader will have so many bytes more; one that is overdue, in as long as it already is."""
        waited_s = now - reader.since
        expected_s = ahead_bytes / reader.rate if reader.rate else 0.0
        return abs(expected_s - waited_s)

    def _rate(self, reader: _Reader) -> float:
        if reader.rate:
            return reader.rate
        known = [other.rate for other in self._readers.values() if other.rate]
        return sum(known) / len(known) if known else RATE_GUESS_BYTES_PER_S

    def _may_have(self, reader: _Reader, chunk: int) -> bool:
        """Whether its source may be asked for a chunk: after a bad one only if no other source can give it."""
        if chunk in reader.pending:
            return False  # taken over from it, and about to be thrown away
        bad = self._bad_from(reader, chunk)
        if bad == 0:
            return True
        return bad < TRIES_MAX and not any(
            other.source != reader.source and self._bad_from(other, chunk) == 0
            for other in self._live(reader.shard)
        )

    def _may_ever_help(self, reader: _Reader) -> bool:
        """Whether something is left that others may fail to bring, or that it may try once more."""
        shard = self._shards[reader.shard]
        at_others = (
            chunk
            for other in self._readers.values()
            if other is not reader and other.shard == reader.shard
            for chunk, own in other.pending.items()
            if own
        )
        return any(self._bad_from(reader, c) < TRIES_MAX for c in (*shard.waiting, *at_others))

    def _bad_from(self, reader: _Reader, chunk: int) -> int:
        return self._bad.get((reader.source, reader.shard), {}).get(chunk, 0)

    def _live(self, shard: int) -> Iterator[_Reader]:
        return (r for r in self._readers.values() if r.shard == shard and not r.ended)

    # --- books -----------------------------------------------------------------------------------

    def _size(self, shard: _Shard, chunk: int) -> int:
        assert shard.table is not None
        start, stop = shard.table.range(chunk)
        return stop - start

    def _ask(self, reader: _Reader, shard: _Shard, chunk: int) -> None:
        assert chunk not in reader.pending
        reader.pending[chunk] = True
        reader.pending_bytes += self._size(shard, chunk)

    def _received(self, reader: _Reader, chunk: int, now: float) -> bool:
        """Note that a chunk is no longer under way; whether it was the reader's own."""
        size = self._size(self._shards[reader.shard], chunk)
        own = reader.pending.pop(chunk)
        reader.pending_bytes -= size
        reader.arriving = None
        measured = size / max(now - reader.since, 1e-6)
        reader.rate = measured if reader.rate is None else reader.rate + _NEWEST * (measured - reader.rate)
        reader.since = now
        return own

    def _give_back(self, shard: _Shard, chunk: int) -> None:
        heapq.heappush(shard.waiting, chunk)
        shard.waiting_bytes += self._size(shard, chunk)
