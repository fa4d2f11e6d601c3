"""The replicas that this node holds: publish, find, pin, verify, drop, patch, and find all again after a restart.

A shard exists when its manifest does; `books` keeps index and disk the same. A newer step may be put
into the replica of an older one (`begin_patch`); the older one is then had back from it (`full`,
see `chains`). LeaderCalls which shards to keep is not done here (see `retention`).

Lock order: the books', then the pools'. Writing manifests, hashing and decoding happen outside both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fastcheck_proto.v1 import common_pb2 as pb

from ..counters import Counters
from ..errors import InvalidRequestError, NotHeldError, StoreError
from . import directory as files
from .adoption import adopt
from .books import Books, memory_of
from .chains import Chains
from .held import HeldShard
from .manifests import check_manifest, replica_id
from .patches import Patch, begin_patch
from .segment_pools import SegmentPools, Usage
from .segments import Segment, is_staging, may_hold, pool_of, restored_pool
from .sparse import SparseSegment
from .thinning import Thinning

logger = logging.getLogger(__name__)

__all__ = ["HeldShard", "Patch", "RamStore", "Segment", "Usage"]

#: A patch can come in between so often.
READ_ATTEMPTS = 3
#: A pool that nothing was taken from for so many calls of `trim` has no use for its free segments.
UNUSED_TRIMS = 10
FOLDERS = ("segments", "ways", "manifests", "tmp")


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class RamStore:
    """One RAM directory. All methods may be called from any thread; most of them block on files."""

    def __init__(
        self,
        directory: Path,
        lock_fd: int,
        pools: SegmentPools,
        counters: Counters,
        now_ms: Callable[[], int],
    ) -> None:
        """For `open`."""
        self.directory = directory
        self._lock_fd = lock_fd
        self._pools = pools
        self._counters = counters
        self._books = Books(directory, pools, counters, now_ms)
        self._chains = Chains(self._books)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        budget_bytes: int,
        counters: Counters,
        now_ms: Callable[[], int] = _unix_ms,
        job_budget_bytes: int = 0,
    ) -> RamStore:
        """Make or take over a RAM directory; `now_ms` gives Unix milliseconds, `job_budget_bytes` 0 no limit.

        Raises:
            StoreError: another process has it, others may write to it, it is not a RAM directory,
                or the system refuses.
        """
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {directory.parent}: {error.strerror}") from None
        files.own_folder(directory)
        lock_path = directory / "LOCK"
        folders = [directory / name for name in FOLDERS]
        try:
            strange = not lock_path.exists() and any(f.is_dir() and any(f.iterdir()) for f in folders)
            if strange:
                # What is found in these folders gets removed: be sure that they are ours.
                raise StoreError(
                    f"{directory} has no LOCK but folders with other content: it is not a RAM directory; "
                    "set ram_dir to a folder of its own"
                )
            lock_fd = files.take_lock(lock_path)
            try:
                for folder in folders:
                    files.own_folder(folder)
                for leftover in (directory / "tmp").iterdir():
                    files.discard(leftover)
                pools = SegmentPools(directory / "segments", budget_bytes, job_budget_bytes)
                store = cls(directory, lock_fd, pools, counters, now_ms)
                store._adopt()
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise StoreError(f"cannot read the RAM directory {directory}: {error}") from None
        return store

    def _adopt(self) -> None:
        shards, dropped = adopt(self.directory)
        for segment, job in {shard.segment: shard.key.job for shard in shards}.items():
            self._pools.adopt(segment, job)
        for shard in shards:
            if shard.way_back is not None:
                self._pools.adopt(shard.way_back.file, shard.key.job)
            self._pools.hold(memory_of(shard))
            self._books.shards[shard.id] = shard
        self._counters.add("manifests_adopted", len(shards))
        self._counters.add("manifests_dropped", dropped)
        usage = self._pools.usage()
        if usage.used_bytes > usage.budget_bytes:
            logger.warning(
                "the shards found in %s take %d bytes, the budget is %d: nothing new is taken until some go",
                self.directory, usage.used_bytes, usage.budget_bytes,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the directory to the next process. Later calls fail, but giving things back is still fine.

        A patch under way ends without being undone: the next process does that.
        """
        books = self._books
        with books.changed:
            if books.closed:
                return
            books.closed = True
            changes = list(books.changes.values())
            books.changed.notify_all()
        for change in changes:
            change.freeze()
        with books.changed:
            books.shards.clear()
            books.changes.clear()
            books.changed.notify_all()
        self._pools.close()
        os.close(self._lock_fd)

    def allocate(self, size_bytes: int, pool: str, *, job: str = "", wait_s: float = 0.0) -> Segment:
        """A segment of at least `size_bytes` (0 is fine), the caller's own until `release`.

        Its content is what the last tenant of the same pool left. Allocating new memory takes about
        0.2 s per GB. Where the budget is short, memory that comes back within `wait_s` will do. It counts for
        `job`, or for the job of a staging pool.

        Raises:
            JobBudgetError: the job has as much as it may.
            OverBudgetError: asked, used and budget are in the message.
            StoreFullError: the file system is full; nothing that was held is lost.
        """
        return self._pools.allocate(size_bytes, pool, job=job, wait_s=wait_s)

    def allocate_sparse(self, length_bytes: int, filled: Sequence[range], job: str = "") -> SparseSegment:
        """A file of that length of which only some stretches take memory and may be written; `discard` it.

        Raises:
            OverBudgetError, StoreFullError: as `allocate`, for those stretches.
        """
        return SparseSegment.make(self.directory / "segments", self._pools, length_bytes, filled, job)

    def release(self, segment: Segment) -> None:
        """The caller of `allocate` is done with the segment; the shards published in it keep it."""
        self._pools.give_back(segment)

    def discard(self, segment: Segment) -> None:
        """As `release`, of memory that nobody is going to use again soon: it is not kept for recycling."""
        self._pools.condemn(segment)
        self._pools.give_back(segment)

    def take_again(self, shard: HeldShard) -> Segment:
        """Become the owner of a held shard's segment, as after `allocate`, until `release`.

        Raises:
            NotHeldError: the shard is not held any more.
            StoreError: somebody owns the segment already.
        """
        with self.pinned(shard):
            self._pools.take_again(shard.segment)
        return shard.segment

    def allocate_to_restore(self, size_bytes: int, job: str) -> Segment:
        """As `allocate`, for what trainers of a job are going to read: its memory is not used again afterwards."""
        segment = self._pools.allocate(size_bytes, restored_pool(job), job=job, recycle=False)
        self._pools.condemn(segment)
        return segment

    def retire(self, job: str, rank: int, session: int) -> None:
        """A rank's sessions below `session` are over: their processes may live, so what they can write to is not used
        again. What is published there stays.
        """
        self._pools.retire(lambda pool: (pool.job, pool.rank) == (job, rank) and pool.session < session)

    def retire_jobs(self, below: Mapping[str, int]) -> None:
        """As `retire`, for all ranks of each job and its sessions below the given number."""
        self._pools.retire(lambda pool: pool.session < below.get(pool.job, 0))

    def allocate_new(self, size_bytes: int, pool: str) -> Segment:
        """As `allocate`, but never a free segment: for having one more of them."""
        return self._pools.allocate(size_bytes, pool, recycle=False)

    def free_segments(self, pool: str) -> list[Segment]:
        """What `allocate` will probably hand out from a pool, the next one first: a hint, it may go any time."""
        return self._pools.free_segments(pool)

    def count_segments(self, pool: str) -> int:
        """Number of a pool's segments, in use or free."""
        return self._pools.count(pool)

    def trim(self) -> int:
        """Give the system back free segments that were not needed since the last call; returns their bytes.

        To be called about once a minute. What trainers copy into stays warm between rare saves.
        """
        return self._pools.trim(unused_max=UNUSED_TRIMS, keep=is_staging)

    def publish(
        self, manifest: pb.ShardManifest, segment: Segment, offset: int, *, verified: bool
    ) -> HeldShard:
        """Make a shard visible whose bytes lie in the segment from `offset` on.

        It takes the place of an older one under the same key and kind; older steps that are had from
        that one's bytes get their own first. `verified` says that the bytes were hashed just now. The
        caller must still own the segment.

        Raises:
            InvalidRequestError: the manifest does not hold up, or its bytes are not all in the segment.
            StoreFullError: no room for the manifest.
            OverBudgetError: no room for an older step that is had from the replaced one.
            NotHeldError: the replaced one is being read or patched, and that did not end in time.
            StoreError: the segment is not in use, or the file system refuses.
        """
        own = pb.ShardManifest()
        own.CopyFrom(manifest)
        check_manifest(own)
        if not 0 <= offset <= segment.size_bytes - own.bytes:
            raise InvalidRequestError(
                f"shard at {offset} with {own.bytes} bytes is not within a segment "
                f"of {segment.size_bytes} bytes"
            )
        if not may_hold(segment.pool, own):
            # After a restart the manifest alone tells the pool.
            raise InvalidRequestError(
                f"a shard for pool {pool_of(own)!r} lies in a segment of {segment.pool!r}"
            )
        books = self._books
        shard = HeldShard(own, segment, offset, books.now_ms() if verified else 0)
        with books.staged(shard) as staged:
            while True:
                with books.changed:
                    books.check_open()
                    clear_away = self._chains.obstacle(shard.id)
                    if clear_away is None:
                        replaced = books.shards.get(shard.id)
                        self._pools.hold(segment)
                        try:
                            books.place(staged, shard)
                        except BaseException:
                            self._pools.let_go(segment)
                            raise
                        freed = []
                        if replaced is not None:
                            freed = [memory_of(replaced), *books.strike_unneeded(replaced)]
                        break
                clear_away()
        books.let_go(freed)
        return shard

    def begin_patch(self, base: HeldShard, step: int, *, on_wanted: Callable[[], None]) -> Patch:
        """Begin to put a newer step with the same chunks into the base's own bytes.

        From here on whoever wants to read the base waits: `on_wanted` is then called, once, on the
        reader's thread, perhaps before the caller has looked at the patch (`Patch.wanted` tells); it must
        return soon and see to it that the patch is aborted.

        Raises:
            NotHeldError: the base cannot be patched: it is gone, no copy, not the newest, being read or
                patched, or `step` is held already. The sentence says which.
            OverBudgetError, StoreFullError, StoreError: no room for what a patch needs.
        """
        return begin_patch(self._books, base, step, on_wanted)

    def begin_thinning(self, older: HeldShard) -> Thinning:
        """Begin to collect the way back to a held shard from the next newer step, whose bytes lie elsewhere.

        Raises:
            OverBudgetError, StoreFullError, StoreError: no room for it.
        """
        return Thinning(self._books, older)

    def find(self, key: pb.ShardKey, kind: pb.ReplicaKind.ValueType) -> HeldShard | None:
        """The replica of that kind, if it is held."""
        name = replica_id(key, kind)
        with self._books.changed:
            return None if name in self._books.hidden else self._books.shards.get(name)

    def held(self, job: str = "", step: int | None = None) -> list[HeldShard]:
        """What is held, of one job or of all, of one step or of all; in the order of their ids.

        Ways back are among them: what they lead to can be had by `full`.
        """
        with self._books.changed:
            shards = [s for s in self._books.shards.values() if s.id not in self._books.hidden]
        chosen = (s for s in shards if job in {"", s.key.job} and step in {None, s.key.step})
        return sorted(chosen, key=lambda s: s.id)

    def full(self, shard: HeldShard) -> HeldShard:
        """The shard with bytes of its own: itself, or, of one that has a way back, a replica made now.

        A patch of the bytes that it is had from is ended first.

        Raises:
            NotHeldError: it is not held any more, or the patch did not end in time.
            OverBudgetError, StoreFullError: no room for it.
            CorruptError: it cannot be had, because it or a newer step was damaged; that was dropped, counted.
        """
        return self._chains.full(shard)

    def copy_to(self, shard: HeldShard, into: memoryview, chunks: Sequence[int] | None = None) -> None:
        """Copy a shard's bytes, each chunk checked, to where a caller wants them; takes no memory of the store.

        With `chunks` only those, into their places. A patch of the bytes that it is had from is ended first.

        Raises:
            NotHeldError: it is not held any more, or the patch did not end in time.
            CorruptError: as `full`; the content of `into` is undefined.
        """
        self._chains.copy_to(shard, into, chunks)

    @contextlib.contextmanager
    def reading(self, shard: HeldShard) -> Iterator[HeldShard]:
        """`full` and `pinned` as one: gives the shard whose `view` may be read while inside.

        Raises:
            NotHeldError, OverBudgetError, StoreFullError, CorruptError: on entry, as `full`.
        """
        with contextlib.ExitStack() as stack:
            for attempt in range(READ_ATTEMPTS):
                full = self.full(shard)
                try:
                    stack.enter_context(self.pinned(full))
                    break
                except NotHeldError:
                    # Patched in between: then it is held as a way back, and made full again.
                    if attempt == READ_ATTEMPTS - 1:
                        raise
            yield full

    def drop(self, shard: HeldShard) -> None:
        """Forget a shard. One that is dropped or replaced already is left alone.

        An older step that another one is had through is kept, unseen, until that one goes as well (a
        restart forgets that it was dropped). The newest one's bytes are first turned back to the next
        older step, if there is one.

        Raises:
            NotHeldError: older steps need its bytes, and a reader or a patch did not let go of them in time.
            OverBudgetError, StoreFullError: no room to turn them back; nothing happened.
        """
        self._chains.drop(shard)

    @contextlib.contextmanager
    def pinned(self, shard: HeldShard) -> Iterator[None]:
        """While inside, the shard's bytes stay, even when it is dropped or replaced.

        A patch of them is ended first.

        Raises:
            NotHeldError: on entry, when its bytes are not held any more where it says: find it again,
                and make it full.
        """
        with self._books.pinned(shard) as path:
            now = path[0]
            if not now.is_full or (now.segment, now.offset) != (shard.segment, shard.offset):
                raise NotHeldError(
                    f"the bytes of shard {tuple(shard.id)} are not where they were: find it again"
                )
            yield

    def verify(self, shard: HeldShard) -> bool:
        """Check the bytes again. If they do not match, the shard is dropped and its memory not used again.

        One that has a way back is decoded into scratch memory.

        Raises:
            NotHeldError: it is not held any more, or a patch of it did not end in time.
        """
        with self._books.pinned(shard) as path:
            now = path[0]
            if now.is_full:
                bad_chunk = now.first_bad_chunk()
                if bad_chunk is not None:
                    self._books.condemn(now, f"chunk {bad_chunk}")
                good = bad_chunk is None
            else:
                good = self._chains.is_good(path)
            if good:
                self.note_verified(now)
            return good

    @property
    def on_condemned(self) -> Callable[[HeldShard], None] | None:
        """Is told of each shard that was dropped because its bytes were bad, on the thread that found it."""
        return self._books.on_condemned

    @on_condemned.setter
    def on_condemned(self, listener: Callable[[HeldShard], None] | None) -> None:
        self._books.on_condemned = listener

    def condemn(self, shard: HeldShard, what: str) -> None:
        """Drop a shard whose bytes were found bad, counted, and with it the older steps that are had from it.

        The memory is not used again. `what` says which part does not match its digest. The caller has it pinned.
        """
        self._books.condemn(shard, what)

    def note_verified(self, shard: HeldShard) -> None:
        """Remember that a shard's bytes were checked just now and matched."""
        books = self._books
        with books.changed:
            now = None if books.closed else books.current(shard)
        if now is None:
            return
        checked = dataclasses.replace(now, verified_at_ms=books.now_ms())
        try:
            with books.staged(checked) as staged, books.changed:
                # A patch has rewritten the manifest meanwhile, or will when it ends.
                if not books.closed and books.current(shard) is now and now.segment not in books.changes:
                    books.place(staged, checked)
        except StoreError as error:
            # The bytes are good, and the time in the file is only for people who look at it.
            logger.warning("cannot note in its manifest that %s was verified: %s", tuple(shard.id), error)

    @property
    def job_budget_bytes(self) -> int:
        """Most that one job may have; 0: no limit of its own."""
        return self._pools.job_budget_bytes

    def job_bytes(self) -> dict[str, int]:
        """What each job has at this moment: segments and ways back, not what is free."""
        return self._pools.job_bytes()

    def usage(self) -> Usage:
        """Memory at this moment. Manifests (16 bytes per chunk) are not counted."""
        return self._pools.usage()
