"""`make screenshots`: what each main view of the command line looks like, as SVG, from a real cluster that trains.

The commands run as a person runs them, in colour; what they print is drawn, not what they would. Times and bytes differ
from run to run, so the pictures are made anew when a view changes and are not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text
from tests.cluster.harness import Job, node_states, until

from fastcheck.local import LocalCluster

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "screenshots"
#: What asks no daemon shows the configuration to begin with: one of this cluster names this machine's paths.
EXAMPLE = ROOT / "deploy" / "example"
NODES = 4
#: Name → columns of the terminal and the command, while all is well and the job trains.
WELL = {
    "status": (100, "status"),
    "nodes": (190, "nodes"),
    "top": (120, "top --interval 1"),
    "jobs": (100, "jobs"),
    "checkpoints": (100, "checkpoints gpt"),
    "replicas": (150, "replicas gpt"),
    "safe-to-stop": (100, "safe-to-stop node-1"),
    "config": (110, "config show --origin --config node.yaml --set pacing=off"),
    "plan": (100, "plan --nodes 1000 --tolerate 1 --domains 50"),
}
#: The same, after a node was killed and its memory lost; `STEP` is the newest committed step.
AFTER_A_LOSS = {
    "status-degraded": (130, "status"),
    "inspect": (150, "inspect gpt STEP"),
    "verify": (100, "verify gpt"),
    "history": (120, "history --limit 8"),
    "voters": (100, "voters"),
}
NAMES = (*WELL, *AFTER_A_LOSS)


def main() -> None:
    """Make all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="fastcheck-shots-") as folder,
        LocalCluster(Path(folder)) as cluster,
    ):
        cluster.up(NODES, ram_budget="256MiB", settings={"log_format": "json"})
        job = Job(cluster, ["node-0", "node-1"], megabytes=12)
        for step in range(1, 4):
            job.commit(step)
        with training(job, 4) as last:
            for name, (columns, command) in WELL.items():
                take(cluster, name, columns, command)
        newest = str(last[0])
        cluster.kill("node-3", wipe=True)
        until(lambda: node_states(cluster, "node-0")["node-3"] == "DOWN", "node-3 to be DOWN")
        for name, (columns, command) in AFTER_A_LOSS.items():
            take(cluster, name, columns, command.replace("STEP", newest))
        job.stop()


@contextlib.contextmanager
def training(job: Job, first: int) -> Iterator[list[int]]:
    """Steps are committed one after the other meanwhile; the last one's number."""
    ended = threading.Event()
    last = [first - 1]

    def train() -> None:
        while not ended.is_set():
            job.commit(last[0] + 1)
            last[0] += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield last
    finally:
        ended.set()
        thread.join()


def take(cluster: LocalCluster, name: str, columns: int, command: str) -> None:
    """Run a command and draw what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "FASTCHECK_ADDRESS": cluster.address("node-0"),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "COLUMNS": str(columns),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fastcheck", *command.split()],
        cwd=EXAMPLE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise SystemExit(f"fastcheck {command} printed nothing: {done.stderr}")
    (FOLDER / f"{name}.svg").write_text(draw(name, columns, command, done.stdout))
    click.echo(f"{name}: exit code {done.returncode}", err=True)


def draw(name: str, columns: int, command: str, printed: str) -> str:
    """An SVG of a terminal. No font is fetched from elsewhere: the viewer's own monospaced one will do."""
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed.rstrip("\n")), soft_wrap=True)
    svg = console.export_svg(title=f"fastcheck {command}", unique_id=name)
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    main()
