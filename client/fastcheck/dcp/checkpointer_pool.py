"""A pool of Checkpointers, one per rank of a job, that all writers of this process share.

DCP may make a new writer for each save. A session per writer would fence the one before, and lose the layout that the
codec builds on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ..checkpointer import Checkpointer
from ..errors import InvalidArgumentError

_lock = threading.Lock()
_pool: dict[tuple[str, int], _Pooled] = {}


@dataclass(frozen=True)
class CheckpointerOptions:
    """The arguments of the `Checkpointer` that a writer wants."""

    address: str | None = None
    max_in_flight: int = 0
    copy_threads: int | None = None
    connect_timeout_s: float = 60.0
    precision: str = "exact"


@dataclass(frozen=True)
class _Pooled:
    checkpointer: Checkpointer
    made_for: tuple[int, CheckpointerOptions]
    busy: threading.Lock


@contextlib.contextmanager
def checkpointer_of(
    job: str, rank: int, world_size: int, options: CheckpointerOptions
) -> Iterator[Checkpointer]:
    """The Checkpointer of a rank, for one save at a time.

    Raises:
        InvalidArgumentError: another save of the rank is under way in this process.
    """
    with _lock:
        pooled = _pool.get((job, rank))
        if pooled is not None and pooled.busy.locked():
            raise InvalidArgumentError(
                f"rank {rank} of job {job!r} is just being saved by another dcp.save or async_save of this process: "
                "wait for its end (the future's result()) before the next one, or use another job name"
            )
        if pooled is None or pooled.made_for != (world_size, options):
            if pooled is not None:
                pooled.checkpointer.close()
            made = Checkpointer(
                job,
                rank=rank,
                world_size=world_size,
                address=options.address,
                max_in_flight=options.max_in_flight,
                copy_threads=options.copy_threads,
                timeout_s=options.connect_timeout_s,
                precision=options.precision,
            )
            pooled = _pool[job, rank] = _Pooled(made, (world_size, options), threading.Lock())
        pooled.busy.acquire()
    try:
        yield pooled.checkpointer
    finally:
        pooled.busy.release()


def close_job(job: str) -> None:
    """Close this process' Checkpointers of a job; the next save makes new ones."""
    with _lock:
        for key in [key for key in _pool if key[0] == job]:
            _pool.pop(key).checkpointer.close()
