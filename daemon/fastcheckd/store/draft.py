"""A copy that is being filled: chunks that are here already, slots for the others, and reverse deltas of the base's.

With room for all of it, a draft takes its slots at the beginning. Without, and with a base, it is lean: it takes a
slot for each chunk as that comes, and each chunk that came encoded against the base turns the base's into a reverse
delta, whose slot is then free.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.decoder import turn_around
from ..codec.format import Buffer
from ..errors import CodecError, InvalidRequestError, OverBudgetError, StoreError
from .chunk import Chunk, Form, bytes_of
from .index import History, Index, id_of
from .replica import Replica
from .slots import Place

logger = logging.getLogger(__name__)

#: A lean draft gives the base's slots back in batches of about so many bytes: each rewrites the base's manifest.
FLUSH_BYTES = 16 << 20
#: A reverse delta must save this part of the chunk, or the chunk stays as it is.
WORTH = 0.98
#: A lean draft waits for a slot that readers, or other drafts, are about to give back.
SLOT_WAIT_S = 1.0


class Draft:
    """Made by `ReplicaStore.draft`. Safe for several threads that work on different chunks."""

    def __init__(
        self, index: Index, manifest: pb.ShardManifest, base: Replica | None, *, keep_base: bool
    ) -> None:
        self.manifest = manifest
        self.chunks = ChunkTable.of(manifest)
        self.base = base
        #: Memory is short: chunks should come encoded against the base.
        self.lean = False
        self._index = index
        self._keep_base = keep_base
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._over = False
        self._places: dict[int, Place] = {}
        #: Reverse deltas that are written and not in use yet.
        self._deltas: dict[Chunk, Form] = {}
        self._deltas_bytes = 0
        self._pins = contextlib.ExitStack()
        self._history: History | None = None
        self._content: list[Chunk | None] = []

    @property
    def missing(self) -> tuple[int, ...]:
        """Chunks that are not here yet."""
        return tuple(index for index, chunk in enumerate(self._content) if chunk is None)

    def begin(self, wait_s: float) -> None:
        """Take what is here, and the slots for what is not; raises as `ReplicaStore.draft`, and then holds nothing."""
        try:
            if self.base is not None:
                self._pins.enter_context(self._index.open(self.base))
            with self._index.changed:
                self._index.check_open()
                self._history = self._index.history(id_of(self.manifest))
                self._history.drafts += 1
                found = [self._known(index) for index in range(len(self.chunks))]
                self._index.hold(chunk for chunk in found if chunk is not None)
                self._content = list(found)
            self._reserve(wait_s)
        except BaseException:
            self.abandon()
            raise

    def _known(self, index: int) -> Chunk | None:
        start, stop = self.chunks.range(index)
        assert self._history is not None, "the draft has begun"
        chunk = self._history.chunks.get(self._digest(index))
        return chunk if chunk is not None and chunk.size == stop - start else None

    def _reserve(self, wait_s: float) -> None:
        job = self.manifest.key.job
        missing = self.missing
        try:
            for index in missing:
                start, stop = self.chunks.range(index)
                self._places[index] = self._index.slots.take(stop - start, job, wait_s=wait_s)
        except OverBudgetError:
            if self.base is None:
                raise
            places, self._places = list(self._places.values()), {}
            for place in places:
                self._index.slots.free(place)
            self.lean = True

    def _digest(self, index: int) -> bytes:
        return self.manifest.chunk_digests[16 * index : 16 * (index + 1)]

    @contextlib.contextmanager
    def base_chunk(self, index: int) -> Iterator[memoryview | None]:
        """The bytes of the base's chunk of that number; None without a base.

        Raises:
            CorruptError: they are bad; whoever verifies the base next drops it.
        """
        if self.base is None:
            yield None
            return
        with self._index.pinned(self.base.content[index]) as chain:
            yield bytes_of(chain)

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

    def _slot(self, length: int) -> Place:
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
            becomes its
                reverse delta.
        """
        with self._lock:
            self._check_open()
            place = self._places.pop(index)
        with self._index.changed:
            known = self._known(index)  # twice in this shard, or in another draft
            chunk = known or Chunk(self._digest(index), place.length, Form(place))
            if known is None:
                assert self._history is not None, "the draft has begun"
                place.references = 1
                self._history.chunks[chunk.digest] = chunk
            chunk.references += 1
            unused = [] if known is None else [place]
        for each in unused:
            self._index.slots.free(each)
        with self._lock:
            if self._over:
                self._drop([chunk])
                self._check_open()
            self._content[index] = chunk
        if payload is not None and self.base is not None and (self._keep_base or self.lean):
            self._add_delta(index, payload, chunk)

    def _add_delta(self, index: int, payload: Buffer, newer: Chunk) -> None:
        assert self.base is not None
        older = self.base.content[index]
        leads_to = older.form.base
        # One that was made for a draft that was given up keeps a chunk of that alive.
        if older is newer or (leads_to is not None and leads_to.references > 1):
            return
        with self._index.pinned(older) as old, self._index.pinned(newer) as new:
            try:
                delta = turn_around(payload, bytes_of(old), bytes_of(new))
            except CodecError as error:
                logger.info("chunk %d stays as it is: %s", index, error)
                return
        if len(delta) > WORTH * older.size:
            return
        try:
            place = self._index.slots.take(len(delta), self.manifest.key.job)
        except StoreError as error:
            if not self.lean:
                return  # the base stays as it is
            self._flush()
            try:
                place = self._index.slots.take(len(delta), self.manifest.key.job)
            except StoreError:
                logger.info("chunk %d stays as it is: %s", index, error)
                return
        place.view[:] = delta
        with self._lock:
            if self._over or older in self._deltas:
                self._index.slots.free(place)
                return
            self._deltas[older] = Form(place, newer)
            self._deltas_bytes += older.size
            due = self.lean and self._deltas_bytes >= FLUSH_BYTES
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
                self._index.replace(id_of(self.manifest), deltas)
            except StoreError as error:
                logger.info("chunks of the base stay as they are: %s", error)
                for form in deltas.values():
                    self._index.slots.free(form.place)

    def publish(self) -> Replica:
        """Make the copy visible, verified now; it takes the place of an older one of the same step.

        Raises:
            InvalidRequestError: chunks are missing.
            StoreFullError, StoreError: the manifest cannot be written.
        """
        with self._lock:
            self._check_open()
            missing = self.missing
            if missing:
                raise InvalidRequestError(
                    f"{len(missing)} of {len(self.chunks)} chunks never arrived, the first is {missing[0]}"
                )
            content = tuple(chunk for chunk in self._content if chunk is not None)
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
            content = [chunk for chunk in self._content if chunk is not None]
            self._places.clear()
            self._deltas.clear()
        for place in places:
            self._index.slots.free(place)
        self._drop(content)
        if self._history is not None:
            with self._index.changed:
                self._history.drafts -= 1
                self._index.forget_if_unused(id_of(self.manifest))
        self._pins.close()

    def _drop(self, chunks: list[Chunk]) -> None:
        if self._history is not None and chunks:
            with self._index.changed:
                freed = self._index.let_go(chunks, self._history)
            self._index.free(freed)

    def _check_open(self) -> None:
        if self._over:
            raise StoreError("the draft is over")


