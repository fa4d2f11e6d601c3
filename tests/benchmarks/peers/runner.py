"""Starts candidates in processes of their own, bounded in time and memory, and leaves nothing of them behind.

What comes back is always a result: rounds, or the reason why there are none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from fastcheck.local import LocalCluster

from .candidate import Places
from .catalogue import HOW_TO_INSTALL, OURS, Entry
from .fastcheck import cluster_folder

ROOT = Path(__file__).parents[3]
SHM = Path("/dev/shm")
PREFIX = "fastcheck-peers-"
#: `python -m tests.benchmarks.peers.child`, also where a library has installed a package `tests` of its own, as
#: torchstore does.
_START = """
import runpy, sys, types
tests = types.ModuleType("tests")
tests.__path__ = ["tests"]
sys.modules["tests"] = tests
runpy.run_module("tests.benchmarks.peers.child", run_name="__main__")
"""
_POLL_S = 0.2
_END_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one process and all that it starts may take."""

    seconds: float = 300.0
    #: Sum of resident memory, shared pages counted for each process.
    resident_bytes: int = 24 << 30
    #: Of the whole machine: below it, the candidate is ended before the kernel ends something else.
    available_bytes: int = 1 << 30


def run(entry: Entry, pythons: Mapping[str, Path], width: int, rounds: int, bounds: Bounds) -> dict[str, Any]:
    """One start of a candidate: `versions` and `rounds`, or `reason`."""
    python = pythons[entry.environment]
    if not python.exists():
        return {"reason": f"there is no {python.parent.parent.name}: {HOW_TO_INSTALL[entry.environment]}"}
    with _places() as places:
        result_file, log_file = places.disk / "result.json", places.disk / "log"
        command = [
            str(python), "-W", "ignore", "-c", _START,
            entry.key, str(places.memory), str(places.disk), str(width), str(rounds), str(result_file),
        ]  # fmt: skip
        with log_file.open("wb") as log:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(entry),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        family = {child.pid: psutil.Process(child.pid)}
        try:
            broken = _watch(child, family, bounds)
        finally:
            _end(child, family)
        sys.stderr.write(_progress(log_file))
        if broken:
            return {"reason": broken}
        if not result_file.exists():
            return {"reason": f"ended with status {child.returncode}: {_last_line(log_file)}"}
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def _environment(entry: Entry) -> dict[str, str]:
    """The others see this repository's tests and nothing else of it."""
    environment = dict(os.environ)
    if entry.environment != OURS:
        environment["PYTHONPATH"] = str(ROOT)
    return environment


@contextlib.contextmanager
def _places() -> Iterator[Places]:
    memory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
    disk = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        yield Places(memory, disk)
    finally:
        LocalCluster(cluster_folder(disk)).down()  # nothing, unless the process was killed
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
        for left in SHM.glob(f"{memory.name}_*"):  # DLRover's
            left.unlink()


def _watch(child: subprocess.Popen[bytes], family: dict[int, psutil.Process], bounds: Bounds) -> str:
    """Wait for its end; the bound that it broke, if any. All descendants that were ever seen end up in `family`."""
    deadline = time.monotonic() + bounds.seconds
    while child.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(child.pid).children(recursive=True):
                family.setdefault(process.pid, process)
        if time.monotonic() > deadline:
            return f"took longer than {bounds.seconds:g} s"
        resident_bytes = sum(_resident_bytes(process) for process in family.values())
        if resident_bytes > bounds.resident_bytes:
            return f"took more than {bounds.resident_bytes / 1e9:.3g} GB of memory"
        if psutil.virtual_memory().available < bounds.available_bytes:
            return f"left less than {bounds.available_bytes / 1e9:.3g} GB of the machine's memory"
        time.sleep(_POLL_S)
    return ""


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _end(child: subprocess.Popen[bytes], family: dict[int, psutil.Process]) -> None:
    """End what is left of it. `psutil` tells a process from another one that got its number."""
    for process in family.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(family.values()), timeout=_END_S)
    child.wait(_END_S)


def _progress(log_file: Path) -> str:
    """Our own lines of the log."""
    lines = log_file.read_text(errors="replace").splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("  step "))


def _last_line(log_file: Path) -> str:
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
