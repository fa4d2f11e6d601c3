"""Segments: files of bytes, each mapped once and kept mapped.

Unmapping and mapping again costs tens of milliseconds per GB, and a fresh page seven times a warm
one, so a segment lives long and changes tenants. Who its tenants are is counted in
`segment_pools`; this module only makes, adopts, maps and unlinks the file.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptError, StoreError
from . import directory

PAGE_BYTES = 4096
#: Pool of the slabs: files whose slots hold chunks.
SLAB_POOL = "slab"


@dataclass(frozen=True, slots=True)
class StagingPool:
    """The segments that one session of a rank copies into: no other session is ever given one of them.

    A process that was superseded may still have them mapped, and a copy that it had begun may go on any time.
    """

    job: str
    rank: int
    session: int

    def __str__(self) -> str:
        return f"staging.{self.job}.{self.rank}.{self.session}"

    @classmethod
    def of(cls, pool: str) -> StagingPool | None:
        """Which one a pool's name is of; None: trainers copy into no segment of that pool."""
        kind, _, rest = pool.partition(".")
        job, _, place = rest.rpartition(".")
        job, _, rank = job.rpartition(".")
        return cls(job, int(rank), int(place)) if kind == "staging" else None


def staging_pool(job: str, rank: int, session: int) -> str:
    """Pool of the segments that a session of a rank copies into."""
    return str(StagingPool(job, rank, session))


def restored_pool(job: str) -> str:
    """Pool of what was brought here for trainers of a job, which only read it. Its segments are not used again."""
    return f"restored.{job}"


def job_of_pool(pool: str) -> str:
    """Whose trainers copy into the segments of a pool; empty: nobody's alone."""
    staging = StagingPool.of(pool)
    return "" if staging is None else staging.job


def is_staging(pool: str) -> bool:
    """Whether trainers copy into the segments of a pool."""
    return pool.startswith("staging.")


def rounded(size_bytes: int) -> int:
    """Size of the segment for so many bytes: whole pages, at least one."""
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


class Segment:
    """One file in `segments/`, every byte of it allocated. Its counts belong to the lock of SegmentPools."""

    def __init__(self, path: Path, size_bytes: int, pool: str) -> None:
        self.path = path
        #: What it counts for: never less than the memory that it takes.
        self.size_bytes = size_bytes
        self.pool = pool
        #: For which job it is in use: its budget has the bytes. Empty: nobody's, or free.
        self.job = ""
        #: One for whoever allocated it, one for each chunk that is published in it. 0: free or gone.
        self.references = 0
        #: Whether `references` includes one of an allocation.
        self.allocated = False
        #: Times that it was allocated. The first tenant meets fresh pages.
        self.tenants = 0
        #: False once its memory may not be used again: it is then given back.
        self.recyclable = True
        self._map_lock = threading.Lock()
        self._view: memoryview | None = None
        self._gone = False

    @property
    def name(self) -> str:
        """File name, as manifests give it."""
        return self.path.name

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name}, {self.size_bytes} bytes, pool={self.pool!r}, refs={self.references})"

    @classmethod
    def create(cls, folder: Path, size_bytes: int, pool: str) -> Segment:
        """Make a new one of exactly `size_bytes`, a multiple of PAGE_BYTES; raises OSError."""
        path = folder / f"{secrets.token_hex(16)}.{'slab' if pool == SLAB_POOL else 'seg'}"
        directory.create_allocated(path, size_bytes)
        return cls(path, size_bytes, pool)

    @classmethod
    def adopt(cls, path: Path, pool: str) -> Segment:
        """Take over the file of an earlier process.

        Raises:
            CorruptError: it is missing, no regular file, of an odd size, or has holes that cannot be filled.
        """
        fd = directory.open_regular(path, write=True)
        try:
            found = os.fstat(fd)
            if found.st_size == 0 or found.st_size % PAGE_BYTES:
                raise CorruptError(f"segment {path} has {found.st_size} bytes, not whole pages")
            if found.st_blocks * 512 < found.st_size:
                # Touching a hole on a full tmpfs is a SIGBUS; filling it now fails politely.
                os.posix_fallocate(fd, 0, found.st_size)
        except OSError as error:
            raise CorruptError(f"segment {path} has holes that cannot be filled: {error.strerror}") from None
        finally:
            os.close(fd)
        segment = cls(path, found.st_size, pool)
        segment.tenants = 1
        return segment

    @property
    def length_bytes(self) -> int:
        """Of the file."""
        return self.size_bytes

    @property
    def view(self) -> memoryview:
        """The whole file, writable. Mapped at the first call; the mapping outlives the file's name.

        Raises:
            StoreError: the segment has been unlinked, or the file cannot be mapped.
        """
        with self._map_lock:
            if self._gone:
                raise StoreError(f"segment {self.name} is gone: it was used after it was released")
            if self._view is None:
                fd = directory.open_regular(self.path, write=True)
                try:
                    self._view = memoryview(mmap.mmap(fd, self.length_bytes))
                except (OSError, ValueError) as error:
                    raise StoreError(f"cannot map segment {self.path}: {error}") from None
                finally:
                    os.close(fd)
            return self._view

    def unlink(self) -> None:
        """Remove the file; the memory is free when no process maps it any more."""
        self.path.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Let the mapping go as soon as nobody has a view of it any more."""
        with self._map_lock:
            self._view = None
            self._gone = True