#: What gives the reverse delta of a chunk: its number, the older and the newer bytes; None: there is none that is
#: smaller.
DeltaOf = Callable[[int, memoryview, memoryview], bytes | None]


def thin(index: Index, older: Replica, newer: Replica, delta_of: DeltaOf) -> None:
    """Have nothing of `older` lie in the segment that it is in. Equal chunks are the newer's, changed ones become
    what `delta_of` says, or raw bytes in slots.

    Raises:
        InvalidRequestError: they are not cut alike.
        NotHeldError: one of them is not held any more.
        OverBudgetError, StoreFullError, StoreError: there is no room; all is as it was.
    """
    if older.chunks != newer.chunks:
        raise InvalidRequestError("only steps that are cut alike can be thinned")
    forms: dict[Chunk, Form] = {}
    with contextlib.ExitStack() as stack:
        old, new = stack.enter_context(index.open(older)), stack.enter_context(index.open(newer))
        try:
            for number, (mine, its) in enumerate(zip(old.content, new.content, strict=True)):
                if mine is its or mine.form.place.slot_bytes or mine in forms:
                    continue
                if mine.digest == its.digest and its.is_raw:
                    forms[mine] = its.form
                    continue
                forms[mine] = _moved(index, number, mine, its, older.key.job, delta_of)
            index.replace(old.id, forms)
        except BaseException:
            for form in forms.values():
                if form.place.slot_bytes and not form.place.references:
                    index.slots.free(form.place)
            raise


def _moved(index: Index, number: int, older: Chunk, newer: Chunk, job: str, delta_of: DeltaOf) -> Form:
    with index.pinned(older) as old, index.pinned(newer) as new:
        bytes_ = bytes_of(old)
        delta = delta_of(number, bytes_, bytes_of(new))
        kept = bytes_ if delta is None or len(delta) > WORTH * older.size else memoryview(delta)
        place = index.slots.take(len(kept), job)
        place.view[:] = kept
        return Form(place, None if kept is bytes_ else newer)
