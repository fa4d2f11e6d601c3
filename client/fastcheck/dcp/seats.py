"""The Checkpointers of this process, one per rank of a job, which all its writers share.

A writer is made anew for each save where DCP saves in a process of its own: a session for each would fence the last
one, and forget the layout that the codec builds on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ..checkpointer import Checkpointer
from ..errors import InvalidArgumentError

_lock = threading.Lock()
_seats: dict[tuple[str, int], _Seat] = {}


@dataclass(frozen=True)
class Options:
    """What a writer asks of its Checkpointer; see there."""

    address: str | None = None
    max_in_flight: int = 0
    copy_threads: int | None = None
    connect_timeout_s: float = 60.0
    precision: str = "exact"


@dataclass(frozen=True)
class _Seat:
    checkpointer: Checkpointer
    made_for: tuple[int, Options]
    busy: threading.Lock


@contextlib.contextmanager
def taken(job: str, rank: int, world_size: int, options: Options) -> Iterator[Checkpointer]:
    """The Checkpointer of a rank, for one save at a time.

    Raises:
        InvalidArgumentError: another save of the rank is under way in this process.
    """
    with _lock:
        seat = _seats.get((job, rank))
        if seat is not None and seat.busy.locked():
            raise InvalidArgumentError(
                f"rank {rank} of job {job!r} is just being saved by another dcp.save or async_save of this process: "
                "wait for its end (the future's result()) before the next one, or use another job name"
            )
        if seat is None or seat.made_for != (world_size, options):
            if seat is not None:
                seat.checkpointer.close()
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
            seat = _seats[job, rank] = _Seat(made, (world_size, options), threading.Lock())
        seat.busy.acquire()
    try:
        yield seat.checkpointer
    finally:
        seat.busy.release()


def leave(job: str) -> None:
    """Close this process' Checkpointers of a job; the next save makes new ones."""
    with _lock:
        for key in [key for key in _seats if key[0] == job]:
            _seats.pop(key).checkpointer.close()
