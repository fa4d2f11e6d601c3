"""Older steps as reverse deltas: how a chunk becomes one, and what becomes of it when the newer step goes.

A draft makes them of a copy's older step as the newer one comes (see `draft`). `ReverseDeltas` does it for the owner,
whose older step lies in a segment that the trainer needs again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping

from ..codec.decoder import plan_of, read_header, reverse
from ..codec.encoder import encode, unchanged
from ..codec.format import Buffer
from ..errors import (
    CodecError,
    CorruptError,
    InvalidRequestError,
    OverBudgetError,
    StoreError,
    StoreFullError,
)
from .chunk import Chain, Chunk, Form, bytes_of, copy_bytes
from .index import Index
from .manifests import CHAIN_MAX, ReplicaId
from .replica import HistoryId, Replica
from .slots import Slot

logger = logging.getLogger(__name__)

#: A reverse delta must save this part of the chunk, or the chunk stays as it is.
WORTH = 0.98
#: A chunk that is decoded through so many others leads to no more: a few steps of a shard may come at once.
CHAIN_LIMIT = CHAIN_MAX - 8
#: Chunks are given other bases in batches of about so many bytes: each rewrites a manifest.
BATCH_BYTES = 64 << 20


def reverse_delta(
    index: Index, older: Chunk, payload: Buffer, new: memoryview, newer_digest: bytes
) -> bytes | None:
    """What leads from a newer chunk, of bytes `new`, back to an older one, of which `payload` led to it.

    None: it would not be smaller than the chunk, or `payload` is not for these two.
    """
    try:
        with index.pinned(older) as chain:
            delta = reverse(payload, bytes_of(chain), new)
    except (CodecError, CorruptError) as error:
        logger.info("an older chunk stays as it is: %s", error)
        return None
    if delta is None:
        return None
    header = read_header(delta)
    if (header.digest, header.base_digest) != (older.digest, newer_digest):
        logger.info("an older chunk stays as it is: what came encoded is not for it")
        return None
    return delta if len(delta) <= WORTH * older.size else None


class ReverseDeltas:
    """Made by `ReplicaStore.reverse_deltas`: the owner's older step while a newer one is sent. `publish` or `abandon`
    it. `add` may be called by several threads.
    """

    def __init__(self, index: Index, older: Replica) -> None:
        """Raises NotHeldError if the older step is not held any more."""
        self.older = older
        self._index = index
        self._lock = threading.Lock()
        self._over = False
        #: Slots with deltas, and the digest of the newer chunk that each is for.
        self._deltas: dict[int, tuple[Slot, bytes]] = {}
        self._pins = contextlib.ExitStack()
        self._pins.enter_context(index.open(older))
        self._is_deep = index.longest_chain(older.id) >= CHAIN_LIMIT

    def add(self, index: int, payload: Buffer, new: memoryview) -> None:
        """Write the reverse delta of a chunk into a slot; without room, or if it does not pay, nothing happens.

        Args:
            payload: the newer step's chunk, encoded against this one.
            new: its bytes.
        """
        older = self.older.content[index]
        if self._is_deep or not older.is_raw or self._over:
            return
        try:
            newer_digest = read_header(payload).digest
        except CodecError as error:
            logger.info("chunk %d of the older step stays as it is: %s", index, error)
            return
        delta = reverse_delta(self._index, older, payload, new, newer_digest)
        if delta is None:
            return
        try:
            place = _written(self._index, delta, self.older)
        except StoreError as error:
            logger.debug("chunk %d of the older step stays as it is: %s", index, error)
            return
        with self._lock:
            if self._over or index in self._deltas:
                self._index.slots.free(place)
                return
            self._deltas[index] = place, newer_digest

    def publish(self, newer: Replica) -> None:
        """Have nothing of the older step lie in the segment that it is in: changed chunks become the deltas that were
        added or move to slots as they are, equal ones a note that they are the newer step's.

        Raises:
            InvalidRequestError: `newer` is not a newer step of the same shard, cut alike.
            NotHeldError: one of the two is not held any more.
            OverBudgetError, StoreFullError, StoreError: no room for what has to move. The older step is as it was, its
                deltas are gone.
        """
        older = self.older
        if (
            HistoryId.of(older.id) != HistoryId.of(newer.id)
            or older.id.step >= newer.id.step
            or older.chunks != newer.chunks
        ):
            raise InvalidRequestError(
                "only newer steps of a shard that are cut alike lead back to older ones"
            )
        with self._lock:
            if self._over:
                raise StoreError("the reverse deltas are over")
            deltas, self._deltas = self._deltas, {}
        forms: dict[Chunk, Form] = {}
        try:
            with self._index.open(newer):
                for number, (mine, its) in enumerate(zip(older.content, newer.content, strict=True)):
                    if mine is its or mine in forms:
                        continue
                    place, digest = deltas.get(number, (None, b""))
                    if place is not None and digest == its.digest:
                        forms[mine] = Form(place, its)
                        del deltas[number]
                    elif (form := self._moved(mine, its, newer.id.step)) is not None:
                        forms[mine] = form
                self._index.replace(older.id, forms)
        except BaseException:
            self._index.free(form.place for form in forms.values() if not form.place.references)
            raise
        finally:
            self._index.free(place for place, _ in deltas.values())
            self.abandon()
        self._index.counters.add("deltas_made", sum(form.base is not None for form in forms.values()))

    def _moved(self, mine: Chunk, its: Chunk, newer_step: int) -> Form | None:
        """A form of a chunk without a delta that does not lie in the segment; None: its own does not."""
        if not mine.is_raw:
            return None
        if mine.digest == its.digest and not self._is_deep:
            same = unchanged(mine.size, step=self.older.id.step, base_step=newer_step, digest=mine.digest)
            return Form(_written(self._index, same.payload, self.older), its)
        if mine.form.place.slot_bytes:
            return None
        with self._index.pinned(mine) as chain:
            return Form(_written(self._index, bytes_of(chain), self.older))

    def abandon(self) -> None:
        """Give back what is not published: the older step stays as it is. Harmless when repeated."""
        with self._lock:
            if self._over:
                return
            self._over = True
            deltas, self._deltas = self._deltas, {}
        self._index.free(place for place, _ in deltas.values())
        self._pins.close()


def relink(index: Index, name: ReplicaId) -> None:
    """A step of a history has gone: have older steps lead to those that are still held. Chunks that no replica lists
    any more, and their memory, go with that.

    Otherwise they would gather: while one step is kept and newer ones come and go, one delta for each of those. What
    cannot be had, for want of room, stays as it is until the next step goes.
    """
    # A chunk that a draft has is about to be listed.
    steps = {
        chunk: each.id.step
        for each in index.listings(name)
        for chunk in list(each.content)
        if chunk is not None
    }
    for replica in index.replicas_of(name):
        orphans = {c for c in replica.content if c.form.base is not None and c.form.base not in steps}
        if not orphans:
            continue
        try:
            with index.open(replica):
                _Relinking(index, replica, steps).run(orphans)
        except StoreError as error:
            logger.info(
                "step %d of job %r still needs steps that have gone: %s", replica.id.step, name.job, error
            )


class _Relinking:
    def __init__(self, index: Index, replica: Replica, steps: Mapping[Chunk, int]) -> None:
        """`steps`: the chunks that are listed, each with the number of a step."""
        self._index = index
        self._replica = replica
        self._steps = steps
        self._by_digest = {chunk.digest: chunk for chunk in steps}
        self._forms: dict[Chunk, Form] = {}
        self._bytes = 0
        #: Where chunks of this batch lie is named by their new forms, too.
        self._pins = contextlib.ExitStack()

    def run(self, orphans: Iterable[Chunk]) -> None:
        """Raises StoreError, CorruptError; what was done until then stays."""
        with self._pins:
            for chunk in orphans:
                chain = self._pins.enter_context(self._index.pinned(chunk))
                try:
                    self._forms[chunk] = self._form(chain)
                except (OverBudgetError, StoreFullError):
                    self._apply()  # that frees what this batch does not need any more
                    self._forms[chunk] = self._form(self._pins.enter_context(self._index.pinned(chunk)))
                except CorruptError:
                    self._index.check(chunk, self._replica.id)
                    self._apply()
                    raise
                self._bytes += chunk.size
                if self._bytes >= BATCH_BYTES:
                    self._apply()
            self._apply()

    def _apply(self) -> None:
        forms, self._forms, self._bytes = self._forms, {}, 0
        try:
            self._index.replace(self._replica.id, forms)
        except BaseException:
            self._index.free(form.place for form in forms.values() if not form.place.references)
            raise
        finally:
            self._pins.close()

    def _form(self, chain: Chain) -> Form:
        """One of the first chunk of a chain that leads to a chunk which is listed, or is raw."""
        (chunk, old), rest = chain[0], chain[1:]
        equal = self._by_digest.get(rest[0][0].digest)
        if equal is not None and equal is not chunk:
            return Form(old.place, equal)
        data = bytes_of(chain)
        for at, (base, _) in enumerate(rest):
            if base in self._steps:
                encoded = encode(
                    data, bytes_of(rest[at:]), plan_of(old.place.view),
                    step=self._replica.id.step, base_step=self._steps[base],
                    digest=chunk.digest, base_digest=base.digest,
                )  # fmt: skip
                if encoded is not None and len(encoded.payload) <= WORTH * chunk.size:
                    return Form(_written(self._index, encoded.payload, self._replica), base)
                break
        return Form(_written(self._index, data, self._replica))


def _written(index: Index, data: Buffer, replica: Replica) -> Slot:
    """A new slot with these bytes, for a chunk of a replica."""
    place = index.slots.take(len(data), replica.key.job, delta=len(data) < replica.chunks.longest // 2)
    copy_bytes(place.view, data)
    return place
