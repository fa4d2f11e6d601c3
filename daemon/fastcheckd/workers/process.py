"""A worker process: does one job after the other on each of its lines, a thread for each, and ends with its parent.

It keeps nothing between jobs: a chunk's file is opened and mapped for one job alone, so a segment that was given back
is never held by a worker. It writes to `out` places and its scratch memory, and maps everything else read-only.
A defect ends the whole process: its jobs are then done by the data process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..codec.decoder import decode, turn_around
from ..codec.encoder import Encoded, encode
from ..codec.format import NO_DIGEST, Buffer
from ..codec.standalone import encode_alone
from ..errors import CodecError, FastCheckdError, InvalidRequestError, MispredictedError
from ..store import directory
from ..store.copying import copy_bytes
from ..store.segments import Place
from ..supervise import die_with_parent
from .jobs import (
    JOB_BYTES,
    OUT_AT,
    READY,
    SCRATCH_BYTES,
    Answer,
    Job,
    JobKind,
    Status,
    pack_answer,
    pack_fits,
    pack_uses,
    parse_job,
    parse_plan,
)

#: Most that is told of an error.
_TEXT_BYTES_MAX = 2000


def main(argv: Sequence[str]) -> None:
    """Arguments: the parent's pid, a niceness, the folder of segments, and each line's descriptors: `socket,memory`."""
    parent, nice, folder, *lines = argv
    die_with_parent(int(parent))
    # Who stops the daemon stops the parent; what that still has to do may need us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, max(int(nice), os.getpriority(os.PRIO_PROCESS, 0)))
    threads = []
    for line in lines:
        sock, memory = map(int, line.split(","))
        thread = threading.Thread(target=_serve_or_die, args=(Path(folder), sock, memory))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()


def _serve_or_die(folder: Path, sock: int, memory: int) -> None:
    try:
        with (
            socket.socket(fileno=sock) as line,
            mmap.mmap(memory, SCRATCH_BYTES) as mapping,
            memoryview(mapping) as scratch,
        ):
            line.sendall(READY)
            while len(data := line.recv(JOB_BYTES, socket.MSG_WAITALL)) == JOB_BYTES:
                line.sendall(pack_answer(answer_to(data, folder, scratch)))
    except BaseException:  # noqa: BLE001  a thread that is gone would leave its line unanswered
        traceback.print_exc()
        os._exit(1)


def answer_to(data: bytes, folder: Path, scratch: memoryview) -> Answer:
    """Do the job that the bytes ask for, in the segments of `folder`."""
    started_ns = time.thread_time_ns()

    def perform() -> Answer:
        job = parse_job(data)
        with (
            _mapped(folder, job.new) as new,
            _mapped(folder, job.base) as base,
            _mapped(folder, job.out, write=True) as out,
            scratch[: job.in_bytes].toreadonly() as given,
        ):
            # In here, too: an error's frames refer to the views, and nothing can be unmapped before they are gone.
            return _caught(lambda: _do(job, new, base, out, given, scratch), scratch)

    answer = _caught(perform, scratch)
    return replace(answer, cpu_ns=time.thread_time_ns() - started_ns)


def _caught(work: Callable[[], Answer], scratch: memoryview) -> Answer:
    try:
        return work()
    except MispredictedError as error:
        return _told(Status.MISPREDICTED, error, scratch)
    except CodecError as error:
        return _told(Status.BAD_CODE, error, scratch)
    except (FastCheckdError, OSError, ValueError, MemoryError) as error:
        return _told(Status.REFUSED, error, scratch)


def _told(status: Status, error: Exception, scratch: memoryview) -> Answer:
    text = str(error).encode()[:_TEXT_BYTES_MAX]
    return Answer(status, _put(scratch, text))


def _put(scratch: memoryview, *parts: Buffer) -> int:
    """Results into the scratch memory, one behind the other; size of the first."""
    at = OUT_AT
    for part in parts:
        if part:
            copy_bytes(scratch[at : at + len(part)], part)
        at += len(part)
    return len(parts[0])


def _do(
    job: Job,
    new: memoryview | None,
    base: memoryview | None,
    out: memoryview | None,
    given: memoryview,
    scratch: memoryview,
) -> Answer:
    match job.kind:
        case JobKind.ENCODE:
            assert new is not None
            plan, fits, steps = parse_plan(bytes(given), job.fits)
            if plan.bytes != len(new):
                raise InvalidRequestError(f"a plan of {plan.bytes} bytes for a chunk of {len(new)}")
            encoded = encode(
                new,
                base,
                plan,
                step=job.step,
                base_step=job.base_step,
                digest=job.digest,
                base_digest=job.base_digest,
                fits=fits,
            )
            return _encoded(encoded, scratch, pack_fits(fits, steps), len(steps))
        case JobKind.ENCODE_ALONE:
            assert new is not None
            return _encoded(encode_alone(new, step=job.step, digest=job.digest), scratch)
        case JobKind.DECODE | JobKind.APPLY:
            assert out is not None
            known = job.base_digest if job.base_digest != NO_DIGEST else None
            uses = decode(given, base, out, base_digest=known)
            way_back = turn_around(given, base, out) if job.kind == JobKind.APPLY else b""
            return Answer(Status.DONE, _put(scratch, way_back, pack_uses(uses)), len(uses))


def _encoded(encoded: Encoded | None, scratch: memoryview, fits: bytes = b"", count: int = 0) -> Answer:
    if encoded is None:
        _put(scratch, b"", fits)
        return Answer(Status.NOTHING, fits=count)
    size = _put(scratch, encoded.payload, pack_uses(encoded.uses), fits)
    return Answer(Status.DONE, size, len(encoded.uses), count)


@contextlib.contextmanager
def _mapped(folder: Path, place: Place | None, *, write: bool = False) -> Iterator[memoryview | None]:
    """The bytes of a place, all pages present at once: cheaper than a fault for each.

    Raises:
        InvalidRequestError: it is not within the file. CorruptError, StoreError, OSError: it is not to be had.
    """
    if place is None:
        yield None
        return
    fd = directory.open_regular(folder / place.segment, write=write)
    try:
        if place.offset + place.size > os.fstat(fd).st_size:
            raise InvalidRequestError(f"{place} is not within its segment")
        start = place.offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            fd,
            start + place.size,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0),
            offset=place.offset - start,
        )
    finally:
        os.close(fd)
    with mapping, memoryview(mapping) as whole, whole[start:] as view:
        yield view


if __name__ == "__main__":
    main(sys.argv[1:])
