"""The replicas that this node holds: the door of the chunk store.

Which replicas to keep is not decided here (see `store.retention`). All methods may be called from any thread; most of
them block on files, hashing or decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..counters import Counters
from ..digests import DIGEST_BYTES
from ..errors import CorruptError, InvalidRequestError, NotHeldError, StoreError
from . import directory as files
from .adoption import adopt
from .chunk import Chunk, Form, checked_bytes_of
from .draft import Draft
from .index import Index
from .manifests import check_manifest, replica_id
from .replica import Replica
from .reverse_deltas import ReverseDeltas, relink
from .segment_pools import SegmentPools, StoreUsage
from .segments import Segment, is_staging, restored_pool, staging_pool
from .slots import Slot, SlotPool
from .sparse import SparseSegment

logger = logging.getLogger(__name__)

#: A pool that nothing was taken from for so many calls of `trim` has no use for its free files.
UNUSED_TRIMS = 10
FOLDERS = ("segments", "manifests", "tmp")


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class OpenReplica:
    """A replica whose chunks stay while it is open."""

    def __init__(self, index: Index, replica: Replica) -> None:
        self._index = index
        self.replica = replica

    def chunk(self, number: int) -> AbstractContextManager[memoryview]:
        """A chunk's bytes, read-only: where they lie if it is raw, not checked; else decoded into memory of their own.

        Raises:
            CorruptError: they cannot be decoded; the replica was dropped, counted.
        """
        return self._index.bytes_of(self.replica, number)


class ReplicaStore:
    """One RAM directory."""

    def __init__(
        self, directory: Path, lock_fd: int, pools: SegmentPools, slots: SlotPool, index: Index
    ) -> None:
        """For `open`."""
        self.directory = directory
        self._lock_fd = lock_fd
        self._pools = pools
        self._slots = slots
        self._index = index
        self._closing = threading.Lock()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        budget_bytes: int,
        counters: Counters,
        now_ms: Callable[[], int] = _unix_ms,
        job_budget_bytes: int = 0,
    ) -> ReplicaStore:
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
            if not lock_path.exists() and any(f.is_dir() and any(f.iterdir()) for f in folders):
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
                slots = SlotPool(pools, budget_bytes)
                index = Index(directory, pools, slots, counters, now_ms)
                adopt(index)
                store = cls(directory, lock_fd, pools, slots, index)
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise StoreError(f"cannot read the RAM directory {directory}: {error}") from None
        usage = pools.usage()
        if usage.used_bytes > usage.budget_bytes:
            logger.warning(
                "the shards found in %s take %d bytes, the budget is %d: nothing new is taken until some go",
                directory, usage.used_bytes, usage.budget_bytes,
            )  # fmt: skip
        return store

    def close(self) -> None:
        """Leave the directory to the next process. Later calls fail, but giving things back is still fine."""
        with self._closing:
            with self._index.changed:
                if self._index.closed:
                    return
                self._index.closed = True
                self._index.histories.clear()
            self._slots.close()
            self._pools.close()
            os.close(self._lock_fd)

    @property
    def faults(self) -> Callable[[str], None]:
        """Fault points: called with a name between any two steps that change something on disk. For tests."""
        return self._index.faults

    @faults.setter
    def faults(self, faults: Callable[[str], None]) -> None:
        self._index.faults = faults

    # --- segments --------------------------------------------------------------------------------

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

    def allocate_new(self, size_bytes: int, pool: str) -> Segment:
        """As `allocate`, but never a free segment: for having one more of them."""
        return self._pools.allocate(size_bytes, pool, recycle=False)

    def allocate_sparse(self, length_bytes: int, filled: Sequence[range], job: str = "") -> SparseSegment:
        """A file of that length of which only some stretches take memory and may be written; `discard` it.

        Raises:
            OverBudgetError, StoreFullError: as `allocate`, for those stretches.
        """
        return SparseSegment.make(self.directory / "segments", self._pools, length_bytes, filled, job)

    def allocate_to_restore(self, size_bytes: int, job: str) -> Segment:
        """As `allocate`, for what trainers of a job are going to read: its memory is not used again afterwards."""
        segment = self._pools.allocate(size_bytes, restored_pool(job), job=job, recycle=False)
        self._pools.condemn(segment)
        return segment

    def release(self, segment: Segment) -> None:
        """The caller of `allocate` is done with the segment; the replicas published in it keep it."""
        self._pools.give_back(segment)

    def discard(self, segment: Segment) -> None:
        """As `release`, of memory that nobody is going to use again soon: it is not kept for recycling."""
        self._pools.condemn(segment)
        self._pools.give_back(segment)

    def take_again(self, replica: Replica) -> Segment:
        """Become the owner of the segment that a replica lies in, as after `allocate`, until `release`.

        Raises:
            NotHeldError: the replica is not held any more, or not in a segment.
            StoreError: somebody owns the segment already.
        """
        with self._index.open(replica):
            if (segment := replica.segment) is None:
                raise NotHeldError(f"shard {tuple(replica.id)} does not lie in a segment")
            self._pools.take_again(segment)
        return segment

    def retire(self, job: str, rank: int, session: int) -> None:
        """A rank's sessions below `session` are over: their processes may live, so what they can write to is not used
        again. What is published there stays.
        """
        self._pools.retire(lambda pool: (pool.job, pool.rank) == (job, rank) and pool.session < session)

    def retire_jobs(self, below: Mapping[str, int]) -> None:
        """As `retire`, for all ranks of each job and its sessions below the given number."""
        self._pools.retire(lambda pool: pool.session < below.get(pool.job, 0))

    def free_segments(self, pool: str) -> list[Segment]:
        """What `allocate` will probably hand out from a pool, the next one first: a hint, it may go any time."""
        return self._pools.free_segments(pool)

    def count_segments(self, pool: str) -> int:
        """Number of a pool's segments, in use or free."""
        return self._pools.count(pool)

    def trim(self) -> int:
        """Give the system back free files that were not needed since the last call; returns their bytes.

        To be called about once a minute. What trainers copy into stays warm between rare saves.
        """
        return self._pools.trim(unused_max=UNUSED_TRIMS, keep=is_staging)

    # --- replicas --------------------------------------------------------------------------------

    def publish(
        self, manifest: pb.ShardManifest, segment: Segment, offset: int, *, verified: bool
    ) -> Replica:
        """Make a replica of the owner's visible whose bytes lie in the segment from `offset` on.

        It takes the place of an older one under the same key. `verified` says that the bytes were hashed just now.
        The caller must still own the segment.

        Raises:
            InvalidRequestError: the manifest does not hold up, its bytes are not all in the segment, or it is a copy:
                a copy never lies where a trainer can write.
            StoreFullError: no room for the manifest.
            StoreError: the segment is not in use, or the file system refuses.
        """
        own = pb.ShardManifest()
        own.CopyFrom(manifest)
        check_manifest(own)
        if not 0 <= offset <= segment.size_bytes - own.bytes:
            raise InvalidRequestError(
                f"a shard at {offset} with {own.bytes} bytes is not within a segment of {segment.size_bytes} bytes"
            )
        key = own.key
        pools = (staging_pool(key.job, key.rank, own.session), restored_pool(key.job))
        if own.kind != pb.REPLICA_KIND_OWNER or segment.pool not in pools:
            raise InvalidRequestError(f"a shard of {key.job!r} may not lie in a segment of {segment.pool!r}")
        table = ChunkTable.of(own)
        self._pools.hold(segment, len(table))
        content = []
        for index in range(len(table)):
            start, stop = table.range(index)
            digest = own.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            place = Slot(segment, offset + start, stop - start)
            place.references = 1
            content.append(Chunk(digest, stop - start, Form(place), checked=verified))
        replica = Replica(own, tuple(content), self._index.now_ms() if verified else 0)
        try:
            self._index.publish(replica)
        except BaseException:
            for _ in content:
                self._pools.let_go(segment)
            raise
        return replica

    def draft(
        self,
        manifest: pb.ShardManifest,
        *,
        base: Replica | None = None,
        keep_base: bool = True,
        lean: bool = False,
        wait_s: float = 0.0,
    ) -> Draft:
        """Begin a copy, of which what is here already is taken by digest. `publish` or `abandon` it.

        Args:
            base: an older step of the same shard, cut alike, against which chunks may come.
            keep_base: it is to be had when the copy is published: as reverse deltas, where they are smaller.
            lean: with a base, take a slot for each chunk as it comes, though there is room for all of them now: the
                room is needed for something else.
            wait_s: how long to wait for room.

        Raises:
            InvalidRequestError: the manifest does not hold up, or the base is not cut alike.
            NotHeldError: the base is not held any more.
            JobBudgetError, OverBudgetError, StoreFullError: no room, not even for a lean draft if there is a base.
        """
        own = pb.ShardManifest()
        own.CopyFrom(manifest)
        own.kind = pb.REPLICA_KIND_COPY
        own.part = 0
        check_manifest(own)
        draft = Draft(self._index, own, base, keep_base=keep_base)
        if base is not None and base.chunks != draft.chunks:
            raise InvalidRequestError("a base is cut as the shard is")
        draft.begin(wait_s, lean=lean)
        return draft

    def find(self, key: pb.ShardKey, kind: pb.ReplicaKind.ValueType) -> Replica | None:
        """The replica of that kind, if it is held."""
        with self._index.changed:
            return self._index.find(replica_id(key, kind))

    def held(self, job: str = "", step: int | None = None) -> list[Replica]:
        """What is held, of one job or of all, of one step or of all; in the order of their ids."""
        with self._index.changed:
            found = [
                replica
                for name, history in self._index.histories.items()
                if job in {"", name.job}
                for replica in history.replicas.values()
                if step in {None, replica.key.step}
            ]
        return sorted(found, key=lambda replica: replica.id)

    def history(self, key: pb.ShardKey, kind: pb.ReplicaKind.ValueType) -> list[Replica]:
        """All steps of that shard of that rank and kind here, the newest first."""
        return self._index.replicas_of(replica_id(key, kind))

    @contextlib.contextmanager
    def reading(self, replica: Replica) -> Iterator[OpenReplica]:
        """While inside, its bytes can be had, whatever becomes of it.

        Raises:
            NotHeldError: on entry: it is not held any more.
        """
        with self._index.open(replica):
            yield OpenReplica(self._index, replica)

    def copy_to(self, replica: Replica, into: memoryview, chunks: Sequence[int] | None = None) -> None:
        """Copy a replica's bytes, each chunk checked, to where a caller wants them; takes no memory of the store.

        With `chunks` only those, into their places. Several threads may copy parts of one replica.

        Raises:
            NotHeldError: it is not held any more.
            CorruptError: a chunk is bad: the replica was dropped, counted. The content of `into` is undefined.
        """
        with self._index.open(replica):
            for number in range(len(replica.chunks)) if chunks is None else chunks:
                start, stop = replica.chunks.range(number)
                chunk = replica.content[number]
                with self._index.pinned(chunk) as chain, into[start:stop] as out:
                    try:
                        checked_bytes_of(chain, out)
                        continue
                    except CorruptError:
                        pass
                self._index.check(chunk, replica.id)
                raise CorruptError(f"chunk {number} of shard {tuple(replica.id)} is not what it was")

    @contextlib.contextmanager
    def mapped(self, replica: Replica) -> Iterator[Segment]:
        """The segment that a replica lies in. While inside, nothing is written to it, whatever becomes of the replica:
        somebody reads it where it is.

        Raises:
            NotHeldError: the replica is not held any more, or does not lie in a segment.
        """
        with self._index.changed:
            self._index.check_held(replica)
            segment = replica.segment
            if segment is None:
                raise NotHeldError(f"the bytes of shard {tuple(replica.id)} do not lie in one segment")
            self._pools.hold(segment)
        try:
            yield segment
        finally:
            self._pools.let_go(segment)

    def reverse_deltas(self, older: Replica) -> ReverseDeltas:
        """Begin to turn an older step of this node's own into reverse deltas, while a newer one is sent.

        Raises:
            NotHeldError: it is not held any more.
        """
        return ReverseDeltas(self._index, older)

    def drop(self, replica: Replica) -> None:
        """Forget a replica. One that is dropped or replaced already is left alone.

        Older steps that lead to it are led to what is still held, which takes as long as decoding them.
        """
        if self._index.drop(replica):
            relink(self._index, replica.id)

    def verify(self, replica: Replica) -> bool:
        """Check the bytes again. If they do not match, the replica is dropped and the bad memory not used again.

        Raises:
            NotHeldError: it is not held any more.
        """
        if not all(self.check(replica, number) for number in range(len(replica.content))):
            return False
        self.note_verified(replica)
        return True

    def check(self, replica: Replica, number: int) -> bool:
        """The same for one chunk. Of the others nothing is held meanwhile, and nothing is noted.

        Raises:
            NotHeldError: the replica is not held any more.
        """
        return self._index.check(replica.content[number], replica.id, replica)

    def condemn(self, replica: Replica, what: str) -> None:
        """Somebody says that bytes of a replica are bad: check it, and drop it if they are."""
        with contextlib.suppress(NotHeldError):
            if self.verify(replica):
                logger.info("shard %s was called bad (%s), and is good", tuple(replica.id), what)

    @property
    def on_condemned(self) -> Callable[[Replica], None] | None:
        """Is told of each replica that was dropped because its bytes were bad, on the thread that found it."""
        return self._index.on_condemned

    @on_condemned.setter
    def on_condemned(self, listener: Callable[[Replica], None] | None) -> None:
        self._index.on_condemned = listener

    def note_verified(self, replica: Replica) -> None:
        """Remember that a replica's bytes were checked just now and matched."""
        self._index.note_checked(replica)

    # --- memory ----------------------------------------------------------------------------------

    @property
    def job_budget_bytes(self) -> int:
        """Most that one job may have; 0: no limit of its own."""
        return self._pools.job_budget_bytes

    def job_bytes(self) -> dict[str, int]:
        """What each job has at this moment: segments and slots, not what is free."""
        return self._pools.job_bytes()

    def usage(self) -> StoreUsage:
        """Memory at this moment. Manifests (about 30 bytes per chunk) are not counted."""
        usage = self._pools.usage()
        return dataclasses.replace(usage, free_bytes=usage.free_bytes + self._slots.free_bytes)
