"""The README's first minutes, as they stand there, by a new user: from `pip install` to a step that outlived its node.

What stands for the network is a path: pip finds all dependencies where this interpreter has them, and installs
FastCheck itself from the checkout, into a virtual environment of its own.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return code


def first_minutes() -> list[str]:
    """The lines of the shell."""
    section = README.partition("## First minutes\n")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return lines.strip().splitlines()


def test_the_example_is_about_twenty_lines():
    assert len(example().strip().splitlines()) <= 20


@pytest.fixture
def checkout(tmp_path):
    """A fresh one, with the lines above as train.py."""
    for folder in ("client", "daemon", "proto"):
        shutil.copytree(
            ROOT / folder, tmp_path / "fastcheck" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path / "fastcheck")
    (tmp_path / "fastcheck" / "train.py").write_text(example())
    return tmp_path / "fastcheck"


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="hatchling, of the dev extra, is not installed: `pip install .` would need the network",
)
@pytest.mark.timeout(600)
def test_the_first_minutes_end_with_steps_from_the_other_nodes(checkout, tmp_path):
    venv, *rest = first_minutes()
    assert venv.startswith("python3 -m venv .venv")
    backend = importlib.util.find_spec("hatchling")
    places = f"{sysconfig.get_path('purelib')}\\n{Path(backend.origin).parents[1]}\\n"
    # An older setuptools that Python 3.11 puts into each environment would stand before the one that torch wants.
    dependencies = f"""printf '{places}' > $(python -c 'import site; print(site.getsitepackages()[0])')/here.pth
        pip uninstall --quiet --yes setuptools"""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FASTCHECK_", "PYTHON", "PIP_"))
    }
    environment = own | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for: without
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    script = "\n".join([venv, dependencies, *rest, "python -c 'import fastcheck; print(fastcheck.__file__)'"])
    try:
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=570,
            check=False,
        )
    finally:
        down = [checkout / ".venv/bin/fastcheck", "local", "down"]
        if down[0].exists():
            subprocess.run(down, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^committed: (.*)$", done.stdout, re.MULTILINE) == ["[10]", "[20]"]
    assert re.search(r"^ *10 +committed", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{checkout}/.venv/"), "what was installed has run"
    assert (checkout / ".venv/share/man/man1/fastcheck.1").is_file()
