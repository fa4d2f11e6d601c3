"""Processes of a local cluster: starting daemons as forks of one launcher, finding and ending them. Knows no clusters.

A node's processes are its daemon's main process and its descendants. The main process leads a session of its own, so
its children are found by that session even after it is gone and they have another parent. Processes are known by id
and start time.

Daemons are forked by a launcher process (see `fastcheckd.launcher`), which imports once. There is one for each
interpreter and path that daemons are to run with, from the first daemon that is started until this process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Start times come from clock ticks since boot; a different process differs by more than this.
_START_TIME_SLACK_S = 0.05
#: What was killed is gone within this.
_KILL_S_MAX = 10.0
#: Of a log, what its last lines are looked for in.
_TAIL_BYTES = 16 << 10


@dataclass(frozen=True)
class ProcessRef:
    """A process that cannot be mistaken for a later one with the same id."""

    pid: int
    started_at_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessRef:
        """The process that has this id now; raises psutil.NoSuchProcess when none has."""
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process if it still lives; None when it is gone, a zombie, or the id is somebody else's now."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started_at_s) > _START_TIME_SLACK_S:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None

    def may_have_orphans(self) -> bool:
        """Whether the id is still this process' or nobody's: only then that session is its own."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started_at_s) <= _START_TIME_SLACK_S
        except psutil.NoSuchProcess:
            return True


def node_processes(daemon: ProcessRef) -> list[psutil.Process]:
    """Everything alive of a node: the main process first, then its children at any depth."""
    found: dict[int, psutil.Process] = {}
    root = daemon.find()
    if root is not None:
        found[root.pid] = root
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid: child for child in root.children(recursive=True)}
    # The kernel gives a session's id to no new process while the session has members. Asking for the daemon's
    # name as well makes sure that a stranger is never ended.
    if daemon.may_have_orphans():
        for process in psutil.process_iter():
            if process.pid not in found and _session(process.pid) == daemon.pid and _is_daemon(process):
                found[process.pid] = process
    return [p for p in found.values() if not _is_zombie(p.pid)]


def read_reference(path: Path) -> ProcessRef | None:
    """Whom a file of the launcher names; None: nobody was started."""
    try:
        return ProcessRef(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def kill_all(daemon: ProcessRef) -> list[int]:
    """SIGKILL a node's processes, the main one first so that it restarts no child, until none is left.

    Returns:
        The ids of what was killed.

    Raises:
        TimeoutError: something is still there after ten seconds (stuck in the kernel).
    """
    killed: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + _KILL_S_MAX
    while True:
        processes = node_processes(daemon)
        # A process with much memory takes its time to die, without a command line but with its ports.
        processes += [p for p in killed.values() if p not in processes and not _is_gone(p)]
        if not processes:
            return list(killed)
        if time.monotonic() > deadline:
            left = ", ".join(str(p.pid) for p in processes)
            raise TimeoutError(f"processes {left} are still alive {_KILL_S_MAX:g} s after SIGKILL")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed[process.pid] = process
        psutil.wait_procs(processes, timeout=0.2)


def own_environment() -> dict[str, str]:
    """Environment for a child that is to find this package where this process does."""
    return os.environ | {"PYTHONPATH": python_path(("fastcheck", "fastcheck_proto"), os.environ)}


def daemon_environment(own_keys: Iterable[str]) -> dict[str, str]:
    """Environment for a daemon: this one, minus what would override the node's own config.

    The daemon is found where this interpreter would find it, also when that was arranged at run time.

    Raises:
        ModuleNotFoundError: the daemon is not installed.
    """
    environment = dict(os.environ)
    for key in own_keys:
        environment.pop(f"FASTCHECK_{key.upper()}", None)
    environment["PYTHONPATH"] = python_path(("fastcheckd", "fastcheck_proto"), environment)
    return environment


def python_path(packages: Iterable[str], environment: Mapping[str, str]) -> str:
    """PYTHONPATH with which a child finds these packages where this process does; absolute."""
    roots = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {package} is not installed", name=package)
        root = str(Path(spec.submodule_search_locations[0]).absolute().parent)
        # What every interpreter sees anyway must not be moved before the standard library.
        if root not in [*site.getsitepackages(), site.getusersitepackages()]:
            roots.append(root)
    inherited = [str(Path(p).absolute()) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join(dict.fromkeys([*roots, *inherited]))


def tail(log_file: Path, lines: int = 15) -> str:
    """The last lines of a log, empty when there is none."""
    try:
        with log_file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return any("fastcheckd" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or _is_zombie(process.pid)


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
