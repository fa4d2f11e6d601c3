"""A way-back file: what turns the newer step of a shard into the older, chunk by chunk.

One encoded chunk per chunk that changed (docs/codec.md), each complete in the file before the table
names it, so a process may be killed at any moment. Written and read with pwrite and pread: a full
tmpfs is then an error and not a SIGBUS, and nothing stays mapped or open.

Knows the file and its memory, not what the records say; a chunk without a record did not change.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from pathlib import Path

import xxhash

from ..codec.format import OVERHEAD_BYTES_MAX, Buffer
from ..errors import CorruptError, InvalidRequestError, StoreError
from . import directory
from .segment_pools import SegmentPools
from .segments import PAGE_BYTES, PooledFile, rounded

WAY_POOL = "way"
#: Memory is set aside for a growing file in steps of this size, so that appending rarely asks for it.
GROW_BYTES = 256 << 10

#: A recycled file may be longer than needed by this and a quarter: fresh pages are slow.
SPARE_BYTES = 1 << 20

#: Magic, number of chunks, reserved; then the xxh3-64 of these.
_HEADER = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"FCWAY1\n\0"
_TABLE_OFFSET = 32
#: Offset, bytes, reserved. All zero: the chunk did not change.
_ENTRY = struct.Struct("<QII")


def record_bytes_max(chunk_bytes: int) -> int:
    """Largest record that a chunk of this size may have."""
    return chunk_bytes + OVERHEAD_BYTES_MAX


class WayBackFile(PooledFile):
    """One file in `ways/`. Records of different chunks may be appended by several threads at once."""

    def __init__(self, path: Path, size_bytes: int, chunks: int, end: int) -> None:
        super().__init__(path, size_bytes, WAY_POOL)
        self.chunks = chunks
        # Where the next record goes.
        self._end = end
        self._growing = threading.Lock()

    @classmethod
    def make(cls, folder: Path, pools: SegmentPools, chunks: int, job: str = "") -> WayBackFile:
        """An empty one for so many chunks, recycled if possible; the caller has one reference (`let_go`).

        It counts for `job`.

        Raises:
            OverBudgetError, StoreFullError, StoreError: as `SegmentPools.allocate`.
        """
        file = pools.recycle(WAY_POOL, job)
        if file is None:
            file = cls(folder / f"{secrets.token_hex(16)}.way", 0, chunks, 0)
            pools.adopt(file, job)
            pools.hold(file)
        assert isinstance(file, WayBackFile)
        file.chunks, file._end = chunks, _first_record(chunks)
        head = _HEADER.pack(_MAGIC, chunks, 0)
        head += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))
        empty = head.ljust(_first_record(chunks), b"\0")
        try:
            file._make_room(pools, file._end)
            pools.with_room(
                f"write a table of {chunks} chunks", lambda: file._write_at(0, empty, create=True)
            )
        except BaseException:
            pools.condemn(file)
            pools.let_go(file)
            raise
        return file

    @classmethod
    def adopt(cls, path: Path) -> WayBackFile:
        """Take over the file of an earlier process.

        Raises:
            CorruptError: it is missing, no regular file, or not what `make` makes.
            StoreError: the system refuses.
        """
        fd = directory.open_regular(path)
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, _HEADER.size + _CHECKSUM.size, 0)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        finally:
            os.close(fd)
        if len(head) < _HEADER.size + _CHECKSUM.size:
            raise CorruptError(f"way back {path} has {size} bytes")
        magic, chunks, _ = _HEADER.unpack_from(head)
        (checksum,) = _CHECKSUM.unpack_from(head, _HEADER.size)
        if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(head[: _HEADER.size]):
            raise CorruptError(f"way back {path} does not begin like one")
        if size < _first_record(chunks):
            raise CorruptError(f"way back {path} has {size} bytes, too few for a table of {chunks} chunks")
        return cls(path, rounded(size), chunks, size)

    @property
    def written_bytes(self) -> int:
        """Table and records so far, without what is set aside for more."""
        return self._end

    def append(
        self, pools: SegmentPools, index: int, record: Buffer, chunk_bytes: int, *, wait_s: float = 0.0
    ) -> None:
        """Add a chunk's record, and only then name it in the table; waits so long for room in the budget.

        Raises:
            InvalidRequestError: it is empty or too large for a chunk of this size.
            OverBudgetError, StoreFullError, StoreError: no room; the table does not name it.
        """
        assert 0 <= index < self.chunks
        if not 0 < len(record) <= record_bytes_max(chunk_bytes):
            raise InvalidRequestError(
                f"a way back of {len(record)} bytes was made for a chunk of {chunk_bytes} bytes"
            )
        with self._growing:
            start = self._end
            self._make_room(pools, start + len(record), wait_s)
            self._end += len(record)
        entry = _ENTRY.pack(start, len(record), 0)
        what = f"write a way back of {len(record)} bytes"
        pools.with_room(what, lambda: self._write_at(start, record))
        pools.with_room(what, lambda: self._write_at(_TABLE_OFFSET + index * _ENTRY.size, entry))

    def read(self, index: int, chunk_bytes: int) -> bytes | None:
        """A chunk's record, None if it did not change. What the record says is for the decoder to check.

        Raises:
            CorruptError: the table points outside the file, or the file is shorter than it says.
            StoreError: the system refuses to read it.
        """
        assert 0 <= index < self.chunks
        fd = directory.open_regular(self.path)
        try:
            entry = os.pread(fd, _ENTRY.size, _TABLE_OFFSET + index * _ENTRY.size)
            if len(entry) < _ENTRY.size:
                raise CorruptError(f"way back {self.name} ends within its table")
            start, length, _ = _ENTRY.unpack(entry)
            if (start, length) == (0, 0):
                return None
            if (
                start < _first_record(self.chunks)
                or not 0 < length <= record_bytes_max(chunk_bytes)
                or start + length > os.fstat(fd).st_size
            ):
                raise CorruptError(f"way back {self.name}: chunk {index} has {length} bytes at {start}")
            record = os.pread(fd, length, start)
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from None
        finally:
            os.close(fd)
        if len(record) < length:
            raise CorruptError(f"way back {self.name} ends within the record of chunk {index}")
        return record

    def settle(self, pools: SegmentPools) -> None:
        """No more is appended: give back what was set aside, or what an earlier tenant left, and is not needed."""
        try:
            size = self.path.stat().st_size
            if size > self._end + self._end // 4 + SPARE_BYTES:
                os.truncate(self.path, self._end)
                size = self._end
        except OSError as error:
            raise StoreError(f"cannot cut {self.path}: {error.strerror}") from None
        pools.settle(self, rounded(size))

    def _make_room(self, pools: SegmentPools, end: int, wait_s: float = 0.0) -> None:
        lack = end - self.size_bytes
        if lack > 0:
            pools.grow(self, max(-(-lack // PAGE_BYTES) * PAGE_BYTES, GROW_BYTES), wait_s=wait_s)

    def _write_at(self, offset: int, data: Buffer, *, create: bool = False) -> None:
        fd = directory.create_or_open(self.path) if create else directory.open_regular(self.path, write=True)
        try:
            rest = memoryview(data)
            while rest:
                done = os.pwrite(fd, rest, offset)
                rest, offset = rest[done:], offset + done
        finally:
            os.close(fd)


def _first_record(chunks: int) -> int:
    return _TABLE_OFFSET + chunks * _ENTRY.size
