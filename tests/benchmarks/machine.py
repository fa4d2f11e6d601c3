"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import psutil

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
