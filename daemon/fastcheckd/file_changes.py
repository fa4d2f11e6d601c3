"""Whether files that are replaced under a running daemon, certificates and keys, are still those that were read."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[tuple[int, ...] | None, ...]


def signature(*paths: Path) -> Signature:
    """Differs from an earlier one as soon as one of the files is another one, or there no more; reads none of them."""
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
