"""The worker processes of a data process: started, asked, replaced when they end or hang.

    keeper (one thread per worker):  start ─▶ ready ─▶ wait until it has ended ─▶ pause ─▶ start …
    asker (a codec thread):          take a line ─▶ copy in ─▶ job ─▶ answer ─▶ copy out ─▶ give back

Whoever asks returns only when the worker has answered or is dead, killed if need be: afterwards no worker touches
the memory that the job named. So a chunk's memory is safe for as long as the thread that asks holds it, just as if that
thread did the work. What a job is and what to do when it was lost are not known here.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..codec.format import Buffer
from ..counters import Counters
from ..errors import InvalidRequestError
from ..store.copying import copy_bytes
from ..supervise import BACKOFF_MAX_S, BACKOFF_MIN_S, HEALTHY_AFTER_S
from .jobs import ANSWER_BYTES, OUT_AT, READY, SCRATCH_BYTES, Answer, Job, pack_job, parse_answer, tail_bytes

logger = logging.getLogger(__name__)

#: An interpreter that loads numpy on a machine that does something else.
_READY_TIMEOUT_S = 60.0


class WorkerLostError(Exception):
    """No worker did the job: none was free, or it ended, hung or answered nonsense. Never leaves this room."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with what lay in the scratch memory: the result, uses and fits."""

    answer: Answer
    result: memoryview
    uses: bytes
    fits: bytes


class _Line:
    """A socket to one thread of a worker, and the memory that both map."""

    def __init__(self, timeout_s: float) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(timeout_s)
        self._memory = os.fdopen(os.memfd_create("fastcheck-worker", os.MFD_CLOEXEC), "r+b", buffering=0)
        self._memory.truncate(SCRATCH_BYTES)
        self._scratch = memoryview(mmap.mmap(self._memory.fileno(), SCRATCH_BYTES))

    @property
    def descriptors(self) -> tuple[int, int]:
        """For the worker: its end of the socket, and the memory."""
        return self._theirs.fileno(), self._memory.fileno()

    def handed_over(self) -> None:
        """The worker has its descriptors: with the last of them gone, we hear that it has ended."""
        self._theirs.close()
        self._memory.close()

    def close(self) -> None:
        """At the end of the worker. The memory goes with the last view of it."""
        self._ours.close()

    def until_ready(self) -> None:
        """Wait for the worker's first sign of life; OSError when there is none."""
        self._ours.settimeout(_READY_TIMEOUT_S)
        if self._ours.recv(len(READY)) != READY:
            raise ConnectionError("it ended before it was ready")

    def ask(self, job: Job, given: Sequence[Buffer], timeout_s: float) -> Reply:
        """Have a job done.

        Raises:
            OSError: the worker has ended, or gives no answer in time. InvalidRequestError: no sensible one.
        """
        at = 0
        for part in given:
            copy_bytes(self._scratch[at : at + len(part)], part)
            at += len(part)
        self._ours.settimeout(timeout_s)
        self._ours.sendall(pack_job(job))
        data = self._ours.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        if len(data) != ANSWER_BYTES:
            raise ConnectionError("it ended")
        answer = parse_answer(data)
        uses_at = OUT_AT + answer.out_bytes
        uses_bytes, fits_bytes = tail_bytes(answer)
        fits_at = uses_at + uses_bytes
        # Not `bytes`: that would copy with the interpreter lock held.
        result = np.empty(answer.out_bytes, np.uint8).data
        if result:
            copy_bytes(result, self._scratch[OUT_AT:uses_at])
        return Reply(
            answer,
            result.toreadonly(),
            bytes(self._scratch[uses_at:fits_at]),
            bytes(self._scratch[fits_at : fits_at + fits_bytes]),
        )


@dataclass(eq=False)
class _Worker:
    """One life of one worker."""

    process: subprocess.Popen[bytes]
    lines: list[_Line]
    #: Guards `reaped`, so that no other process' pid is ever killed.
    lock: threading.Lock = field(default_factory=threading.Lock)
    reaped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        """SIGKILL it, if it still lives."""
        with self.lock:
            if not self.reaped:
                # Not `Popen.kill`: that may reap it, and its keeper waits for it.
                os.kill(self.process.pid, signal.SIGKILL)

    def kill_and_wait(self) -> None:
        """When this returns it touches no memory any more."""
        self.kill()
        self.ended.wait()

    def wait(self) -> int:
        """For its keeper: until it has ended; the exit code."""
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        with self.lock:
            self.reaped = True
            code = self.process.wait()
        self.ended.set()
        return code


