"""Files of the daemon's RAM directory, mapped into this process. Knows no gRPC and no state trees.

Mappings are kept: unmapping and touching pages for the first time cost more than the copy itself. A
file that the daemon removed or replaced is noticed by its inode and unmapped.

A page's first use costs several times a warm copy when a copy runs into it, and a third of that when it is asked for
ahead, even right ahead (MADV_POPULATE_WRITE, Linux 5.14). An older kernel refuses: then pages are met cold.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import stat
import threading
from collections import OrderedDict

import torch

from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import CorruptError, DaemonUnavailableError

logger = logging.getLogger("fastcheck")

#: The segments that a session's saves go through in turn, and a few that just changed size.
MAPPINGS_MAX = 32
_PAGE_BYTES = mmap.PAGESIZE
#: Pages that are only read need no memory set aside. Python names the flag from 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
#: A mapping that begins at a multiple of this may consist of large pages, if the file does.
_LARGE_PAGE_BYTES = 2 << 20

# Through ctypes, since mmap.mmap cannot say where a mapping begins, and mmap.madvise keeps the interpreter lock.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: Device, inode and size: another file under the same path has another one.
FileIdentity = tuple[int, int, int]


class MappedSegment:
    """A mapped file as a flat uint8 tensor on page-aligned memory.

    The mapping lives as long as any view of `tensor` does, so a forgotten view never crashes.
    """

    def __init__(self, mapping: mmap.mmap, identity: FileIdentity | None = None, start: int = 0) -> None:
        """`start`: where in the mapping the file begins; it ends a large page later than the file at most."""
        self._mapping = mapping
        self._start = start
        self._bytes = identity[2] if identity is not None else len(mapping)
        self.identity = identity
        #: Whether its pages were touched through this mapping, so that a copy into it does not meet cold ones.
        self.warm = False
        # Through a memoryview, so that the mapping knows that it is in use and refuses to be closed.
        self.tensor = self._look()

    def _look(self) -> torch.Tensor:
        return torch.frombuffer(self.window(), dtype=torch.uint8)

    def window(self) -> memoryview:
        """All of the file, to be written or read."""
        return memoryview(self._mapping)[self._start : self._start + self._bytes]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the mapping."""
        self.window()[offset : offset + len(data)] = data

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Bytes out of the mapping; fewer where it ends."""
        return bytes(self.window()[offset : offset + size_bytes])

    def release(self) -> bool:
        """Unmap a private mapping. Returns False if something still views it; that gets its own memory."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        for collect in (True, False):
            try:
                self._mapping.close()
            except BufferError:
                if collect:
                    gc.collect()  # views that only a reference cycle holds
            else:
                return True
        # Writing to a page of a private mapping parts it from the file, which the daemon will reuse.
        touched = self._look()[::_PAGE_BYTES]
        touched.copy_(touched.clone())
        return False


def anonymous(size: int, *, sparse: bool = False) -> MappedSegment:
    """Private memory of `size` bytes; pages exist once written, so a size from a wire costs nothing yet.

    `sparse`: most of it never will be; the system need not be able to give it all.

    Raises:
        MemoryError: more than this process can address, or, unless sparse, than the system has.
    """
    try:
        if sparse:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            return MappedSegment(mmap.mmap(-1, max(1, size), flags=flags))
        return MappedSegment(mmap.mmap(-1, max(1, size)))
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot get {size} bytes of memory: {error}") from None


def map_file(ref: pb.SegmentRef, *, private: bool = False) -> MappedSegment:
    """Map a file that the daemon named: shared to be written, or private to be read.

    Raises:
        DaemonUnavailableError: the file cannot be opened from here.
        CorruptError: it is not what the daemon said.
    """
    flags = os.O_RDONLY if private else os.O_RDWR
    try:
        fd = os.open(ref.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DaemonUnavailableError(
            f"cannot open the daemon's segment {ref.path}: {error.strerror}. The trainer must see the "
            "daemon's RAM directory and run as the same user; from elsewhere use the daemon's host:port"
        ) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or (os.geteuid() and found.st_uid not in (0, os.geteuid())):
            raise CorruptError(f"the daemon's segment {ref.path} is not a file of this user or of root")
        if found.st_size < max(1, ref.bytes):
            raise CorruptError(f"the daemon's segment {ref.path} has {found.st_size} bytes, not {ref.bytes}")
        mapping, start = _map_aligned(fd, found.st_size, private=private)
        return MappedSegment(mapping, _identity(found), start)
    finally:
        os.close(fd)


def _map_aligned(fd: int, size: int, *, private: bool) -> tuple[mmap.mmap, int]:
    """A mapping with the file in it, from a multiple of a large page on, and where in it that is.

    The room to align in is reserved and the file put over a part of it: unmapping the whole unmaps both.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(
        -1,
        size + _LARGE_PAGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        prot=protection,
    )
    base = torch.frombuffer(memoryview(mapping), dtype=torch.uint8).data_ptr()
    start = -base % _LARGE_PAGE_BYTES
    kind = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
    if _libc.mmap(base + start, size, protection, kind | _MAP_FIXED, fd, 0) != base + start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapping, start


def populate(address: int, size_bytes: int, *, write: bool = True) -> bool:
    """Make all pages of a range present; returns whether they are. Lets other threads run meanwhile."""
    start = address - address % mmap.PAGESIZE
    if (
        _libc.madvise(
            start, address + size_bytes - start, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        )
        == 0
    ):
        return True
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        logger.debug("cannot populate %d bytes: %s", size_bytes, os.strerror(code))
    return False


def _identity(found: os.stat_result) -> FileIdentity:
    return found.st_dev, found.st_ino, found.st_size


class SegmentCache:
    """Shared mappings by path, the most recently used ones. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[str, MappedSegment] = OrderedDict()

    def get(self, ref: pb.SegmentRef) -> MappedSegment:
        """The mapping of a file, mapped now if need be; raises what `map_file` does."""
        with self._lock:
            segment = self._segments.get(ref.path)
            if segment is None or segment.identity != _look(ref.path) or segment.tensor.numel() < ref.bytes:
                self._segments.pop(ref.path, None)
                self._drop_stale()
                segment = self._segments[ref.path] = map_file(ref)
                while len(self._segments) > MAPPINGS_MAX:
                    self._segments.popitem(last=False)
            self._segments.move_to_end(ref.path)
            return segment

    def _drop_stale(self) -> None:
        for path in [p for p, s in self._segments.items() if s.identity != _look(p)]:
            del self._segments[path]

    def close(self) -> None:
        """Forget all mappings; each is unmapped when its last user is done."""
        with self._lock:
            self._segments.clear()


def _look(path: str) -> FileIdentity | None:
    try:
        return _identity(os.stat(path, follow_symlinks=False))  # noqa: PTH116  half the cost, and once per save
    except OSError:
        return None
