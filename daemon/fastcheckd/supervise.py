"""The agent's children: started, watched, restarted with backoff, stopped in good time.

A child ties its life to the agent itself (`die_with_parent`), so a killed agent leaves nothing behind.
The pause between restarts doubles up to a bound and shrinks again once a child has lived a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Callable, Sequence

from .beats import CHILD_BEAT, BeatTaker
from .errors import ConfigError

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
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Called by the child, first thing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


class Child:
    """One supervised process."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: dict[str, str],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.restarts = 0
        #: Signs of life that all lives of it have given; how many says nothing, only that there are more.
        self.beats = 0
        self._argv = list(argv)
        self._environment = environment
        self._on_fatal = on_fatal
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    def start(self) -> None:
        """Begin to keep the process running."""
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise-{self.name}")

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = BACKOFF_MIN_S
        while not self._stopping:
            started = loop.time()
            beats = BeatTaker(self._heard)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    env={**self._environment, CHILD_BEAT: str(beats.child_fd)},
                    pass_fds=(beats.child_fd,),
                )
                beats.started()
                code = await self._process.wait()
            finally:
                beats.close()
            if self._stopping:
                return
            if code == EXIT_CONFIG and self.restarts == 0:
                self._on_fatal(ConfigError(f"the {self.name} process cannot start; its message is above"))
                return
            pause_s = (
                BACKOFF_MIN_S if loop.time() - started > HEALTHY_AFTER_S else min(pause_s * 2, BACKOFF_MAX_S)
            )
            self.restarts += 1
            logger.warning("%s process ended with %s; restarting in %.1f s", self.name, code, pause_s)
            await asyncio.sleep(pause_s)

    def _heard(self) -> None:
        self.beats += 1

    def kill(self) -> None:
        """SIGKILL it, for it to be started again."""
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL when the grace is over."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                logger.warning("%s process did not stop within %.1f s; killing it", self.name, grace_s)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
