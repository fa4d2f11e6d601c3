"""Older steps that are had from a newer one's bytes: making them whole, checking them, turning back.

The bytes of an older step are decoded chunk by chunk from the chain's head down, each level checked
by its digest. What is found bad is dropped together with the older steps that depend on it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from fastcheck_proto.v1 import common_pb2 as pb

from ..codec.decoder import decode
from ..digests import chunk_digest
from ..errors import CodecError, CorruptError, FastCheckdError, NotHeldError
from .books import CHANGE_WAIT_S, Books, memory_of
from .copying import copy_bytes
from .held import HeldShard, WayBack
from .manifests import ReplicaId
from .segments import COPY_POOL, PooledFile, restored_pool
from .slots import WORKERS_MAX, slots
from .spread import spread
from .undo import Undo

#: Two buffers of the longest chunk's size: a level is decoded from one into the other.
_Scratch = tuple[memoryview, memoryview]


class _BadLinkError(Exception):
    """A step of a chain that is not what its digest says, and which chunk."""

    def __init__(self, link: HeldShard, index: int) -> None:
        super().__init__(index)
        self.link = link
        self.index = index


class _RollBack:
    """The newest step is being dropped: the next older one's bytes take its place."""

    def __init__(self, head: HeldShard) -> None:
        self.base = head
        self.target: ReplicaId | None = head.id
        self.done = threading.Event()

    def blocks(self, shard: HeldShard) -> bool:
        """Nothing of the chain may go: it is what the bytes are turned back with, or to."""
        return True

    def want(self) -> None:
        """It ends by itself."""

    def freeze(self) -> None:
        """It never waits for others once it writes, and its outcome is what the next process would do."""
        self.done.wait()


def read_chunk(path: Sequence[HeldShard], index: int, out: memoryview, scratch: _Scratch) -> None:
    """Write one chunk of the oldest step of a pinned path (`Books.pinned`) into `out`, of its size.

    Raises:
        _BadLinkError: a step on the way is damaged; the newest one that is.
        StoreError: the system refuses to read a way back.
    """
    head = path[-1]
    start, stop = head.chunks.range(index)
    size = stop - start
    current = head.view[start:stop]
    checked = False  # whether `current` is known to be what its digest says
    if len(path) == 1:
        copy_bytes(out, current)
    newer = head
    for level, older in enumerate(reversed(path[:-1])):
        assert older.way_back is not None
        into = scratch[level % 2][:size] if older is not path[0] else out
        try:
            record = older.way_back.file.read(index, size)
            if record is None:
                if older.chunk_digest(index) != newer.chunk_digest(index):
                    raise CorruptError(f"chunk {index} changed without a way back")
                if into is out:
                    copy_bytes(out, current)
            else:
                decode(record, current, into, base_digest=newer.chunk_digest(index))
                if chunk_digest(into) != older.chunk_digest(index):
                    raise CorruptError(f"the way back of chunk {index} leads to other bytes")
                current, checked = into, True
        except (CorruptError, CodecError) as error:
            to_blame = older if checked or chunk_digest(current) == newer.chunk_digest(index) else newer
            raise _BadLinkError(to_blame, index) from error
        newer = older
    if not checked and chunk_digest(out) != head.chunk_digest(index):
        raise _BadLinkError(head, index)


