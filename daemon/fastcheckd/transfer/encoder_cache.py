"""Chunks of this node's replicas in the form in which they travel: as they are, against a base, or encoded alone.

A reader names the steps that it has; the one that is here as well is the base. A chunk that several holders need
against the same base is encoded once. What a shard's bytes mean is known only while its save is under way
(`OutgoingShard`); a replica that is read otherwise is sent as it is, or encoded without a base where that pays.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb

from ..codec.chunk_plan import opaque
from ..codec.encoder import Encoded, encode
from ..codec.format import NO_DIGEST
from ..codec.standalone import encode_alone
from ..counters import Counters
from ..store.manifests import ReplicaId, replica_id
from ..store.replica import Replica
from ..store.replica_store import OpenReplica, ReplicaStore
from .channel import Channel
from .codec_pool import CodecPool, call_off, outcome
from .frames import Codec
from .outgoing import OutgoingShard
from .policy import RestorePolicy, is_chosen

#: Chunks that a connection has encoded ahead while it sends another one.
AHEAD = 2
#: Encoded chunks kept for holders that have not taken them yet, per shard; beyond, they are encoded again.
KEPT_BYTES_MAX = 32 << 20
#: What keeping one costs besides its bytes.
_KEPT_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """One chunk as it travels."""

    codec: Codec
    data: memoryview | bytes


class _Encoding:
    """A chunk that is being encoded, or is kept until every holder has taken it."""

    def __init__(self, future: Future[Encoded | None], left: int) -> None:
        self.future = future
        #: Connections that wait for it: without any it is called off.
        self.waiting = 0
        #: Holders that have not taken it yet.
        self.left = left
        #: Charged against KEPT_BYTES_MAX, from the first taker on.
        self.kept_bytes = 0


class ShardEncoder:
    """One open replica's chunks, for all connections that read it against one base. Thread-safe."""

    def __init__(
        self,
        replica: OpenReplica,
        base: OpenReplica | None,
        outgoing: OutgoingShard | None,
        *,
        pool: CodecPool,
        policy: RestorePolicy,
        counters: Counters,
    ) -> None:
        self.replica = replica.replica
        self.outgoing = outgoing
        self._open = replica
        self._base = base
        self._pool = pool
        self._policy = policy
        self._counters = counters
        self._lock = threading.Lock()
        self._kept: dict[int, _Encoding] = {}
        self._kept_bytes = 0

    def payloads(
        self, run: Sequence[int], channel: Channel, *, plain: Callable[[int], bool], lean: bool
    ) -> Generator[tuple[int, Payload], None, None]:
        """The payloads of some chunks in order; each stays valid until the next one is asked for.

        The next AHEAD are encoded meanwhile. Close it: then nothing works on the replica for it any more.

        Args:
            plain: whether a chunk has to go as it is.
            lean: encode against the base whatever can be.

        Raises:
            PeerError: the channel or the pool was ended.
            CorruptError: a chunk here is bad; the replica was dropped.
        """
        orders: deque[tuple[int, _Encoding | None]] = deque()
        rest = iter(run)
        policy = self._policy if self.outgoing is None else None
        if policy is not None:
            policy.begin()
        try:
            while True:
                while len(orders) <= AHEAD and (index := next(rest, None)) is not None:
                    wanted = not plain(index) and self._is_wanted(index, lean=lean)
                    orders.append((index, self._join(index) if wanted else None))
                if not orders:
                    return
                index, encoding = orders[0]
                encoded = None if encoding is None else outcome(encoding.future, channel.check)
                orders.popleft()
                if encoding is not None:
                    self._taken(index, encoding, encoded)
                before_s = channel.sending_s
                if encoded is not None:
                    size = len(encoded.payload)
                    yield index, Payload(Codec.ENCODED, encoded.payload)
                else:
                    with self._open.chunk(index) as view:
                        size = len(view)
                        yield index, Payload(Codec.RAW, view)
                if policy is not None:
                    policy.sent(size, channel.sending_s - before_s)
        finally:
            if policy is not None:
                policy.end()
            for index, left_over in reversed(orders):  # first those that have not begun, or they would
                if left_over is not None:
                    self._dropped(index, left_over)

    def close(self) -> None:
        """Nobody reads it any more."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _is_wanted(self, index: int, *, lean: bool) -> bool:
        """Whether a chunk should be encoded."""
        out = self.outgoing
        if self._base is not None:
            return lean or (out is not None and (out.lean or is_chosen(index, out.fraction)))
        return out.alone if out is not None else self._policy.choose()

    def _join(self, index: int) -> _Encoding:
        with self._lock:
            found = self._kept.get(index)
            if found is None:
                readers = 1 if self.outgoing is None else self.outgoing.readers
                found = self._kept[index] = _Encoding(self._pool.submit(self._encode, index), readers)
            found.waiting += 1
            return found

    def _encode(self, index: int) -> Encoded | None:
        """In a thread of the pool."""
        replica, out = self.replica, self.outgoing
        digest, step = replica.chunk_digest(index), replica.key.step
        started_s = time.thread_time()
        with self._open.chunk(index) as new, contextlib.ExitStack() as stack:
            if self._base is None and out is None:
                encoded = encode_alone(new, step=step, digest=digest)
            else:
                base = None if self._base is None else stack.enter_context(self._base.chunk(index))
                encoded = encode(
                    new,
                    base,
                    opaque(len(new)) if out is None else out.plans[index],
                    step=step,
                    base_step=0 if self._base is None else self._base.replica.key.step,
                    digest=digest,
                    base_digest=NO_DIGEST if self._base is None else self._base.replica.chunk_digest(index),
                    fits=None if out is None else out.fits,
                )
            seconds, size = time.thread_time() - started_s, len(new)
            encoded_bytes = size if encoded is None else len(encoded.payload)
            if out is None:
                self._policy.encoded(size, encoded_bytes, seconds)
            else:
                out.encoded(size, encoded_bytes, seconds, shrunk=encoded is not None)
            self._counters.add("encode_cpu_ms", round(seconds * 1000))
            self._counters.add("chunks_encoded", encoded is not None)
            if (
                encoded is not None
                and out is not None
                and out.on_encoded is not None
                and self._base is not None
            ):
                out.on_encoded(index, encoded.payload, new)
        return encoded

    def _taken(self, index: int, encoding: _Encoding, encoded: Encoded | None) -> None:
        with self._lock:
            encoding.waiting -= 1
            encoding.left -= 1
            if self._kept.get(index) is not encoding:
                return
            if encoding.left <= 0:
                self._forget(index)
                return
            if not encoding.kept_bytes:
                size = _KEPT_OVERHEAD_BYTES + (0 if encoded is None else len(encoded.payload))
                encoding.kept_bytes = size
                self._kept_bytes += size
            while self._kept_bytes > KEPT_BYTES_MAX:
                self._forget(next(at for at, kept in self._kept.items() if kept.kept_bytes))

    def _dropped(self, index: int, encoding: _Encoding) -> None:
        with self._lock:
            encoding.waiting -= 1
            last = encoding.waiting == 0
            if last and self._kept.get(index) is encoding and not encoding.kept_bytes:
                self._forget(index)
        if last:
            call_off(encoding.future)

    def _forget(self, index: int) -> None:
        self._kept_bytes -= self._kept.pop(index).kept_bytes


#: Shard and digest.
_ShardName = tuple[ReplicaId, bytes]
_EncoderName = tuple[Replica, Replica | None, OutgoingShard | None]


class EncoderCache:
    """The encoders of all shards that are read from this node. Thread-safe."""

    def __init__(
        self, store: ReplicaStore, pool: CodecPool, policy: RestorePolicy, counters: Counters
    ) -> None:
        self._store = store
        self._pool = pool
        self._policy = policy
        self._counters = counters
        self._lock = threading.Lock()
        self._outgoing: dict[_ShardName, OutgoingShard] = {}
        self._encoders: dict[_EncoderName, tuple[ShardEncoder, contextlib.ExitStack]] = {}
        #: How many have each encoder open.
        self._users: dict[_EncoderName, int] = {}

    @contextlib.contextmanager
    def outgoing(self, key: pb.ShardKey, digest: bytes, shard: OutgoingShard) -> Iterator[None]:
        """While a save's shard is being replicated: who reads it gets it as `shard` says.

        Meanwhile what was encoded is kept, also between two holders that read it one after the other.
        """
        name = (replica_id(key, pb.REPLICA_KIND_OWNER), digest)
        with self._lock:
            self._outgoing[name] = shard
        try:
            yield
        finally:
            with self._lock:
                if self._outgoing.get(name) is shard:
                    del self._outgoing[name]
                unused = [
                    self._encoders.pop(each)
                    for each in list(self._encoders)
                    if each[2] is shard and each not in self._users
                ]
            for encoder, stack in unused:
                encoder.close()
                stack.close()

    @contextlib.contextmanager
    def opened(
        self, replica: Replica, base: Replica | None, *, replicates: bool = False
    ) -> Iterator[ShardEncoder]:
        """The encoder of a replica against a base; both stay readable while inside.

        Args:
            replicates: the reader makes a copy: it gets the shard as the save under way says, if there is one.

        Raises:
            NotHeldError: one of them is not held any more.
        """
        shard = (replica_id(replica.key, pb.REPLICA_KIND_OWNER), replica.manifest.digest)
        with self._lock:
            name = (replica, base, self._outgoing.get(shard) if replicates else None)
            if name not in self._encoders:
                self._encoders[name] = self._make(*name)
            self._users[name] = self._users.get(name, 0) + 1
            encoder, stack = self._encoders[name]
        try:
            yield encoder
        finally:
            with self._lock:
                self._users[name] -= 1
                last = not self._users[name]
                if last:
                    del self._users[name]
                    last = name[2] is None or self._outgoing.get(shard) is not name[2]
                if last:
                    del self._encoders[name]
            if last:
                encoder.close()
                stack.close()

    def _make(
        self, replica: Replica, base: Replica | None, outgoing: OutgoingShard | None
    ) -> tuple[ShardEncoder, contextlib.ExitStack]:
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(self._store.reading(replica))
            opened_base = None if base is None else stack.enter_context(self._store.reading(base))
            encoder = ShardEncoder(
                opened, opened_base, outgoing, pool=self._pool, policy=self._policy, counters=self._counters
            )
            return encoder, stack.pop_all()
