"""Large pages behind the files of the RAM directory, where the kernel has some to give.

A page of 2 MiB instead of 512 small ones costs little more to make and is free to map: a trainer's first touch of a
segment, and the mapping and unmapping of it at a load, take a hundredth of the time. MADV_COLLAPSE (Linux 6.1) gives
them to single files, however tmpfs is mounted; an administrator refuses them with "deny" in
`/sys/kernel/mm/transparent_hugepage/shmem_enabled`. Without them everything works the same, slower.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

logger = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 << 20
#: One call: where memory is in pieces the kernel stops looking for large pages after so much.
_SLICE_BYTES = 64 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0

# Through ctypes, since a mapping has to begin at a multiple of a large page, and mmap cannot say where.
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
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def allocate_large(fd: int, size_bytes: int) -> int:
    """Put large pages behind a new, empty file of a tmpfs, from its start; returns how many bytes have them.

    The rest, all of it where the kernel gives none, may still be without memory: the caller allocates that.

    Raises:
        OSError: the file system is full.
    """
    size_bytes -= size_bytes % LARGE_PAGE_BYTES
    if not size_bytes:
        return 0
    os.ftruncate(fd, size_bytes)
    # Room to align in; the file is mapped over it, and both go at once.
    reserved_bytes = size_bytes + LARGE_PAGE_BYTES
    reserved = _map(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    if reserved is None:
        return 0
    try:
        start = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _map(start, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd) is None:
            return 0
        for offset in range(0, size_bytes, _SLICE_BYTES):
            length = min(_SLICE_BYTES, size_bytes - offset)
            if not _collapse(fd, start, offset, length):
                return offset
        return size_bytes
    finally:
        _libc.munmap(reserved, reserved_bytes)


def _collapse(fd: int, start: int, offset: int, length: int) -> bool:
    for block in range(offset, offset + length, LARGE_PAGE_BYTES):
        os.posix_fallocate(fd, block, mmap.PAGESIZE)  # a block of which nothing is there is left alone
    if _libc.madvise(start + offset, length, _MADV_COLLAPSE) == 0:
        return True
    logger.debug("no large pages for %d bytes: %s", length, os.strerror(ctypes.get_errno()))
    return False


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int | None:
    found: int | None = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    return None if found == _FAILED else found
