"""The replicas that this node holds: publish, find, pin, verify, drop, and find all again after a restart.

A shard exists when its manifest does. The index here and the folder of manifests say the same at
any moment that the lock is free: a manifest is renamed into place, or unlinked, in the same
critical section as its entry; a segment is let go only after no manifest names it any more.

Lock order: this store's, then the pools'. Writing manifests and hashing happen outside both.
Deciding which shards to keep is not done here (see `retention`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import store_pb2

from ..counters import Counters
from ..errors import InvalidRequestError, NotHeldError, StoreError
from . import directory as files
from .adoption import adopt
from .held import HeldShard
from .manifests import SCHEMA, ReplicaId, check_manifest, encode, file_name, replica_id
from .segment_pools import SegmentPools, Usage
from .segments import Segment, pool_of

logger = logging.getLogger(__name__)

__all__ = ["HeldShard", "RamStore", "Segment", "Usage"]


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
        self._manifests = directory / "manifests"
        self._tmp = directory / "tmp"
        self._lock_fd = lock_fd
        self._pools = pools
        self._counters = counters
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._shards: dict[ReplicaId, HeldShard] = {}
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        budget_bytes: int,
        counters: Counters,
        now_ms: Callable[[], int] = _unix_ms,
    ) -> RamStore:
        """Make or take over a RAM directory; `now_ms` gives Unix milliseconds.

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
        folders = [directory / name for name in ("segments", "manifests", "tmp")]
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
                pools = SegmentPools(directory / "segments", budget_bytes)
                store = cls(directory, lock_fd, pools, counters, now_ms)
                store._adopt()
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise StoreError(f"cannot read the RAM directory {directory}: {error}") from None
        return store

    def _adopt(self) -> None:
        shards, dropped = adopt(self._manifests, self.directory / "segments")
        for segment in {shard.segment for shard in shards}:
            self._pools.adopt(segment)
        for shard in shards:
            self._pools.hold(shard.segment)
            self._shards[shard.id] = shard
        self._counters.add("manifests_adopted", len(shards))
        self._counters.add("manifests_dropped", dropped)
        usage = self._pools.usage()
        if usage.used_bytes > usage.budget_bytes:
            logger.warning(
                "the shards found in %s take %d bytes, the budget is %d: nothing new is taken until some go",
                self.directory, usage.used_bytes, usage.budget_bytes,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the directory to the next process. Later calls fail, but giving things back is still fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._shards.clear()
        self._pools.close()
        os.close(self._lock_fd)

    def allocate(self, size_bytes: int, pool: str) -> Segment:
        """A segment of at least `size_bytes` (0 is fine), the caller's own until `release`.

        Its content is what the last tenant of the same pool left. Allocating new memory takes about
        0.2 s per GB.

        Raises:
            OverBudgetError: asked, used and budget are in the message.
            StoreFullError: the file system is full; nothing that was held is lost.
        """
        return self._pools.allocate(size_bytes, pool)

    def release(self, segment: Segment) -> None:
        """The caller of `allocate` is done with the segment; the shards published in it keep it."""
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

    def allocate_new(self, size_bytes: int, pool: str) -> Segment:
        """As `allocate`, but never a free segment: for having one more of them."""
        return self._pools.allocate(size_bytes, pool, recycle=False)

    def free_segments(self, pool: str) -> list[Segment]:
        """What `allocate` will probably hand out from a pool, the next one first: a hint, it may go any time."""
        return self._pools.free_segments(pool)

    def count_segments(self, pool: str) -> int:
        """Number of a pool's segments, in use or free."""
        return self._pools.count(pool)

    def publish(
        self, manifest: pb.ShardManifest, segment: Segment, offset: int, *, verified: bool
    ) -> HeldShard:
        """Make a shard visible whose bytes lie in the segment from `offset` on.

        It takes the place of an older one under the same key and kind. `verified` says that the
        bytes were hashed just now. The caller must still own the segment.

        Raises:
            InvalidRequestError: the manifest does not hold up, or its bytes are not all in the segment.
            StoreFullError: no room for the manifest.
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
        if segment.pool != pool_of(own):
            # After a restart the kind alone tells the pool: a copy must never lie where a trainer can write.
            raise InvalidRequestError(
                f"a shard for pool {pool_of(own)!r} lies in a segment of {segment.pool!r}"
            )
        shard = HeldShard(own, segment, offset, self._now_ms() if verified else 0)
        with self._staged_manifest(shard) as staged, self._lock:
            self._check_open()
            self._pools.hold(segment)
            try:
                staged.rename(self._path(shard.id))
            except OSError as error:
                self._pools.let_go(segment)
                raise StoreError(f"cannot publish {self._path(shard.id)}: {error.strerror}") from None
            replaced = self._shards.get(shard.id)
            self._shards[shard.id] = shard
        if replaced is not None:
            self._pools.let_go(replaced.segment)
        return shard

    def find(self, key: pb.ShardKey, kind: pb.ReplicaKind.ValueType) -> HeldShard | None:
        """The replica of that kind, if it is held."""
        with self._lock:
            return self._shards.get(replica_id(key, kind))

    def held(self, job: str = "", step: int | None = None) -> list[HeldShard]:
        """What is held, of one job or of all, of one step or of all; in the order of their ids."""
        with self._lock:
            shards = list(self._shards.values())
        chosen = (s for s in shards if job in {"", s.key.job} and step in {None, s.key.step})
        return sorted(chosen, key=lambda s: s.id)

    def drop(self, shard: HeldShard) -> None:
        """Forget a shard. One that is dropped or replaced already is left alone."""
        self._drop(shard)

    def _drop(self, shard: HeldShard) -> bool:
        with self._lock:
            self._check_open()
            if self._current(shard) is None:
                return False
            try:
                self._path(shard.id).unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"cannot drop {self._path(shard.id)}: {error.strerror}") from None
            del self._shards[shard.id]
        self._pools.let_go(shard.segment)
        return True

    @contextlib.contextmanager
    def pinned(self, shard: HeldShard) -> Iterator[None]:
        """While inside, the shard's bytes stay, even when it is dropped or replaced.

        Raises:
            NotHeldError: on entry, when it is not held any more: find it again.
        """
        with self._lock:
            self._check_open()
            if self._current(shard) is None:
                raise NotHeldError(f"shard {tuple(shard.id)} is not held here any more")
            self._pools.hold(shard.segment)
        try:
            yield
        finally:
            self._pools.let_go(shard.segment)

    def verify(self, shard: HeldShard) -> bool:
        """Hash the bytes again. If they do not match, the shard is dropped and its memory not used again.

        Raises:
            NotHeldError: it is not held any more.
        """
        with self.pinned(shard):
            bad_chunk = shard.first_bad_chunk()
            if bad_chunk is None:
                self.note_verified(shard)
            else:
                self.condemn(shard, f"chunk {bad_chunk}")
            return bad_chunk is None

    def condemn(self, shard: HeldShard, what: str) -> None:
        """Drop a shard whose bytes were found bad, counted; its memory is not used again.

        `what` says which part does not match its digest.
        """
        self._pools.condemn(shard.segment)
        if self._drop(shard):
            self._counters.add("corrupt_found")
            logger.error(
                "dropped shard %s: %s in %s at %d does not match its digest",
                tuple(shard.id), what, shard.segment.name, shard.offset,
            )  # fmt: skip

    def note_verified(self, shard: HeldShard) -> None:
        """Remember that a shard's bytes were hashed just now and matched."""
        checked = dataclasses.replace(shard, verified_at_ms=self._now_ms())
        try:
            with self._staged_manifest(checked) as staged, self._lock:
                if self._closed or self._current(shard) is None:
                    return
                self._shards[shard.id] = checked
                staged.rename(self._path(shard.id))
        except (StoreError, OSError) as error:
            # The bytes are good, and the time in the file is only for people who look at it.
            logger.warning("cannot note in its manifest that %s was verified: %s", tuple(shard.id), error)

    def usage(self) -> Usage:
        """Memory at this moment. Manifests (16 bytes per chunk) are not counted."""
        return self._pools.usage()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the RAM store in {self.directory} is closed")

    def _current(self, shard: HeldShard) -> HeldShard | None:
        """With the lock held: the entry that `shard` is or was verified into, None if it was replaced."""
        found = self._shards.get(shard.id)
        return found if found is not None and found.manifest is shard.manifest else None

    def _path(self, name: ReplicaId) -> Path:
        return self._manifests / name.job / file_name(name)

    @contextlib.contextmanager
    def _staged_manifest(self, shard: HeldShard) -> Iterator[Path]:
        """A shard's manifest written in `tmp/`; removed at the end unless it was renamed into place."""
        stored = store_pb2.StoredShard(
            schema=SCHEMA,
            manifest=shard.manifest,
            segment=shard.segment.name,
            segment_offset=shard.offset,
            verified_at_ms=shard.verified_at_ms,
        )
        data = encode(stored)
        path = self._tmp / f"{secrets.token_hex(16)}.shard"
        with self._lock:
            self._check_open()

        def write() -> None:
            files.own_folder(self._manifests / shard.key.job)
            files.write_new(path, data)

        self._pools.with_room(f"write a manifest of {len(data)} bytes", write)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
