"""Runs the guides' examples as a reader would, and does to them what the guides talk about."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.cluster.harness import until
from tests.forks import FRAMEWORKS, TORCH, Fork

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "docs" / "guides" / "examples"
NODE = "node-0"


class Example:
    """One run of an example: what it prints, and signals to it."""

    def __init__(self, cluster: LocalCluster, log: Path, *command: object, **environment: str) -> None:
        self.lines: list[str] = []
        self._log = log
        with log.open("w") as errors:
            self.process = Fork(
                command,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),  # for processes that it starts
                    "FASTCHECK_ADDRESS": cluster.address(NODE),
                    "PYTHONUNBUFFERED": "",  # else the parts of several ranks' lines mix
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                    **environment,
                },
                stdout=subprocess.PIPE,
                stderr=errors,
                preload=(*TORCH, *FRAMEWORKS),
            )

    def read_until(self, seen: Callable[[], object]) -> None:
        """Read lines until it holds."""
        assert self.process.stdout is not None
        while not seen():
            line = self.process.stdout.readline()
            assert line, f"it ended early, after {self.lines[-3:]}: {self._log.read_text()[-3000:]}"
            self.lines.append(line.rstrip("\n"))

    def finish(self) -> None:
        """To the end, which must be a good one."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        assert self.process.wait(60) == 0, self._log.read_text()[-3000:]

    def stop(self) -> None:
        """Whatever happened, nothing of it is left."""
        if self.process.poll() is None:
            # torchrun's workers, which may be stopped.
            for member in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def losses(self) -> dict[int, str]:
        """Step → loss, bit for bit, in the order of the lines; a step again replaces the earlier one."""
        return losses_in(self.lines)

    @property
    def begins(self) -> list[str]:
        """What each process of it said that it begins after."""
        return [line.partition("begins after step ")[2] for line in self.lines if "begins after step" in line]


def losses_in(lines: list[str]) -> dict[int, str]:
    """As `Example.losses`. Before a line may stand what a library has written without ending its line yet."""
    return {int(m[1]): m[2] for line in lines if (m := re.search(r"\bstep (\d+) loss (\S+)$", line))}


def begun(lines: list[str], ranks: int) -> dict[int, int]:
    """By pid: the step that each rank of an example under torchrun says it begins after, once all have said so."""
    found = [re.search(r"rank \d+ pid (\d+) begins after step (\d+)$", line) for line in lines]
    said = {int(match[1]): int(match[2]) for match in found if match}
    assert len(said) <= ranks
    return said if len(said) == ranks else {}


def newest_commit(cluster: LocalCluster, job: str) -> int:
    """The newest committed step, -1 without one."""
    with AdminClient(cluster.address(NODE), timeout_s=5) as admin:
        steps = admin.checkpoints(job)["checkpoints"]
    return max((each["step"] for each in steps if each["state"] == "committed"), default=-1)


def is_killed_and_resumed(
    cluster: LocalCluster,
    folder: Path,
    script: str,
    job: str,
    *,
    kill_at: int,
    committed: int,
    folders: bool = False,
) -> None:
    """An example goes on bit for bit after SIGKILL, and to its end when its daemon dies.

    Args:
        kill_at: its step; `committed`: a step that must be in memory by then, newer than what it has on disk.
        folders: whether it takes a folder for its files.
    """

    def start(name: str, **environment: str) -> Example:
        (folder / name).mkdir(exist_ok=True)
        arguments = [folder / name] if folders else []
        log = folder / f"{name}-{len(runs)}.log"
        runs.append(Example(cluster, log, EXAMPLES / script, *arguments, **environment))
        return runs[-1]

    runs: list[Example] = []
    try:
        # Turned off by one variable, and started beside the first one: what both compute is the same.
        whole = start("whole", FASTCHECK_DISABLE="1")
        first = start("run")
        first.read_until(lambda: kill_at in first.losses)
        os.kill(first.process.pid, signal.SIGSTOP)  # the daemon goes on with what it has
        until(lambda: newest_commit(cluster, job) >= committed, f"a commit from {committed} on")
        first.process.kill()
        first.process.wait(30)
        whole.finish()
        assert whole.begins == ["0"] and first.begins == ["0"]
        last = max(whole.losses)
        assert list(whole.losses) == list(range(1, last + 1)) and last > kill_at + 8
        assert first.losses.items() <= whole.losses.items()

        second = start("run")
        second.read_until(lambda: len(second.losses) >= 3)
        cluster.kill(NODE)
        second.finish()
        resumed_at = min(second.losses) - 1
        assert resumed_at >= committed
        expected = {step: loss for step, loss in whole.losses.items() if step > resumed_at}
        assert second.losses == expected
    finally:
        for run in runs:
            run.stop()
        if not cluster.pids(NODE):
            cluster.start(NODE)
