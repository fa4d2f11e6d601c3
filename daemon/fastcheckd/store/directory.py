"""Files and folders that are certainly ours: made 0600 and 0700, never reached through a symbolic link.

The only place that says how a file of the RAM directory is opened. Knows nothing of segments or
manifests. Nothing is fsynced: the bytes live in RAM, and rename is atomic for any process that
comes after this one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from ..errors import CorruptError, StoreError
from .large_pages import allocate_large

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
#: What a full file system answers; ENOMEM is a tmpfs whose memory cgroup is full.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}


def is_full(error: OSError) -> bool:
    """Whether the error means that the file system has no room."""
    return error.errno in _FULL


def own_folder(path: Path) -> None:
    """Make the folder 0700 if it is missing.

    Raises:
        OSError: the file system is full.
        StoreError: something else has its name, or another user owns it or may write to it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        if is_full(error):
            raise
        raise StoreError(f"cannot make the folder {path}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise StoreError(f"{path} is {kind}; the RAM store needs a folder of its own there: move that away")
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to uid {found.st_uid}, this process runs as uid {os.geteuid()}: "
            "chown it or set ram_dir to another place"
        )
    if found.st_mode & 0o022:
        raise StoreError(
            f"{path} may be written by other users (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"chmod 700 it, or set ram_dir to a folder below it"
        )


def take_lock(path: Path) -> int:
    """Open and flock a file for as long as the returned descriptor is open.

    Raises:
        StoreError: another process (or another store in this one) has it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise StoreError(f"cannot lock {path}: {error.strerror}") from None
        raise StoreError(
            f"the RAM directory {path.parent} is in use by another data process: "
            "stop that one first, or give this one its own ram_dir"
        ) from None
    return fd


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet; nothing stays behind when it fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def create_allocated(path: Path, size_bytes: int) -> None:
    """Make a file whose every byte has memory behind it; nothing stays behind when it fails.

    Without that a full tmpfs would kill the writer of a mapping with SIGBUS.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
    try:
        allocate_large(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def create_sparse(path: Path, length_bytes: int, filled: Iterable[range]) -> None:
    """Make a file of which only some stretches have memory behind them; nothing stays behind when it fails."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
    try:
        os.ftruncate(fd, length_bytes)
        for stretch in filled:
            os.posix_fallocate(fd, stretch.start, len(stretch))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def open_regular(path: Path, *, write: bool = False) -> int:
    """Open a regular file, nothing else.

    Raises:
        CorruptError: it is missing, a symbolic link, a folder, a device.
        StoreError: the system refuses; that says nothing about the file.
    """
    # O_NONBLOCK: a FIFO in the place of a file must not hang the start.
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK | _SAFE
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise CorruptError(f"{path} is missing or no regular file: {error.strerror}") from None
        raise StoreError(f"cannot open {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptError(f"{path} is no regular file")
    return fd


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """Whole content of a small regular file.

    Raises:
        CorruptError: it is no regular file or has more than `bytes_max` bytes.
        StoreError: the system refuses to read it.
    """
    fd = open_regular(path)
    data = bytearray()
    try:
        while len(data) <= bytes_max and (piece := os.read(fd, min(bytes_max + 1 - len(data), 1 << 20))):
            data += piece
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(data) > bytes_max:
        raise CorruptError(f"{path} has more than {bytes_max} bytes")
    return bytes(data)


def discard(path: Path) -> None:
    """Remove whatever has this name; a symbolic link is removed, not followed."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error.strerror}; remove it by hand") from None
