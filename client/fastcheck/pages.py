"""Having the kernel make the pages of a mapping present, writable or to be read, without changing a byte.

A page's first use costs several times a warm copy when a copy runs into it, and a third of that when it is asked for
ahead, even right ahead (MADV_POPULATE_WRITE, Linux 5.14). An older kernel refuses: then pages are met cold.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os

logger = logging.getLogger("fastcheck")

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

# Through ctypes, since mmap.madvise keeps the interpreter lock.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
