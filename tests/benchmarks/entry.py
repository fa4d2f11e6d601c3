"""What every benchmark started from a shell has in common: how it ends, the machine, the file that it leaves."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

#: As a shell counts it: 128 + SIGTERM.
TERMINATED = 143


def end_in_order_when_told() -> None:
    """SIGTERM unwinds like an exception, so clusters, namespaces and folders are gone afterwards."""

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # `timeout` sends it to the whole group, some send it twice
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, end)


def write_results(folder: Path, results: Mapping[str, Any], suffix: str = "") -> Path:
    """Write one run as JSON: machine, versions, command, everything measured. The file is named by the moment.

    Args:
        suffix: of the file's name, before `.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / time.strftime(f"%Y%m%d-%H%M%S{suffix}.json")
    # Folders of this machine mean nothing elsewhere.
    arguments = [Path(said).name if Path(said).is_absolute() else said for said in sys.argv[1:]]
    written = {"machine": describe(), "arguments": arguments, **results}
    path.write_text(json.dumps(written, indent=2) + "\n")
    return path


PACKAGES = ("fastcheck", "torch", "grpcio", "protobuf", "pysyncobj", "xxhash", "numpy", "zstandard", "blosc2")


def describe() -> dict[str, object]:
    """Machine, kernel settings that matter, versions."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "shmem_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "tcp_congestion": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"unknown ({error.strerror})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"
