"""The files of one voter: the few operations that its promises rest on, and what each leaves behind a power cut.

Everything that a voter keeps goes through a `Disk`, so that the simulation can bring one that is full, slow, torn or
without power. What is not synced may be lost, in whole or in part; `replace` leaves the old content or the new one.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import xxhash

#: Larger files are none of ours: a log is compacted at a sixteenth of it.
FILE_BYTES_MAX = 1 << 30
#: Errors of a disk that may have room again; with any other one it is the disk that has to be looked at.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Disk:
    """Files in a folder that belongs to this voter alone. The simulation has its own.

    All methods raise OSError; after an error a file may hold a part of what was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Files that were appended to or cut, which stay open.
        self._open: dict[str, int] = {}

    def path(self, name: str) -> str:
        """A file's name for people."""
        return str(self.folder / name)

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / name).exists()

    def read(self, name: str) -> bytes:
        """All of a file; raises FileNotFoundError."""
        path = self.folder / name
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"{path} has {size} bytes: no file of a voter is that large")
        return path.read_bytes()

    def append(self, name: str, data: bytes) -> None:
        """Write at a file's end; durable after `sync`."""
        descriptor, left = self._descriptor(name), memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    def truncate(self, name: str, size: int) -> None:
        """Cut a file off; durable after `sync`."""
        os.ftruncate(self._descriptor(name), size)

    def sync(self, name: str) -> None:
        """Return when all of a file is durable."""
        os.fdatasync(self._descriptor(name))

    def replace(self, name: str, data: bytes) -> None:
        """Give a file, which need not be there, new content, or leave it as it was. Durable when this returns."""
        write_file(self.folder / name, data)
        self._forget(name)

    def remove(self, name: str) -> None:
        """Remove a file if it is there. Durable when this returns."""
        (self.folder / name).unlink(missing_ok=True)
        self._forget(name)
        sync_directory(self.folder)

    def close(self) -> None:
        """Let go of open files."""
        for name in list(self._open):
            self._forget(name)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open[name] = os.open(self.folder / name, flags, 0o600)
        return self._open[name]

    def _forget(self, name: str) -> None:
        if (descriptor := self._open.pop(name, None)) is not None:
            os.close(descriptor)


def sync_directory(folder: Path) -> None:
    """Make renames and new files in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves either the old or the new content, and no other user can read it."""
    temporary = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            # Synced before it has its name: a power cut between the two would leave the name with nothing in it.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105  as the other operations here, a call of the system
    except OSError:
        # On a full disk what was written of it would keep the room that others wait for.
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def free_bytes(folder: Path) -> int:
    """What this user may still write on a folder's file system."""
    found = os.statvfs(folder)
    if found.f_files and not found.f_ffree:
        return 0  # every change writes a new file first
    return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize


_BEGIN = b'{"checksum": "'
_DIGITS = 16
_END = b'", '


def to_checked_json(document: dict[str, Any]) -> bytes:
    """A document, which is not empty, with a checksum of all that follows it: {"checksum": "0123456789abcdef", ...}."""
    body = json.dumps(document).encode()[1:]
    return _BEGIN + xxhash.xxh3_64_hexdigest(body).encode() + _END + body


def from_checked_json(data: bytes) -> dict[str, Any]:
    """A document.

    Raises:
        ValueError: it is none, or not what was written.
    """
    head = len(_BEGIN) + _DIGITS + len(_END)
    checksum, body = data[len(_BEGIN) : len(_BEGIN) + _DIGITS], data[head:]
    if data[:head] != _BEGIN + checksum + _END or checksum != xxhash.xxh3_64_hexdigest(body).encode():
        raise ValueError("its checksum is that of other bytes, or missing")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document
