"""A shard on its way out: its chunk digests, and each chunk in the form in which it travels.

A shard goes to several holders over several connections at once. Each chunk is hashed once and, for all
holders that have the same base, encoded once, whoever needs it first. Which chunks are worth encoding is
the planner's decision (`choose`), which holder has which base the put's. Nothing here sends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..chunks import ChunkTable
from ..codec.chunk_plan import ChunkPlan
from ..codec.decoder import raw_way_back, turn_around
from ..codec.encoder import Encoded, Use, encode, unchanged
from ..codec.fitting import Fits
from ..codec.format import NO_DIGEST
from ..digests import DIGEST_BYTES, chunk_digest
from ..errors import InvalidRequestError
from .codec_pool import CodecPool, call_off, outcome
from .codec_uses import raw_use
from .frames import Codec

#: Encoded chunks kept for holders that have not taken them yet, per shard; beyond, they are encoded again.
KEPT_BYTES_MAX = 32 << 20
#: What keeping one costs besides its bytes.
_KEPT_OVERHEAD_BYTES = 1024
#: Two threads wait for each other's digests only when their chunks share a lock.
_LOCKS = 64

_Key = tuple[int, bool]


@dataclass(frozen=True, slots=True)
class BaseSource:
    """An earlier step of the same shard that this node still has: digests and read-only bytes."""

    step: int
    #: Of the shard.
    digest: bytes
    #: 16 bytes for each chunk.
    chunk_digests: bytes
    view: memoryview
    table: ChunkTable


@dataclass(frozen=True, slots=True)
class Payload:
    """One chunk as it travels."""

    codec: Codec
    data: memoryview | bytes
    uses: tuple[Use, ...]


class _Encoding:
    """A chunk that is being encoded, or is kept until every holder has taken it."""

    def __init__(self, future: Future[Payload | None], left: int) -> None:
        self.future = future
        #: Orders that wait for it: without any it is called off.
        self.waiting = 0
        #: Holders that have not taken it yet.
        self.left = left
        #: Charged against KEPT_BYTES_MAX, from the first taker on.
        self.kept_bytes = 0


class ShardSource:
    """The shard in `view`, cut by `table`. Thread-safe; the bytes must not change any more.

    `plans` says what each chunk consists of. `base` is dropped when its chunks are cut otherwise.
    `choose(index)` is asked once per chunk and order whether encoding it pays. `prepare(index)`, if given, is
    run once per chunk before anything else is done with it, and may change its bytes: a lossy coding. `fits` has the
    learning rates that other shards of the save have found. `on_way_back(index, record)`, if given, gets what turns
    each chunk that was to be encoded against the base back into the base's, in the thread that encoded it.
    """

    def __init__(
        self,
        view: memoryview,
        table: ChunkTable,
        *,
        step: int,
        plans: Sequence[ChunkPlan],
        base: BaseSource | None,
        pool: CodecPool,
        choose: Callable[[int], bool],
        prepare: Callable[[int], None] | None = None,
        fits: Fits | None = None,
        on_way_back: Callable[[int, bytes], None] | None = None,
    ) -> None:
        if not (len(view) == table.shard_bytes and table.lengths == [plan.bytes for plan in plans]):
            raise InvalidRequestError("view, chunk table and plans do not describe the same shard")
        self.view = view
        self.table = table
        self.base = base if base is not None and base.table == table else None
        #: Thread seconds that encoding has taken, and chunks that it made smaller.
        self.encode_s = 0.0
        self.encoded_chunks = 0
        self._step = step
        self._plans = plans
        self._pool = pool
        self._choose = choose
        self._prepare = prepare
        self._fits = fits or Fits()
        self._on_way_back = on_way_back
        self._digests: list[bytes | None] = [None] * len(table)
        self._digest_locks = [threading.Lock() for _ in range(min(_LOCKS, len(table)))]
        self._lock = threading.Lock()
        #: Puts under way, without and with the base.
        self._puts = [0, 0]
        self._kept: dict[_Key, _Encoding] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self.table)

    def digest(self, index: int) -> bytes:
        """16-byte digest of one chunk."""
        known = self._digests[index]
        if known is not None:
            return known
        with self._digest_locks[index % len(self._digest_locks)]:
            known = self._digests[index]
            if known is None:
                if self._prepare is not None:
                    self._prepare(index)
                with self._slice(index) as data:
                    known = self._digests[index] = chunk_digest(data)
        return known

    def complete(self) -> bytes:
        """All digests, 16 bytes each, in order; computes what is missing, so it may take a while."""
        return b"".join(self.digest(index) for index in range(len(self)))

    @contextlib.contextmanager
    def put_under_way(self, *, against_base: bool) -> Iterator[None]:
        """While one holder is sent the shard. Inside, each chunk is ordered once, resends aside."""
        with self._lock:
            self._puts[against_base] += 1
        try:
            yield
        finally:
            with self._lock:
                self._puts[against_base] -= 1
                if not self._puts[against_base]:
                    for key in [key for key in self._kept if key[1] == against_base]:
                        self._forget(key)

    def order(self, index: int, *, against_base: bool, plain: bool = False) -> Order:
        """Begin to make a chunk's payload; `plain`: as it is, without asking anybody.

        A chunk equal to the base's costs its header, whatever `choose` says.

        Raises:
            PeerError: the pool is closed.
        """
        if plain:
            return Order(self, index, against_base, None)
        with self._lock:
            found = self._join(index, against_base)
        if found is not None:
            return found
        if self._prepare is None and not self._needs_work(index, against_base):
            return Order(self, index, against_base, None, self._unchanged(index, against_base))
        with self._lock:
            found = self._join(index, against_base)
            if found is None:
                self._kept[index, against_base] = _Encoding(
                    self._pool.submit(self._make, index, against_base), self._puts[against_base]
                )
                found = self._join(index, against_base)
        assert found is not None
        return found

    def payload(self, index: int, *, against_base: bool, plain: bool = False) -> Payload:
        """A chunk's payload, made now."""
        with self.order(index, against_base=against_base, plain=plain) as order:
            return order.take(lambda: None)

    def _join(self, index: int, against_base: bool) -> Order | None:
        """With the lock held: an order for what is made or kept already."""
        encoding = self._kept.get((index, against_base))
        if encoding is None:
            return None
        encoding.waiting += 1
        return Order(self, index, against_base, encoding)

    def _slice(self, index: int) -> memoryview:
        start, stop = self.table.range(index)
        return self.view[start:stop]

    def _raw(self, index: int) -> Payload:
        data = self._slice(index)
        return Payload(Codec.RAW, data, raw_use(len(data)))

    def _base_digest(self, index: int) -> bytes:
        assert self.base is not None, "against_base without a base"
        return self.base.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def _unchanged(self, index: int, against_base: bool) -> Payload | None:
        """The chunk as "nothing changed", if that is so."""
        if not against_base or self.digest(index) != self._base_digest(index):
            return None
        assert self.base is not None
        size = self._plans[index].bytes
        encoded = unchanged(size, step=self._step, base_step=self.base.step, digest=self.digest(index))
        return Payload(Codec.ENCODED, encoded.payload, encoded.uses)

    def _needs_work(self, index: int, against_base: bool) -> bool:
        if against_base and self.digest(index) == self._base_digest(index):
            return False
        return self._choose(index)

    def _make(self, index: int, against_base: bool) -> Payload | None:
        """In a thread of the pool: the chunk encoded; None if it does not shrink or is not to be encoded."""
        digest = self.digest(index)
        if self._prepare is not None and not self._needs_work(index, against_base):
            return self._unchanged(index, against_base)
        base: memoryview | None = None
        base_step, base_digest = 0, NO_DIGEST
        if against_base:
            assert self.base is not None
            start, stop = self.table.range(index)
            base, base_step = self.base.view[start:stop], self.base.step
            base_digest = self._base_digest(index)
        started_s = time.thread_time()
        encoded = encode(
            self._slice(index),
            base,
            self._plans[index],
            step=self._step,
            base_step=base_step,
            digest=digest,
            base_digest=base_digest,
            fits=self._fits,
        )
        seconds = time.thread_time() - started_s
        if base is not None and self._on_way_back is not None:
            self._on_way_back(index, self._way_back(index, base, encoded))
        with self._lock:
            self.encode_s += seconds
            self.encoded_chunks += encoded is not None
        return None if encoded is None else Payload(Codec.ENCODED, encoded.payload, encoded.uses)

    def _way_back(self, index: int, base: memoryview, encoded: Encoded | None) -> bytes:
        if encoded is not None:
            return turn_around(encoded.payload, base, self._slice(index))
        assert self.base is not None
        return raw_way_back(
            base,
            step=self.base.step,
            newer_step=self._step,
            digest=self._base_digest(index),
            newer_digest=self.digest(index),
        )

    def _taken(self, key: _Key, encoding: _Encoding, payload: Payload | None) -> None:
        with self._lock:
            encoding.waiting -= 1
            encoding.left -= 1
            if self._kept.get(key) is not encoding:
                return
            if encoding.left <= 0:
                self._forget(key)
                return
            if not encoding.kept_bytes:
                size = _KEPT_OVERHEAD_BYTES + (len(payload.data) if payload else 0)
                encoding.kept_bytes = size
                self._kept_bytes += size
            while self._kept_bytes > KEPT_BYTES_MAX:
                self._forget(next(key for key, kept in self._kept.items() if kept.kept_bytes))

    def _dropped(self, key: _Key, encoding: _Encoding) -> None:
        with self._lock:
            encoding.waiting -= 1
            last = encoding.waiting == 0
            if last and self._kept.get(key) is encoding and not encoding.kept_bytes:
                self._forget(key)
        if last:
            call_off(encoding.future)

    def _forget(self, key: _Key) -> None:
        self._kept_bytes -= self._kept.pop(key).kept_bytes


class Order:
    """A chunk asked for: `take` it, or `drop` it. As a context it is dropped at the end."""

    def __init__(
        self,
        source: ShardSource,
        index: int,
        against_base: bool,
        encoding: _Encoding | None,
        ready: Payload | None = None,
    ) -> None:
        self._source = source
        self._key = (index, against_base)
        self._encoding = encoding
        self._ready = ready

    def __enter__(self) -> Order:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def take(self, still_wanted: Callable[[], None]) -> Payload:
        """Wait for the payload. Once; `still_wanted` raises to end the wait.

        Raises:
            PeerError: the pool was closed.
        """
        payload = self._ready
        if self._encoding is not None:
            payload = outcome(self._encoding.future, still_wanted)
            encoding, self._encoding = self._encoding, None
            self._source._taken(self._key, encoding, payload)
        return payload if payload is not None else self._source._raw(self._key[0])

    def drop(self) -> None:
        """It is not needed any more. When this returns no thread works on it for this order's sake."""
        if self._encoding is not None:
            encoding, self._encoding = self._encoding, None
            self._source._dropped(self._key, encoding)
