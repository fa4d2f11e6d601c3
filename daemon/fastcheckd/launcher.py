"""Starts daemons as forks of one process that has imported what they need: for clusters on one machine.

    python -m fastcheckd.launcher

A daemon takes half a second of CPU time to import its modules, and a fork of this process takes none. Each line of
stdin is a request, a JSON object with paths and strings:

    {"config": its file, "log": appended to, "process": where pid and start time go, "environment": {...}}

The answer is a line with the pid, once the file says who it is. The daemon is the leader of a session of its own, lives
on when this process ends, and is reaped by whoever is its parent then. This process ends with its stdin.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from .main import main, settle_grpc


def launch() -> int:
    """Take requests; returns the exit code, of this process or of the daemon that it has become."""
    settle_grpc()
    importlib.import_module(".process.parent", __package__)
    gc.collect()
    gc.freeze()
    # The kernel reaps what ends: nobody here waits for it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _become(request)
        _record(Path(request["process"]), pid)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    return 0


def _record(path: Path, pid: int) -> None:
    """Write who a daemon is, whole or not at all."""
    try:
        started_at_s = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:  # it has ended already
        started_at_s = 0.0
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": pid, "started_at_s": started_at_s}))
    temporary.replace(path)


def _become(request: dict[str, Any]) -> int:
    """Be the daemon of a request."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for path, flags, targets in (
        (os.devnull, os.O_RDONLY, (0,)),
        (request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, (1, 2)),
    ):
        opened = os.open(path, flags, 0o666)
        for target in targets:
            os.dup2(opened, target)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    return main(["run", "--config", request["config"]])


if __name__ == "__main__":
    sys.exit(launch())
