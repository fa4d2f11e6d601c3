"""`make matrix`: environments with other versions, each made by pip as a user's would be, and the smoke test in each.

A virtual environment per version of torch; in it, protobuf after protobuf. `lowest` is the oldest version of everything
that pyproject.toml allows. Takes the network and, where torch comes with CUDA's packages, 5 to 8 GB of disk per torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.benchmarks.entry import write_results

from .smoke import PACKAGES

ROOT = Path(__file__).parents[2]
EXTRAS = ("daemon", "cli")
LOWEST = "lowest"
NEWEST = "newest"
INSTALL_S = 3600
SMOKE_S = 300


def pinned(package: str) -> str:
    """The version that constraints.txt has, with which all tests run."""
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"{package} is not in constraints.txt"
    return found[1]


def lowest(project: dict[str, Any]) -> list[str]:
    """Requirements for the oldest series of all that base and extras name: `grpcio>=1.63` makes `grpcio==1.63.*`."""
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    oldest = {}
    for each in wanted:
        found = re.match(r"([\w-]+)>=([\d.]+)", each)
        assert found, f"{each!r} has no lower bound"
        oldest[found[1]] = f"{found[1]}=={found[2]}.*"
    return list(oldest.values())


def requirements(torch: str, protobuf: str) -> list[str]:
    """What pip is asked for besides FastCheck itself."""
    wanted = ["torch" if torch == NEWEST else f"torch=={torch}"]
    if protobuf == LOWEST:
        return wanted + lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    return [*wanted, f"protobuf=={protobuf}.*"]


def cells(torches: Sequence[str], protobufs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """torch and protobuf of each row; the lowest of all only beside the first torch."""
    for number, torch in enumerate(torches):
        for protobuf in protobufs:
            if protobuf != LOWEST or number == 0:
                yield torch, protobuf


def try_cell(venv: Path, torch: str, protobuf: str) -> dict[str, Any]:
    """Install and run; {"versions", "steps"} as smoke.py prints them, or {"failed": why}."""
    python = venv / "bin" / "python"
    # What this process runs from must not be what the cell imports.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FASTCHECK_ADDRESS")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore::UserWarning"}
    install = [
        *(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"),
        *(f"--editable=.[{','.join(EXTRAS)}]", *requirements(torch, protobuf)),
    ]
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run(install, check=True, cwd=ROOT, env=environment, timeout=INSTALL_S)
        done = subprocess.run(
            [str(python), "-m", "tests.matrix.smoke"],
            cwd=ROOT,
            env=environment,
            timeout=SMOKE_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)}
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"failed": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    return found


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """A row per environment; what failed is told below."""
    steps = list(dict.fromkeys(step for row in rows for step in row.get("steps", ())))
    table = Table(title="FastCheck with other versions")
    for column in ("asked for", *PACKAGES, *steps):
        table.add_column(column)
    for row in rows:
        versions = [row.get("versions", {}).get(name, "") for name in PACKAGES]
        told = ["FAILED" if row["steps"][s] else "ok" for s in steps] if "steps" in row else ["not run"]
        table.add_row(row["asked"], *versions, *told)
    console = Console(width=160)
    console.print(table)
    for row in rows:
        for what, why in {"install": row.get("failed", ""), **row.get("steps", {})}.items():
            if why:
                console.print(f"{row['asked']}, {what}: {why}", markup=False)


def main() -> int:
    """Try every cell; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("--torch", nargs="+", default=["2.6.0", pinned("torch"), NEWEST])
    parser.add_argument("--protobuf", nargs="+", default=["7", "6", "5", LOWEST])
    parser.add_argument(
        "--venvs", type=Path, default=ROOT / ".venv-matrix", help="the environments' folder; kept"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "matrix")
    arguments = parser.parse_args()
    rows = []
    for torch, protobuf in cells(arguments.torch, arguments.protobuf):
        asked = f"torch {torch}, protobuf {protobuf}"
        print(asked, file=sys.stderr, flush=True)
        rows.append(
            {"asked": asked, **try_cell(arguments.venvs.absolute() / f"torch-{torch}", torch, protobuf)}
        )
    print_table(rows)
    print(f"in full: {write_results(arguments.out, {'matrix': rows})}")
    return int(any("failed" in row or any(row["steps"].values()) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
