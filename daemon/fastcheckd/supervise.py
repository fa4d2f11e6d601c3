"""The agent's children: started, watched, restarted with backoff, stopped in good time.

A child ties its life to the agent itself (`die_with_parent`), so a killed agent leaves nothing behind.
The pause between restarts doubles up to a bound and shrinks again once a child has lived a while; a start that fails
is one of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from .beats import CHILD_BEAT, BeatTaker
from .errors import ConfigError
from .log import Episode

logger = logging.getLogger(__name__)

#: Exit code of a child whose configuration cannot work (sysexits.h EX_CONFIG).
EXIT_CONFIG = 78
#: Environment variables that hand a child the resolved configuration and its parent's pid.
CHILD_CONFIG = "FASTCHECKD_CHILD_CONFIG"
CHILD_PARENT = "FASTCHECKD_CHILD_PARENT"
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
#: A child that lived this long starts over with the shortest pause.
HEALTHY_AFTER_S = 10.0
#: So many lives in a row that were shorter are a defect that somebody should look at.
SHORT_LIVES = 3
#: How often a child is looked at whose end the kernel does not tell.
ENDED_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Called by the child, first thing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


class Child:
    """One supervised process.

    A start may fail (no memory, no process or descriptor left, nothing to execute) as a life may end early: both are
    tried again after a pause, for as long as this process lives.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: dict[str, str],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.restarts = 0
        #: Starts that failed.
        self.start_failures = 0
        #: Signs of life that all lives of it have given; how many says nothing, only that there are more.
        self.beats = 0
        self._argv = list(argv)
        self._environment = environment
        self._on_fatal = on_fatal
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._not_started = ""
        self._not_starting = Episode(logger, f"the {name} process cannot be started", level=logging.ERROR)
        #: Lives in a row that were too short, and when the present one counts as healthy.
        self._short_lives = 0
        self._last_end = ""
        self._healthy_at = 0.0

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def trouble(self) -> str:
        """Why it does not run as it should, to be read after its name; empty: it does."""
        if self._not_started:
            return f"cannot be started: {self._not_started}"
        healthy = self._process is not None and asyncio.get_running_loop().time() >= self._healthy_at
        if self._short_lives >= SHORT_LIVES and not healthy:
            return f"keeps ending ({self._short_lives} times in a row, lastly with {self._last_end})"
        return ""

    def start(self) -> None:
        """Begin to keep the process running."""
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise-{self.name}")

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = BACKOFF_MIN_S
        while not self._stopping:
            started_at = loop.time()
            beats = code = None
            try:
                beats = BeatTaker(self._heard)
                self._process = self._spawn(beats.child_fd)
                beats.started()
            except (OSError, MemoryError) as error:
                self._cannot_start(error)
            else:
                self._healthy_at = started_at + HEALTHY_AFTER_S
                self._not_started = ""
                self._not_starting.over()
                code = await ended(self._process)
                self._process = None
            finally:
                if beats is not None:
                    beats.close()
            if self._stopping:
                return
            if code == EXIT_CONFIG and self.restarts == 0:
                self._on_fatal(ConfigError(f"the {self.name} process cannot start; its message is above"))
                return
            lived = code is not None and loop.time() >= self._healthy_at
            pause_s = BACKOFF_MIN_S if lived else min(pause_s * 2, BACKOFF_MAX_S)
            if code is not None:
                self.restarts += 1
                self._short_lives = 0 if lived else self._short_lives + 1
                self._last_end = str(code)
                logger.warning("%s process ended with %s; restarting in %.1f s", self.name, code, pause_s)
            await asyncio.sleep(pause_s)

    def _spawn(self, beat_fd: int) -> subprocess.Popen[bytes]:
        """Start it; OSError when the kernel cannot.

        Not with asyncio: that starts a thread per child to wait for it and, where that fails, leaves a process
        running that nobody knows of.
        """
        return subprocess.Popen(
            self._argv, env={**self._environment, CHILD_BEAT: str(beat_fd)}, pass_fds=(beat_fd,)
        )

    def _cannot_start(self, error: Exception) -> None:
        self.start_failures += 1
        self._not_started = str(error) or repr(error)
        self._not_starting.again(
            "%s; it is tried again every %g s at least", self._not_started, BACKOFF_MAX_S
        )

    def _heard(self) -> None:
        self.beats += 1

    def kill(self) -> None:
        """SIGKILL it, for it to be started again."""
        if self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL when the grace is over."""
        self._stopping = True
        if self._task is None:
            return
        if self._process is None:
            self._task.cancel()
        else:
            self._process.terminate()
            await asyncio.wait([self._task], timeout=grace_s)
            if not self._task.done():
                logger.warning("%s process did not stop within %.1f s; killing it", self.name, grace_s)
                self.kill()
        await asyncio.gather(self._task, return_exceptions=True)


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; its exit code, negative for a signal."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # none is left, or the kernel is too old: look now and then
        while (code := process.poll()) is None:  # noqa: ASYNC110  there is nothing else to wait for
            await asyncio.sleep(ENDED_LOOK_S)
        return code
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()
