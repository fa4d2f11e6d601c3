"""The threads that encode and decode chunks, one pool for a whole data process.

They run below everything else on the machine: the trainer comes first, and so do the threads that keep
the network busy. A job never waits for another job. Nothing here knows what is encoded or why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..errors import PeerError

#: How often a thread that waits for a job looks whether its outcome is still wanted.
_LOOK_S = 0.1

P = ParamSpec("P")
R = TypeVar("R")


class CodecPool:
    """`threads` threads at niceness `nice` (0 to 19). Thread-safe.

    What waits for a thread is bounded by those who submit: a connection has at most three jobs here.
    """

    def __init__(self, threads: int, nice: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="codec", initializer=_step_back, initargs=(nice,)
        )
        self._lock = threading.Lock()
        self._jobs = 0

    @property
    def busy(self) -> bool:
        """Whether a job submitted now would have to wait for a thread."""
        with self._lock:
            return self._jobs >= self.threads

    def submit(self, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a job; PeerError when the pool is closed."""
        with self._lock:
            self._jobs += 1
        try:
            future = self._executor.submit(job, *args, **kwargs)
        except RuntimeError:
            self._one_less()
            raise PeerError("this node is shutting down: its codec threads are gone") from None
        future.add_done_callback(self._one_less)
        return future

    def close(self) -> None:
        """Take no more jobs, drop those that wait, and return when those that run have ended."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _one_less(self, _: object = None) -> None:
        with self._lock:
            self._jobs -= 1


def outcome(future: Future[R], still_wanted: Callable[[], None]) -> R:
    """What a job returned or raised; `still_wanted` is called now and then and raises to end the wait.

    Raises:
        PeerError: the pool was closed before the job began.
    """
    while not future.done():
        try:
            future.exception(_LOOK_S)  # not `wait`: it never hears of a job that a closed pool dropped
        except (TimeoutError, CancelledError):
            still_wanted()
    if future.cancelled():
        raise PeerError("this node is shutting down: its codec threads are gone")
    return future.result()


def call_off(future: Future[R]) -> None:
    """Drop a job, or wait until it has ended: afterwards it touches no memory any more."""
    if not future.cancel():
        future.exception()


def _step_back(nice: int) -> None:
    """Lower the calling thread's own priority; never raise it, which the system may refuse."""
    me = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, me, max(nice, os.getpriority(os.PRIO_PROCESS, me)))
