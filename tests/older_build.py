"""An older build of FastCheck beside this one: the sources of a commit, in a folder of their own.

Two builds of the same code would agree about everything. The commit is the newest whose registry writes schema 3 of its
state: no deletion, no owners of jobs, no certificates but between voters, no metrics. Its `__version__` is 0.1.0.
"""

from __future__ import annotations

import compileall
import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMIT = "7c755d322aecfc5ee0503184801b128a8100426b"
VERSION = "0.1.0"
_ROOT = Path(__file__).parents[1]
_SOURCES = ("daemon", "client", "proto")


@dataclass(frozen=True)
class OlderBuild:
    """Its sources in a folder; nothing is installed."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment for a process that is to find this build and no other."""
        roots = os.pathsep.join(str(self.root / source) for source in _SOURCES)
        return {**os.environ, "PYTHONPATH": roots}

    def run(
        self, module: str, *arguments: object, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """`python -m module` of this build; exit code, stdout and stderr as text."""
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=self.environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def compile(self) -> None:
        """Compile all of it once, for the many processes of a cluster."""
        for source in _SOURCES:
            assert compileall.compile_dir(self.root / source, quiet=1)


def extract(folder: Path) -> OlderBuild:
    """Take the commit out of this repository's history; skips the test where there is none."""
    done = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", "--format=tar", COMMIT, *_SOURCES],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(
            f"the older build is commit {COMMIT[:7]}, which git has not got here: {done.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return OlderBuild(folder)
