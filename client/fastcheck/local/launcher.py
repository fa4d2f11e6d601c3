"""A process that starts daemons for this one, as forks of itself: see `fastcheckd.launcher`.

There is one for each interpreter and path that daemons are to run with, from the first daemon that is started until
this process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path


class Launcher:
    """Its process, and the line to it. May be used from any thread.

    Args:
        environment: in which the daemon's package is found.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastcheckd.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
            start_new_session=True,  # what ends this process' group is not to end it in the middle of a start
        )
        self._lock = threading.Lock()

    @property
    def lives(self) -> bool:
        """Whether it can start anything."""
        return self._process.poll() is None

    def start(self, config: Path, log: Path, process: Path, environment: Mapping[str, str]) -> int:
        """Start a daemon; its process id.

        Args:
            config: its configuration.
            log: what its output is appended to.
            process: file that names it from then on: `processes.read_reference`.
            environment: all of its environment.

        Raises:
            OSError: the launcher has ended.
        """
        request = {
            "config": str(config),
            "log": str(log),
            "process": str(process),
            "environment": dict(environment),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise ChildProcessError("the process that starts daemons has ended; its message is above")
        return int(answer)

    def close(self) -> None:
        """End it; daemons live on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_launchers: dict[tuple[int, str, str], Launcher] = {}
_lock = threading.Lock()


def launcher(environment: Mapping[str, str]) -> Launcher:
    """This process' launcher of daemons that find their packages as `environment` says."""
    # A fork of this process shares the pipes of its parent's: it needs one of its own.
    key = os.getpid(), sys.executable, environment.get("PYTHONPATH", "")
    with _lock:
        found = _launchers.get(key)
        if found is None or not found.lives:
            _launchers[key] = found = Launcher(environment)
        return found


@atexit.register
def _close_all() -> None:
    for (pid, *_), found in _launchers.items():
        if pid == os.getpid():
            found.close()
