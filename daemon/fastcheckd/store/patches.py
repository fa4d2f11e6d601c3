"""A patch: the newest replica of a shard becomes that of a newer step in place, or stays what it was.

Until `publish` the older step is the one that is held: its manifest says from the beginning how it is
had back, so a process may be killed at any moment and the next one undoes what was begun
(`recovery`). Nobody reads the bytes meanwhile; a reader ends the patch (`Books.pinned`).

Order per chunk: the new bytes are complete in a slot, then the way back is in its file, then the
table names it, then the slot is copied over the chunk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from fastcheck_proto.conventions import STEP_MAX
from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.format import Buffer
from ..errors import FastCheckdError, InvalidRequestError, NotHeldError, StoreError
from .books import Books
from .copying import copy_bytes
from .held import HeldShard, WayBack
from .manifests import ReplicaId, check_manifest
from .segments import SLOT_POOL, Segment
from .slots import slot, slots
from .undo import Undo
from .way_back import WayBackFile

logger = logging.getLogger(__name__)

#: A way back waits so long for room: that of the step before last may be just about to go.
ROOM_WAIT_S = 1.0
_UNTOUCHED, _KEPT, _BEGUN, _REPLACED = range(4)


class Patch:
    """One put of a newer step into the replica of `base`. See `RamStore.begin_patch`. Thread-safe.

    It ends with `publish` or `abort`, whichever comes first; the other is then harmless or refused.
    """

    def __init__(self, books: Books, base: HeldShard, step: int, on_wanted: Callable[[], None]) -> None:
        """For `begin_patch`, with the books' lock held: it is entered as the segment's change."""
        self.base = base
        self.target: ReplicaId | None = base.id._replace(step=step)
        #: Where the chunks of both steps begin and end.
        self.chunks: ChunkTable = base.chunks
        self._books = books
        self._step = step
        self._on_wanted = on_wanted
        self._wanted = False
        self._ready = False
        #: Whoever has this ends the patch.
        self._ending = threading.Lock()
        self._over = False
        #: Guards the states, `_writers`, and who was told what.
        self._changed = threading.Condition(threading.Lock())
        self._states = bytearray(len(self.chunks))
        self._writers = 0
        self._shut = False
        self._resources = contextlib.ExitStack()
        self._way: WayBackFile | None = None
        self._spare: Segment | None = None
        #: The base's manifest as it was, ready in `tmp/`: an abort must not need memory.
        self._plain: Path | None = None
        self._bytes = memoryview(b"")

    def prepare(self) -> None:
        """For `begin_patch`: get everything that an abort needs, then let the base's manifest say so.

        Raises:
            OverBudgetError, StoreFullError, StoreError: no room; `abort` tidies up.
        """
        books, base = self._books, self.base
        self._bytes = base.segment.view[base.offset : base.offset + base.manifest.bytes]
        self._way = WayBackFile.make(books.folder / "ways", books.pools, len(self.chunks), base.key.job)
        self._spare = books.pools.allocate(self.chunks.longest, SLOT_POOL)
        self._plain = self._resources.enter_context(books.staged(base))
        under_way = _with_way(base, self._way, self._step)
        with books.staged(under_way) as staged, books.changed:
            books.check_open()
            books.place(staged, under_way)
            # Until it is published, the base is what is held: readers of it end the patch.
            books.shards[base.id] = base

    # --- for whoever makes the patch ---------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether somebody waits to read: better abort."""
        with self._changed:
            return self._wanted

    def old(self, index: int) -> memoryview:
        """The chunk's bytes as the base has them, read-only; valid until the chunk is replaced."""
        start, stop = self.chunks.range(index)
        return self._bytes[start:stop].toreadonly()

    def slot(self) -> contextlib.AbstractContextManager[memoryview]:
        """Writable scratch of the longest chunk's size, for the new bytes of one chunk after the other.

        Raises:
            OverBudgetError, StoreFullError: on entry: no room.
        """
        return slot(self._books.pools, self.chunks.longest)

    def replace(self, index: int, slot: memoryview, way_back: Buffer) -> None:
        """Put the first bytes of a slot in the place of a chunk.

        The caller has checked that they are the new chunk, and that `way_back` turns them into `old`.

        Raises:
            NotHeldError: the patch has ended.
            InvalidRequestError: the chunk was replaced before, or the way back has an impossible size.
            OverBudgetError, StoreFullError, StoreError: no room for the way back; the chunk is as it was.
        """
        start, stop = self.chunks.range(index)
        with self._writing(index):
            assert self._way is not None
            self._way.append(self._books.pools, index, way_back, stop - start, wait_s=ROOM_WAIT_S)
            copy_bytes(self._bytes[start:stop], slot[: stop - start])
            self._states[index] = _REPLACED

    def keep(self, index: int) -> None:
        """The chunk is the same in both steps.

        Raises:
            NotHeldError: the patch has ended.
            InvalidRequestError: the chunk was replaced before.
        """
        with self._changed:
            self._check_open()
            if self._states[index] in {_BEGUN, _REPLACED}:
                raise InvalidRequestError(f"chunk {index} was replaced already")
            self._states[index] = _KEPT

    def publish(self, manifest: pb.ShardManifest) -> HeldShard:
        """Make the new step the one whose bytes are here; the base stays, as a way back.

        Raises:
            NotHeldError: the patch has ended, or the new step is held otherwise.
            InvalidRequestError: a chunk is missing, or the manifest is not that of the patch.
            StoreFullError: no room for the manifest. As after any error: the patch goes on.
        """
        own = pb.ShardManifest()
        own.CopyFrom(manifest)
        check_manifest(own)
        with self._ending:
            with self._changed:
                self._check_open()
            newer = self._checked(own)
            assert self._way is not None
            older = _with_way(self.base, self._way, self._step)
            books = self._books
            self._way.settle(books.pools)
            with books.staged(newer) as staged, books.changed:
                books.check_open()
                if books.current(self.base) is not self.base or newer.id in books.shards:
                    raise NotHeldError(f"shard {tuple(newer.id)} cannot be published: the base changed")
                books.place(staged, newer)
                books.shards[older.id] = older
                books.end_change(self)
            self._way = None
            self._finish()
        return newer

    def abort(self) -> None:
        """Turn what was replaced back to the base. Harmless when repeated or after `publish`.

        When bytes cannot be turned back, the base and the older steps that need it are dropped, counted.
        """
        with self._ending:
            if self._over:
                return
            self._wait_for_writers()
            with self._books.changed:
                closed = self._books.closed
            try:
                if not closed and self._way is not None:
                    self._undo(self._way)
            finally:
                with self._books.changed:
                    self._books.end_change(self)
                self._finish()

    # --- for the store -----------------------------------------------------------------------------

    def blocks(self, shard: HeldShard) -> bool:
        """Only the base itself has to stay; older steps may go."""
        return shard.id == self.base.id

    def want(self) -> None:
        """Somebody wants to read: tell the patch's owner, once, that it should abort soon."""
        with self._changed:
            # Before `begin` the owner has no patch yet that it could abort.
            tell = self._ready and not self._wanted
            self._wanted = True
        if tell:
            self._on_wanted()

    def begin(self) -> None:
        """For `begin_patch`: all is prepared. Raises NotHeldError when somebody wanted to read meanwhile."""
        with self._changed:
            if self._wanted:
                raise NotHeldError(f"shard {tuple(self.base.id)} cannot be patched: it is being read")
            self._ready = True

    def freeze(self) -> None:
        """The store is closing: touch nothing any more. The next process undoes what was begun."""
        with self._ending:
            if not self._over:
                self._wait_for_writers()
                self._way = None  # stays: the base's manifest names it
                self._finish()

    def _check_open(self) -> None:
        if self._shut:
            raise NotHeldError(f"the patch of shard {tuple(self.base.id)} has ended: begin the put again")

    @contextlib.contextmanager
    def _writing(self, index: int) -> Iterator[None]:
        with self._changed:
            self._check_open()
            if self._states[index] in {_BEGUN, _REPLACED}:
                raise InvalidRequestError(f"chunk {index} was replaced already")
            self._states[index] = _BEGUN
            self._writers += 1
        try:
            yield
        finally:
            with self._changed:
                if self._states[index] == _BEGUN:  # no room for its way back: it is as it was
                    self._states[index] = _UNTOUCHED
                self._writers -= 1
                self._changed.notify_all()

    def _wait_for_writers(self) -> None:
        """Let no new writer in; those inside only copy one chunk, so there is no limit to the wait."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: self._writers == 0)

    def _checked(self, manifest: pb.ShardManifest) -> HeldShard:
        """The newer shard; raises InvalidRequestError when it is not what this patch made."""
        now_ms = self._books.now_ms()
        kept = self._states.count(_KEPT)
        newer = HeldShard(
            manifest, self.base.segment, self.base.offset,
            # Chunks that are the same have not been looked at since.
            now_ms if not kept else min(now_ms, self.base.verified_at_ms),
        )  # fmt: skip
        if newer.id != self.target or newer.chunks != self.chunks:
            raise InvalidRequestError(
                f"shard {tuple(newer.id)} is not what the patch of {tuple(self.base.id)} to step {self._step} makes"
            )
        for index, state in enumerate(self._states):
            if state not in {_KEPT, _REPLACED}:
                raise InvalidRequestError(f"chunk {index} of shard {tuple(newer.id)} is missing")
            if state == _KEPT and newer.chunk_digest(index) != self.base.chunk_digest(index):
                raise InvalidRequestError(
                    f"chunk {index} of shard {tuple(newer.id)} was kept, and is another"
                )
        return newer

    def _undo(self, way: WayBackFile) -> None:
        books = self._books
        replaced = [index for index, state in enumerate(self._states) if state == _REPLACED]
        assert self._spare is not None or not replaced
        try:
            if replaced and self._spare is not None:
                undo = Undo(self.base, way)
                spare = self._spare.view[: self.chunks.longest]
                with slots(books.pools, self.chunks.longest, len(replaced), spare) as tools:
                    undo.put_all_back(replaced, tools)
            with books.changed:
                if self._plain is not None and books.current(self.base) is self.base:
                    books.place(self._plain, self.base)
        except BaseException as error:
            # Whatever happened, half-changed bytes are nobody's.
            logger.exception("cannot take the patch of shard %s back", tuple(self.base.id))
            books.condemn(self.base, f"what a patch left ({error})")
            if not isinstance(error, FastCheckdError):
                raise

    def _finish(self) -> None:
        """Give back what is not part of the outcome."""
        with self._changed:
            self._shut = True
        self._over = True
        pools = self._books.pools
        with contextlib.suppress(StoreError):
            if self._way is not None:
                self._way.settle(pools)
        if self._way is not None:
            pools.let_go(self._way)
        if self._spare is not None:
            pools.give_back(self._spare)
        self._resources.close()


def begin_patch(books: Books, base: HeldShard, step: int, on_wanted: Callable[[], None]) -> Patch:
    """See `RamStore.begin_patch`."""
    with books.changed:
        books.check_open()
        found = books.current(base)
        if found is None:
            raise NotHeldError(f"shard {tuple(base.id)} is not held here any more: it cannot be patched")

        def need(ok: bool, why: str) -> None:
            if not ok:
                raise NotHeldError(f"shard {tuple(base.id)} cannot be patched: {why}")

        target = found.id._replace(step=step)
        need(found.kind == pb.REPLICA_KIND_COPY, "it is not a copy")
        need(found.is_full, "a newer step was put in its place")
        need(found.key.step < step <= STEP_MAX, f"step {step} is not newer")
        need(target not in books.shards, f"step {step} is held already")
        need(books.change_towards(target) is None, f"step {step} is being put")
        need(found.segment not in books.changes, "another patch of it is under way")
        need(not books.pools.is_shared(found.segment), "it is being read")
        patch = Patch(books, found, step, on_wanted)
        books.changes[found.segment] = patch
    try:
        patch.prepare()
        patch.begin()
    except BaseException:
        patch.abort()
        raise
    return patch


def _with_way(base: HeldShard, way: WayBackFile, step: int) -> HeldShard:
    return HeldShard(base.manifest, base.segment, base.offset, base.verified_at_ms, WayBack(way, step))
