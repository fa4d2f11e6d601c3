"""A copy that is being filled: chunks that are here already, slots for the others, and reverse deltas of the base's.

With room for all of it, a draft takes its slots at the beginning. Without, and with a base, it is lean: it takes a
slot for each chunk as that comes, and each chunk that came encoded against the base turns the base's into a reverse
delta, whose slot is then free.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.format import Buffer
from ..errors import CorruptError, InvalidRequestError, OverBudgetError, StoreError
from .chunk import Chunk, Form, bytes_of, copy_bytes
from .index import Index, id_of
from .replica import History, HistoryId, Replica
from .reverse_deltas import CHAIN_LIMIT, reverse_delta
from .slots import Slot

logger = logging.getLogger(__name__)

#: A lean draft gives the base's slots back in batches, each of which rewrites the base's manifest: of about so many
#: bytes, but of at most this share of the shard, and of more where there would be too many batches.
FLUSH_BYTES = 16 << 20
FLUSH_SHARE = 16
FLUSHES_MAX = 64
#: A lean draft waits for a slot that readers, or other drafts, are about to give back.
SLOT_WAIT_S = 1.0


class Draft:
    """Made by `ReplicaStore.draft`. Safe for several threads that work on different chunks."""

    def __init__(
        self, index: Index, manifest: pb.ShardManifest, base: Replica | None, *, keep_base: bool
    ) -> None:
        self.manifest = manifest
        #: Of the replica that it is going to be.
        self.id = id_of(manifest)
        self.chunks = ChunkTable.of(manifest)
        #: In order; None where one is missing.
        self.content: list[Chunk | None] = []
        self.base = base
        #: Memory is short: chunks should come encoded against the base.
        self.lean = False
        self._index = index
        self._keep_base = keep_base
        #: Whether the base's chunks may become deltas of this draft's: one of its own shard's older steps.
        self._turns_base = False
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._over = False
        self._places: dict[int, Slot] = {}
        #: Reverse deltas that are written and not in use yet.
        self._deltas: dict[Chunk, Form] = {}
        self._deltas_bytes = 0
        self._pins = contextlib.ExitStack()
        self._history: History | None = None

    @property
    def _flush_bytes(self) -> int:
        """How large a batch of the base's slots is that go back together: a small part of a shard of any size."""
        size = self.manifest.bytes
        return max(min(FLUSH_BYTES, size // FLUSH_SHARE), size // FLUSHES_MAX)

    @property
    def missing(self) -> tuple[int, ...]:
        """Chunks that are not here yet."""
        return tuple(index for index, chunk in enumerate(self.content) if chunk is None)

    def begin(self, wait_s: float, *, lean: bool = False) -> None:
        """Take what is here, and the slots for what is not; raises as `ReplicaStore.draft`, and then holds nothing."""
        try:
            if self.base is not None:
                self._pins.enter_context(self._index.open(self.base))
                self._turns_base = (
                    HistoryId.of(self.base.id) == HistoryId.of(self.id)
                    and self.base.id.step < self.id.step
                    and self._index.longest_chain(self.id) < CHAIN_LIMIT
                )
            with self._index.changed:
                self._index.check_open()
                self._history = self._index.history(self.id)
                self._history.drafts.add(self)
                found = [self._known(index) for index in range(len(self.chunks))]
                self._index.hold(chunk for chunk in found if chunk is not None)
                self.content = list(found)
            self._check_known()
            self.lean = lean and self._turns_base
            if not self.lean:
                self._reserve(wait_s)
        except BaseException:
            self.abandon()
            raise

    def _known(self, index: int) -> Chunk | None:
        """With the index's lock held: the chunk that is here already under the digest of one of the draft."""
        start, stop = self.chunks.range(index)
        chunk = self._known_to.chunks.get(self._digest(index))
        return chunk if chunk is not None and chunk.size == stop - start else None

    @property
    def _known_to(self) -> History:
        assert self._history is not None, "the draft has begun"
        return self._history

    def _check_known(self) -> None:
        """What an earlier process has left is not taken for good before it is compared with its digest."""
        unchecked = {chunk for chunk in self.content if chunk is not None and not chunk.checked}
        bad = {chunk for chunk in unchecked if not self._index.check(chunk, self.id)}
        if not bad:
            return
        dropped = [chunk for chunk in self.content if chunk in bad]
        self.content = [None if chunk in bad else chunk for chunk in self.content]
        self._drop([chunk for chunk in dropped if chunk is not None])

    def _reserve(self, wait_s: float) -> None:
        missing = self.missing
        ranges = map(self.chunks.range, missing)
        lengths = [stop - start for start, stop in ranges]
        try:
            places = self._index.slots.take_all(lengths, self.manifest.key.job, wait_s=wait_s)
        except OverBudgetError:
            if not self._turns_base:
                raise
            self.lean = True
        else:
            self._places = dict(zip(missing, places, strict=True))

    def _digest(self, index: int) -> bytes:
        return self.manifest.chunk_digests[16 * index : 16 * (index + 1)]

    @contextlib.contextmanager
    def base_chunk(self, index: int) -> Iterator[memoryview | None]:
        """The bytes of the base's chunk of that number; None without a base.

        Raises:
            CorruptError: they cannot be decoded; the base was dropped, counted.
        """
        if self.base is None:
            yield None
            return
        with self._index.bytes_of(self.base, index) as view:
            yield view

    def place(self, index: int) -> memoryview:
        """Where a missing chunk's bytes belong; writable until it is received.

        Raises:
            OverBudgetError, JobBudgetError, StoreFullError: there is no room, and the draft is lean.
            StoreError: the draft is over.
        """
        with self._lock:
            self._check_open()
            place = self._places.get(index)
        if place is None:
            start, stop = self.chunks.range(index)
            place = self._slot(stop - start)
            with self._lock:
                if self._over or index in self._places:
                    self._index.slots.free(place)
                    self._check_open()
                place = self._places.setdefault(index, place)
        return place.view

    def _slot(self, length: int) -> Slot:
        job = self.manifest.key.job
        try:
            return self._index.slots.take(length, job)
        except OverBudgetError:
            self._flush()
            return self._index.slots.take(length, job, wait_s=SLOT_WAIT_S)

    def received(self, index: int, payload: Buffer | None) -> None:
        """A chunk's bytes are in its place, and their digest was checked.

        Args:
            payload: the encoded chunk against the base that they were decoded from, if they came so: the base's chunk
                becomes its reverse delta.
        """
        with self._lock:
            self._check_open()
            place = self._places.pop(index)
        with self._index.changed:
            known = self._known(index)  # twice in this shard, or in another draft
            chunk = known or Chunk(self._digest(index), place.length, Form(place))
            if known is None:
                place.references = 1
                self._known_to.chunks[chunk.digest] = chunk
            chunk.references += 1
        if known is not None:
            self._index.slots.free(place)
        with self._lock:
            if self._over:
                self._drop([chunk])
                self._check_open()
            self.content[index] = chunk
        if payload is not None and self._turns_base and (self._keep_base or self.lean):
            self._add_delta(index, payload, chunk)

    def _add_delta(self, index: int, payload: Buffer, newer: Chunk) -> None:
        assert self.base is not None
        older = self.base.content[index]
        leads_to = older.form.base
        # One that was made for a draft that was given up keeps a chunk of that alive.
        if older is newer or (leads_to is not None and leads_to.references > 1):
            return
        with self._index.pinned(newer) as new:
            delta = reverse_delta(self._index, older, payload, bytes_of(new), newer.digest)
        if delta is None:
            return
        try:
            place = self._index.slots.take(len(delta), self.manifest.key.job, delta=True)
        except StoreError as error:
            if not self.lean:
                return  # the base stays as it is
            self._flush()
            try:
                place = self._index.slots.take(len(delta), self.manifest.key.job, delta=True)
            except StoreError:
                logger.info("chunk %d stays as it is: %s", index, error)
                return
        copy_bytes(place.view, delta)
        with self._lock:
            if self._over or older in self._deltas:
                self._index.slots.free(place)
                return
            self._deltas[older] = Form(place, newer)
            self._deltas_bytes += older.size
            due = self.lean and self._deltas_bytes >= self._flush_bytes
        if due:
            self._flush()

    def _flush(self) -> None:
        """Let the base's chunks that have become deltas take their new form; what cannot stays as it is."""
        with self._flushing:
            with self._lock:
                deltas, self._deltas = self._deltas, {}
                self._deltas_bytes = 0
            if not deltas:
                return
            try:
                self._index.replace(self.id, deltas)
            except StoreError as error:
                logger.info("chunks of the base stay as they are: %s", error)
                for form in deltas.values():
                    self._index.slots.free(form.place)
            else:
                self._index.counters.add("deltas_made", len(deltas))

    def publish(self) -> Replica:
        """Make the copy visible, verified now; it takes the place of an older one of the same step.

        Raises:
            InvalidRequestError: chunks are missing.
            CorruptError: a chunk that was here already was found bad meanwhile, and is missing now.
            StoreFullError, StoreError: the manifest cannot be written.
        """
        with self._lock:
            self._check_open()
            missing = self.missing
            if missing:
                raise InvalidRequestError(
                    f"{len(missing)} of {len(self.chunks)} chunks never arrived, the first is {missing[0]}"
                )
            content = tuple(chunk for chunk in self.content if chunk is not None)
            bad = {chunk for chunk in content if any(link.form.place.bad for link in chunk.chain())}
            if bad:
                self.content = [None if chunk in bad else chunk for chunk in content]
                self._drop([chunk for chunk in content if chunk in bad])
                raise CorruptError(f"{len(bad)} chunks that were here already have been found bad")
        replica = Replica(self.manifest, content, self._index.now_ms())
        self._index.publish(replica)
        self._flush()
        self.abandon()
        return replica

    def abandon(self) -> None:
        """Give back what is not published. Harmless when repeated. Nobody may write to its places any more."""
        with self._lock:
            if self._over:
                return
            self._over = True
            places = [*self._places.values(), *(form.place for form in self._deltas.values())]
            content = [chunk for chunk in self.content if chunk is not None]
            self._places.clear()
            self._deltas.clear()
        self._index.free(places)
        self._drop(content)
        if self._history is not None:
            with self._index.changed:
                self._history.drafts.discard(self)
                self._index.forget_if_unused(self.id)
        self._pins.close()

    def _drop(self, chunks: list[Chunk]) -> None:
        if self._history is not None and chunks:
            with self._index.changed:
                freed = self._index.let_go(chunks, self._history)
            self._index.free(freed)

    def _check_open(self) -> None:
        if self._over:
            raise StoreError("the draft is over")
