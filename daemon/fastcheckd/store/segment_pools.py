"""Who uses which segment, which ones are free, and how much memory all of them take.

A segment is in use while anything refers to it: its allocation, or chunks in it. With the last reference it becomes
free, for the same pool only, and stays warm. Free segments count against the budget like all others and are the first
to go when it gets tight. What is in use for a job counts against the budget that each job has, too, if there is one;
what is free counts for no job.

One lock guards all of it and is never held during slow work: memory is accounted before it is
allocated and until after it is unlinked, so the files never take more than is accounted for. Knows
nothing of shards and manifests.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import InvalidRequestError, OverBudgetError, StoreError, StoreFullError
from .directory import is_full
from .job_shares import JobShares
from .segments import Segment, StagingPool, job_of_pool, rounded

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Free segments that a pool may keep although it has fewer in use. Beyond that and the number in
#: use it will hardly need more at once: a step's commit frees one step and the next one takes it.
FREE_SEGMENTS_MIN = 4
#: Longest wait for another thread that is unlinking what we need.
UNLINK_WAIT_S = 30.0


@dataclass(frozen=True)
class StoreUsage:
    """Memory of a store at one moment."""

    #: All segments and slabs, in use, free, or being made.
    used_bytes: int
    #: The part of `used_bytes` that goes away as soon as something else needs it.
    free_bytes: int
    budget_bytes: int
    #: Number of segments, free ones included.
    segments: int


def best_fit(free: Iterable[Segment], size_bytes: int) -> Segment | None:
    """The smallest that holds `size_bytes` and does not waste more than a quarter and 1 MiB.

    Among equals the one that is free for longest, so that what `free_segments` names first comes next.
    """
    most = size_bytes + size_bytes // 4 + (1 << 20)
    fitting = (s for s in free if size_bytes <= s.size_bytes <= most)
    return min(fitting, key=lambda s: s.size_bytes, default=None)


def pick_victim(free: Sequence[Segment], lack_bytes: int) -> Segment:
    """The smallest that alone makes up for the lack, else the largest; among equals the oldest."""
    enough = [s for s in free if s.size_bytes >= lack_bytes]
    if enough:
        return min(enough, key=lambda s: s.size_bytes)
    return max(free, key=lambda s: s.size_bytes)


class SegmentPools:
    """All segments of one directory."""

    def __init__(self, folder: Path, budget_bytes: int, job_budget_bytes: int = 0) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        #: Guards everything below and the counts in the segments; notified when memory comes back.
        self._changed = threading.Condition()
        self._in_use: set[Segment] = set()
        #: In the order in which they became free.
        self._free: list[Segment] = []
        #: Files that exist, and those that a thread is about to make.
        self._used_bytes = 0
        #: The part of `_used_bytes` that is in use for each job, or set aside for it.
        self._jobs = JobShares(job_budget_bytes, self._changed)
        #: The part of `_used_bytes` that threads are unlinking right now.
        self._doomed_bytes = 0
        self._closed = False
        #: Of each pool that something was taken from since the last `trim`: the fewest free ones that were left.
        self._least_free: dict[str, int] = {}
        #: How many times in a row `trim` has found that nothing was taken.
        self._unused: dict[str, int] = {}

    @property
    def job_budget_bytes(self) -> int:
        """Most that may be in use for one job; 0: no limit of its own."""
        return self._jobs.budget_bytes

    def allocate(
        self, size_bytes: int, pool: str, *, job: str = "", recycle: bool = True, wait_s: float = 0.0
    ) -> Segment:
        """A segment of at least so many bytes, recycled if possible and wanted. The caller owns one reference.

        It counts for `job`; a staging pool says itself whose it is.

        Raises:
            InvalidRequestError: the size is negative.
            JobBudgetError: the job has as much as it may, and for `wait_s` had.
            OverBudgetError: the budget does not allow it, even without the free segments, and for `wait_s` did not.
            StoreFullError: the file system has no room, even without the free segments.
        """
        if size_bytes < 0:
            raise InvalidRequestError(f"a segment of {size_bytes} bytes was asked for")
        size = rounded(size_bytes)
        job = job_of_pool(pool) or job
        recycled = self._recycle_or_reserve(size, pool, job, recycle=recycle, wait_s=wait_s)
        if recycled is not None:
            return recycled
        try:
            segment = self.with_room(
                f"allocate {size} bytes", lambda: Segment.create(self._folder, size, pool)
            )
        except BaseException:
            with self._changed:
                self._used_bytes -= size
                self._jobs.charge(job, -size)
                self._changed.notify_all()
            raise
        with self._changed:
            if not self._closed:
                self._start_use(segment, job)
                return segment
        segment.unlink()  # the next process does not know of it
        raise StoreError(f"the RAM store in {self._folder.parent} is closed")

    def grow(self, file: Segment, more_bytes: int, *, wait_s: float = 0.0) -> None:
        """Set memory aside for a file in use that is about to become longer.

        Raises:
            OverBudgetError: as `allocate`.
        """
        self._recycle_or_reserve(more_bytes, "", file.job, recycle=False, wait_s=wait_s)
        with self._changed:
            file.size_bytes += more_bytes

    def _recycle_or_reserve(
        self, size: int, pool: str, job: str, *, recycle: bool, wait_s: float
    ) -> Segment | None:
        """A free segment, or None with `size` bytes of the budgets set aside for a new one."""
        started_s = time.monotonic()
        while True:
            with self._changed:
                self._check_open()
                left = self._jobs.left_for(job)
                if size > left:
                    self._jobs.wait(job, size, wait_s - (time.monotonic() - started_s))
                    continue
                segment = best_fit((s for s in self._free if s.pool == pool and s.size_bytes <= left), size)
                if segment is not None and recycle:
                    self._free.remove(segment)
                    self._jobs.charge(job, segment.size_bytes)
                    self._start_use(segment, job)
                    return segment
                lack = self._used_bytes + size - self._budget_bytes
                if lack <= 0:
                    self._used_bytes += size
                    self._jobs.charge(job, size)
                    return None
                coming = lack <= self._doomed_bytes + sum(s.size_bytes for s in self._free)
                waited_s = time.monotonic() - started_s
                left_s = (UNLINK_WAIT_S if coming else min(wait_s, UNLINK_WAIT_S)) - waited_s
                if left_s <= 0:
                    raise OverBudgetError(
                        f"{size} bytes asked for, {self._used_bytes} of the RAM budget of "
                        f"{self._budget_bytes} bytes are in use on this node: raise ram_budget_bytes, keep "
                        "fewer steps, or use more nodes"
                    )
                if not coming or lack <= self._doomed_bytes:
                    self._changed.wait(left_s)
                    continue
                victim = pick_victim(self._free, lack - self._doomed_bytes)
                self._doom([victim])
            self._unlink([victim])

    def with_room(self, what: str, action: Callable[[], T]) -> T:
        """Run something that takes room; if there is none, unlink all free segments and run it once more.

        Raises:
            StoreFullError: there is still no room.
            StoreError: another error of the file system.
        """
        try:
            try:
                return action()
            except OSError as error:
                if not is_full(error) or not self._unlink_free():
                    raise
            return action()
        except OSError as error:
            if not is_full(error):
                raise StoreError(f"cannot {what} in {self._folder.parent}: {error.strerror}") from None
            system = os.statvfs(self._folder)
            left, size = (blocks * system.f_frsize for blocks in (system.f_bavail, system.f_blocks))
            inodes = system.f_favail
            raise StoreFullError(
                f"cannot {what}: the file system of {self._folder.parent} has {left} of {size} bytes and "
                f"{inodes} inodes left: enlarge it, or set ram_budget_bytes below its size; unlinked files "
                "that a trainer still has mapped take room as well"
            ) from None

    def charge(self, job: str, size_bytes: int, *, wait_s: float = 0.0, within: bool = True) -> None:
        """So many bytes of a file that counts for nobody are in use for a job, more or less than before.

        Args:
            within: the job may not have more than its budget; False: it has them already.

        Raises:
            JobBudgetError: the job has as much as it may, and for `wait_s` had.
        """
        started_s = time.monotonic()
        with self._changed:
            while within and size_bytes > max(0, self._jobs.left_for(job)):
                self._jobs.wait(job, size_bytes, wait_s - (time.monotonic() - started_s))
            self._jobs.charge(job, size_bytes)
            if size_bytes < 0:
                self._changed.notify_all()

    def adopt(self, segment: Segment, job: str) -> None:
        """Add a file of an earlier process, or one that is about to be made, without any reference yet."""
        with self._changed:
            segment.job = job
            self._jobs.charge(job, segment.size_bytes)
            self._used_bytes += segment.size_bytes
            self._in_use.add(segment)

    def hold(self, segment: Segment, times: int = 1) -> None:
        """Add references to a segment that is in use.

        Raises:
            StoreError: it is free or gone, so its bytes are not the caller's any more.
        """
        with self._changed:
            self._check_open()
            if segment not in self._in_use:
                raise StoreError(f"segment {segment.name} is not in use: it was released too early")
            segment.references += times

    def let_go(self, segment: Segment) -> None:
        """Take a reference away; with the last one the segment is free. Does nothing on a closed store."""
        with self._changed:
            if self._closed:
                return
            doomed = self._drop_reference(segment)
        self._unlink(doomed)

    def take_again(self, segment: Segment) -> None:
        """Become the owner of a segment in use whose allocation was given back.

        Raises:
            StoreError: it is free or gone, or has an owner.
        """
        with self._changed:
            self._check_open()
            if segment not in self._in_use or segment.allocated:
                raise StoreError(f"segment {segment.name} cannot be taken again")
            segment.allocated = True
            segment.references += 1

    def give_back(self, segment: Segment) -> None:
        """Take the allocation's reference away. Does nothing on a closed store.

        Raises:
            StoreError: it has been given back before.
        """
        with self._changed:
            if self._closed:
                return
            if not segment.allocated:
                raise StoreError(f"segment {segment.name} was released twice")
            segment.allocated = False
            doomed = self._drop_reference(segment)
        self._unlink(doomed)

    def condemn(self, segment: Segment) -> None:
        """See to it that the segment is unlinked, not recycled, once nothing refers to it."""
        with self._changed:
            segment.recyclable = False

    def retire(self, is_over: Callable[[StagingPool], bool]) -> None:
        """No segment that these sessions copied into is used again: once free, it is unlinked."""
        with self._changed:
            for segment in [*self._in_use, *self._free]:
                pool = StagingPool.of(segment.pool)
                if pool is not None and is_over(pool):
                    segment.recyclable = False
            doomed = [segment for segment in self._free if not segment.recyclable]
            self._doom(doomed)
        self._unlink(doomed)

    def free_segments(self, pool: str) -> list[Segment]:
        """The free segments of a pool, in the order in which `allocate` takes those of equal size."""
        with self._changed:
            return [s for s in self._free if s.pool == pool]

    def count(self, pool: str) -> int:
        """Number of a pool's segments, in use or free."""
        with self._changed:
            return sum(1 for group in (self._in_use, self._free) for s in group if s.pool == pool)

    def trim(self, *, unused_max: int, keep: Callable[[str], bool]) -> int:
        """Give back free segments that were not needed since the last call, however busy the pool was; returns bytes.

        Of a pool from which nothing was taken nothing goes, since its next tenant may just be rare; after
        `unused_max` such calls in a row everything, unless `keep(pool)`.
        """
        with self._changed:
            doomed: list[Segment] = []
            for pool in {s.pool for s in self._free}:
                free = [s for s in self._free if s.pool == pool]
                if pool in self._least_free:
                    self._unused.pop(pool, None)
                    doomed += free[: self._least_free[pool]]
                    continue
                self._unused[pool] = self._unused.get(pool, 0) + 1
                if self._unused[pool] >= unused_max and not keep(pool):
                    del self._unused[pool]
                    doomed += free
            self._least_free.clear()
            self._doom(doomed)
        self._unlink(doomed)
        return sum(s.size_bytes for s in doomed)

    def usage(self) -> StoreUsage:
        """Memory at this moment."""
        with self._changed:
            return StoreUsage(
                used_bytes=self._used_bytes,
                free_bytes=sum(s.size_bytes for s in self._free),
                budget_bytes=self._budget_bytes,
                segments=len(self._in_use) + len(self._free),
            )

    def job_bytes(self) -> dict[str, int]:
        """What is in use for each job at this moment."""
        with self._changed:
            return self._jobs.in_use()

    def close(self) -> None:
        """Unlink the free segments and leave the others to the next process."""
        self._unlink_free()
        with self._changed:
            self._closed = True
            for segment in self._in_use:
                segment.forget()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the RAM store in {self._folder.parent} is closed")

    def _start_use(self, segment: Segment, job: str) -> None:
        assert segment.references == 0 and not segment.allocated
        segment.job = job
        segment.references = 1
        segment.allocated = True
        segment.tenants += 1
        self._in_use.add(segment)
        self._note_taken(segment.pool)

    def _note_taken(self, pool: str) -> None:
        left = sum(1 for s in self._free if s.pool == pool)
        self._least_free[pool] = min(left, self._least_free.get(pool, left))

    def _drop_reference(self, segment: Segment) -> list[Segment]:
        """With the lock held: one reference less. Returns what the caller must unlink without the lock."""
        assert segment.references > 0, segment
        segment.references -= 1
        if segment.references:
            return []
        self._in_use.remove(segment)
        self._jobs.charge(segment.job, -segment.size_bytes)
        segment.job = ""
        self._free.append(segment)
        self._changed.notify_all()  # whoever waits for room may have it
        if not segment.recyclable or self._used_bytes > self._budget_bytes:
            doomed = [segment]
        else:
            in_use = sum(1 for s in self._in_use if s.pool == segment.pool)
            free = [s for s in self._free if s.pool == segment.pool]
            doomed = free[: -max(FREE_SEGMENTS_MIN, in_use)]
        self._doom(doomed)
        return doomed

    def _doom(self, segments: Sequence[Segment]) -> None:
        """With the lock held: take free segments off the books' free side; the caller unlinks them next."""
        for segment in segments:
            self._free.remove(segment)
            self._doomed_bytes += segment.size_bytes

    def _unlink(self, segments: Sequence[Segment]) -> None:
        """Without the lock: unlink doomed segments; their memory counts until they are gone."""
        for segment in segments:
            gone = False
            try:
                segment.unlink()
                gone = True
            except OSError as error:
                logger.error("cannot unlink %s, its memory stays in use: %s", segment.path, error.strerror)
            finally:
                with self._changed:
                    self._doomed_bytes -= segment.size_bytes
                    self._used_bytes -= segment.size_bytes if gone else 0
                    self._changed.notify_all()

    def _unlink_free(self) -> bool:
        """Give all free segments' memory back, and wait for others that do; whether any came back."""
        with self._changed:
            if self._closed:
                return False
            before = self._doomed_bytes
            doomed = list(self._free)
            self._doom(doomed)
        self._unlink(doomed)
        with self._changed:
            self._changed.wait_for(lambda: self._doomed_bytes == 0, UNLINK_WAIT_S)
        return bool(doomed) or before > 0
