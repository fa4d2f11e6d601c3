"""A newer build of FastCheck beside this one: its sources with another version and a newer schema of the registry.

Two builds of the same version would agree about everything. What the newer one adds is nothing but the number: that it
is agreed on when all voters know it, and refused by a version that does not know it, does not depend on what it means.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fastcheckd
from fastcheckd.registry.model import SCHEMA

VERSION = "99.0.0"
NEWER_SCHEMA = SCHEMA + 1
_ROOT = Path(__file__).parents[1]
_SOURCES = ("daemon", "client", "proto")
#: File → what is replaced in it, and by what.
_CHANGES = {
    "daemon/fastcheckd/__init__.py": (
        f'__version__ = "{fastcheckd.__version__}"',
        f'__version__ = "{VERSION}"',
    ),
    "daemon/fastcheckd/registry/model.py": (f"\nSCHEMA = {SCHEMA}\n", f"\nSCHEMA = {NEWER_SCHEMA}\n"),
}


@dataclass(frozen=True)
class NewerBuild:
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


def make(folder: Path) -> NewerBuild:
    """Copy the sources, compiled ones too, and change them; what is changed is compiled once for all processes."""
    for source in _SOURCES:
        shutil.copytree(_ROOT / source, folder / source)
    for name, (present, newer) in _CHANGES.items():
        text = (folder / name).read_text()
        assert text.count(present) == 1, f"{name} has no {present!r}"
        (folder / name).write_text(text.replace(present, newer))
    for source in _SOURCES:
        assert compileall.compile_dir(folder / source, quiet=1)
    return NewerBuild(folder)