class Chains:
    """The chains of one store."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def full(self, shard: HeldShard) -> HeldShard:
        """See `RamStore.full`."""
        books = self._books
        with books.pinned(shard) as path:
            wanted = path[0]
            if wanted.is_full:
                return wanted
            own, job = wanted.kind == pb.REPLICA_KIND_OWNER, wanted.key.job
            pool = restored_pool(job) if own else COPY_POOL
            segment = books.pools.allocate(wanted.manifest.bytes, pool, job=job, recycle=not own)
            if own:  # trainers may read it
                books.pools.condemn(segment)
            try:
                view = segment.view
                self._decode(path, lambda index: _within(view, wanted, index))
                made = HeldShard(wanted.manifest, segment, 0, books.now_ms())
                with books.staged(made) as staged, books.changed:
                    books.check_open()
                    now = books.current(wanted)
                    if now is not None and now.is_full:
                        return now  # somebody else was faster
                    if now is None or now.way_back != wanted.way_back:
                        raise NotHeldError(f"shard {tuple(wanted.id)} is not held here any more as it was")
                    older = books.all_older_than(wanted)
                    books.pools.hold(segment)
                    try:
                        books.place(staged, made)
                    except BaseException:
                        books.pools.let_go(segment)
                        raise
                    # What hung on it goes on to do so, on its bytes in their new place.
                    for each in older:
                        books.shards[each.id] = dataclasses.replace(each, segment=segment, offset=0)
                    freed = [memory_of(wanted), *books.strike_unneeded(wanted)]
                books.let_go(freed)
            finally:
                books.pools.give_back(segment)
        return made

    def copy_to(self, shard: HeldShard, into: memoryview, chunks: Sequence[int] | None = None) -> None:
        """See `RamStore.copy_to`."""
        assert len(into) == shard.manifest.bytes
        with self._books.pinned(shard) as path:
            self._decode(path, lambda index: _within(into, path[0], index), chunks)

    def is_good(self, path: Sequence[HeldShard]) -> bool:
        """Decode a pinned older step into scratch memory, chunk by chunk; what is bad is dropped."""
        longest = path[0].chunks.longest
        buffers = threading.local()

        def into(index: int) -> memoryview:
            if not hasattr(buffers, "out"):
                buffers.out = memoryview(bytearray(longest))
            start, stop = path[0].chunks.range(index)
            out: memoryview = buffers.out[: stop - start]
            return out

        try:
            self._decode(path, into)
        except CorruptError:
            return False
        return True

    def drop(self, shard: HeldShard) -> bool:
        """See `RamStore.drop`; whether it was there."""
        books = self._books
        deadline_s = time.monotonic() + CHANGE_WAIT_S
        while True:
            freed: list[PooledFile] = []
            with books.changed:
                books.check_open()
                found = books.current(shard)
                if found is None:
                    return False
                change = books.change_blocking(found)
                older = books.older_than(found)
                if change is None and (older is None or not found.is_full):
                    if older is not None:
                        books.hidden.add(found.id)
                    else:
                        books.strike(found)
                        freed = [memory_of(found), *books.strike_unneeded(found)]
                    break
            if change is not None:
                books.await_end(change, deadline_s)
            elif not _turns_back(found):
                assert older is not None
                self._free_from(older)
            elif self._roll_back(found, deadline_s):
                return True
        books.let_go(freed)
        return True

    def obstacle(self, name: ReplicaId) -> Callable[[], object] | None:
        """With the lock held: what to do, without it, before something else may be published under this id.

        None: nothing needs the bytes that are there.
        """
        books = self._books
        change = books.change_towards(name)
        found = books.shards.get(name)
        if found is not None and change is None:
            change = books.change_blocking(found)
        deadline_s = time.monotonic() + CHANGE_WAIT_S
        if change is not None:
            blocking = change
            return lambda: books.await_end(blocking, deadline_s)
        if found is None or (older := books.older_than(found)) is None:
            return None
        if found.is_full and _turns_back(found):
            return lambda: self._roll_back(found, deadline_s)
        to_cut = older
        return lambda: self._free_from(to_cut)

    def _free_from(self, older: HeldShard) -> None:
        """Cut a chain: the next older one that anybody wants gets bytes of its own.

        Raises what `full` does.
        """
        books = self._books
        with books.changed:
            # One that is hidden has one below it that is not.
            while older.id in books.hidden:
                below = books.older_than(older)
                if below is None:
                    return
                older = below
        self.full(older)

    def _roll_back(self, head: HeldShard, deadline_s: float) -> bool:
        """Drop a full shard by turning its bytes back to the next older step; False: look again what is there.

        Raises:
            NotHeldError: readers did not let go of it in time.
            OverBudgetError, StoreFullError: no room for a slot or a manifest; nothing happened.
        """
        books = self._books
        rolling = _RollBack(head)
        with books.changed:
            books.check_open()
            older = books.older_than(head)
            if books.shards.get(head.id) is not head or head.segment in books.changes or older is None:
                return False
            unwanted = older.id in books.hidden
            books.changes[head.segment] = rolling
        try:
            turned = self._turn_back(head, older, deadline_s)
        finally:
            rolling.done.set()
            with books.changed:
                books.end_change(rolling)
        if turned and unwanted:
            with books.changed:
                now = books.shards.get(older.id)
            if now is not None:
                self.drop(now)
        return turned

    def _turn_back(self, head: HeldShard, older: HeldShard, deadline_s: float) -> bool:
        books = self._books
        assert older.way_back is not None
        way = older.way_back.file
        plain = dataclasses.replace(older, way_back=None, segment=head.segment, offset=head.offset)
        turning = dataclasses.replace(plain, way_back=WayBack(way, head.key.step))
        with (
            slots(books.pools, older.chunks.longest, len(older.chunks)) as tools,
            books.staged(turning) as turning_manifest,
            books.staged(plain) as plain_manifest,
        ):
            with books.changed:
                left_s = max(0.0, deadline_s - time.monotonic())
                if not books.changed.wait_for(
                    lambda: books.closed or not books.pools.is_shared(head.segment), timeout=left_s
                ):
                    raise NotHeldError(
                        f"shard {tuple(head.id)} cannot go now: it is being read, and older steps need its bytes"
                    )
                books.check_open()
                if books.shards.get(head.id) is not head or books.older_than(head) is not older:
                    return False  # a reader that was waited for has changed the chain
                # From here on this is an unfinished patch, undone here or by the next process.
                books.place(turning_manifest, turning)
                books.strike(head)
            try:
                Undo(plain, way).put_all_back(range(len(older.chunks)), tools)
                with books.changed:
                    books.place(plain_manifest, plain)
            except BaseException as error:
                # Whatever happened, half-changed bytes are nobody's.
                books.condemn(turning, f"what it was turned back to ({error})")
                books.pools.condemn(head.segment)
                books.pools.let_go(head.segment)
                if not isinstance(error, FastCheckdError):
                    raise
                return True
        books.let_go([way])
        return True

    def _decode(
        self,
        path: Sequence[HeldShard],
        into: Callable[[int], memoryview],
        chunks: Sequence[int] | None = None,
    ) -> None:
        """Decode chunks, or all, of a pinned path's oldest step; raises CorruptError when it had to drop one."""
        table = path[0].chunks
        wanted = range(len(table)) if chunks is None else chunks
        # Levels between the newest and the wanted one need room; else there is only where it goes.
        scratch_bytes = table.longest if len(path) > 2 else 0
        tools: list[_Scratch] = [
            (memoryview(bytearray(scratch_bytes)), memoryview(bytearray(scratch_bytes)))
            for _ in range(min(WORKERS_MAX, max(1, len(wanted))))
        ]
        try:
            spread(wanted, tools, lambda index, tool: read_chunk(path, index, into(index), tool))
        except _BadLinkError as error:
            self._books.condemn(error.link, f"chunk {error.index}")
            raise CorruptError(
                f"shard {tuple(path[0].id)} cannot be had: chunk {error.index} of step "
                f"{error.link.key.step} does not match its digest; it was dropped"
            ) from error


def _turns_back(head: HeldShard) -> bool:
    """Whether dropping it may change its bytes: an owner's segment has other shards, and a trainer maps it."""
    return head.kind == pb.REPLICA_KIND_COPY


def _within(view: memoryview, shard: HeldShard, index: int) -> memoryview:
    start, stop = shard.chunks.range(index)
    return view[start:stop]