class Workers:
    """`processes` workers with `threads` jobs each at once, at niceness `nice`. Thread-safe.

    Args:
        folder: of the segments.
        timeout_s: a job that takes longer has hung its worker.
    """

    def __init__(
        self, folder: Path, *, processes: int, threads: int, nice: int, timeout_s: float, counters: Counters
    ) -> None:
        self._folder = folder
        self._threads = threads
        self._nice = nice
        self._timeout_s = timeout_s
        self._counters = counters
        self._closing = threading.Event()
        self._changed = threading.Condition()
        #: Workers that are ready, and their lines that nobody uses.
        self._free: dict[_Worker, list[_Line]] = {}
        self._living: set[_Worker] = set()
        self._keepers = [
            # A worker dies with the thread that started it (PR_SET_PDEATHSIG goes by threads), so with its keeper.
            threading.Thread(target=self._keep, args=(number,), name=f"worker-{number}", daemon=True)
            for number in range(1, processes + 1)
        ]
        for keeper in self._keepers:
            keeper.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        with self._changed:
            return [worker.process.pid for worker in self._free]

    def wait_ready(self, count: int, timeout_s: float) -> bool:
        """Wait until so many workers are ready at once; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._free) >= count, timeout_s)

    def ask(self, job: Job, given: Sequence[Buffer] = ()) -> Reply:
        """Have a job done; `given` goes into the scratch memory, one behind the other.

        Raises:
            WorkerLostError: it was not done, and no worker is at it any more.
        """
        with self._line() as (worker, line):
            try:
                return line.ask(job, given, self._timeout_s)
            except BaseException as error:
                # Whatever it was: an answer that nobody took would be the next job's.
                with self._changed:
                    self._free.pop(worker, None)
                worker.kill_and_wait()
                if not isinstance(error, OSError | InvalidRequestError):
                    raise
                logger.warning("worker process %d is lost: %s", worker.process.pid, error)
                raise WorkerLostError(str(error)) from None

    def close(self) -> None:
        """End all workers; nobody may be asking."""
        self._closing.set()
        with self._changed:
            living = list(self._living)
        for worker in living:
            worker.kill()
        for keeper in self._keepers:
            keeper.join()

    @contextlib.contextmanager
    def _line(self) -> Iterator[tuple[_Worker, _Line]]:
        """A line of the worker that has most of them free."""
        with self._changed:
            worker = max(self._free, key=lambda worker: len(self._free[worker]), default=None)
            if worker is None or not self._free[worker]:
                raise WorkerLostError("no worker is free")
            line = self._free[worker].pop()
        try:
            yield worker, line
        finally:
            with self._changed:
                if worker in self._free:
                    self._free[worker].append(line)

    # --- keepers -----------------------------------------------------------------------------------

    def _keep(self, number: int) -> None:
        """Have one worker running until the end, with growing pauses if it does not live long."""
        pause_s = BACKOFF_MIN_S
        while not self._closing.is_set():
            started = time.monotonic()
            worker = None
            try:
                worker = self._start()
                self._make_ready(worker)
            except Exception as error:  # noqa: BLE001  whatever it is: without a keeper, who waits for the end waits for ever
                logger.warning("worker process %d cannot start: %r", number, error)
                if worker is not None:
                    worker.kill()
            code = None if worker is None else self._until_ended(worker)
            if self._closing.is_set():
                return
            self._counters.add("workers_lost")
            lived = time.monotonic() - started > HEALTHY_AFTER_S
            pause_s = BACKOFF_MIN_S if lived else min(pause_s * 2, BACKOFF_MAX_S)
            logger.warning("worker process %d ended with %s; another in %.1f s", number, code, pause_s)
            self._closing.wait(pause_s)

    def _start(self) -> _Worker:
        lines = [_Line(self._timeout_s) for _ in range(self._threads)]
        try:
            descriptors = [line.descriptors for line in lines]
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "fastcheckd.workers.process", str(os.getpid()), str(self._nice),
                    str(self._folder), *(f"{sock},{memory}" for sock, memory in descriptors),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd for both in descriptors for fd in both],
            )  # fmt: skip
        except BaseException:
            for line in lines:
                line.close()
            raise
        finally:
            for line in lines:
                line.handed_over()
        worker = _Worker(process, lines)
        with self._changed:
            self._living.add(worker)
        if self._closing.is_set():  # `close` may have looked before it was there
            worker.kill()
        return worker

    def _make_ready(self, worker: _Worker) -> None:
        for line in worker.lines:
            line.until_ready()
        with self._changed:
            self._free[worker] = list(worker.lines)
            self._changed.notify_all()

    def _until_ended(self, worker: _Worker) -> int:
        code = worker.wait()
        with self._changed:
            self._free.pop(worker, None)
            self._living.discard(worker)
        for line in worker.lines:
            line.close()
        return code
