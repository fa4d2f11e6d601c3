"""torchrun for tests: its own options and its own agent, but launchers and workers are forked from one process that has
torch imported. Each would import it anew otherwise, three seconds of a core, and there are twenty of them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cluster.harness import until
from tests.forks import call

#: What torchrun with gloo needs to start workers anew: torch 2.13 keeps the first attempt's store otherwise, in which
#: gloo finds the addresses of dead workers and waits for them (docs/guides/fsdp2.md).
STORE_PER_ATTEMPT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: On it a worker writes where each of its threads is.
STACKS = signal.SIGUSR2


class Launcher:
    """One torchrun and its workers: their log, and signals to them.

    Args:
        options: torchrun's own, then the script and its arguments.
        environment: set for the launcher and, by it, for its workers.
    """

    def __init__(self, log: Path, *options: object, **environment: str) -> None:
        self.log = log
        log.touch()
        given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **STORE_PER_ATTEMPT, **environment}
        self._process = call(_launch, [str(option) for option in options], given, log)

    def finish(self, timeout_s: float = 120.0) -> None:
        """To the end, which must be a good one."""
        code = self._process.wait(timeout_s)
        assert code == 0, f"it ended with {code}: {self.tail()}"

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        """`harness.until`, which fails at once when the launcher has ended, and else with the workers' stacks."""

        def holds() -> Any:
            # Asked before the condition: a launcher may end well between the two.
            code = self._process.poll()
            value = condition()
            assert value or code is None, f"{what}: it ended with {code} before that: {self.tail()}"
            return value

        try:
            return until(holds, what, timeout_s)
        except pytest.fail.Exception as error:
            for member in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(STACKS)
            time.sleep(2)  # for them to be written
            pytest.fail(f"{error}: {self.tail()}")

    def kill(self) -> None:
        """SIGKILL for it and all its workers; harmless when it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._process.pid)
            for member in (*launcher.children(recursive=True), launcher):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        self._process.wait(30)

    def tail(self) -> str:
        """The end of what launcher and workers wrote."""
        return self.log.read_text()[-4000:]

    @property
    def lines(self) -> list[str]:
        """Complete lines so far."""
        return self.log.read_text().rpartition("\n")[0].splitlines()


def _launch(options: list[str], environment: dict[str, str], log: Path) -> None:
    """In a process of its own: what `torchrun` does, up to how a worker comes to be."""
    # Once for all workers.
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    import fastcheck.integrations.disk_fallback  # noqa: F401, PLC0415

    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    arguments = run.parse_args(["--start-method", "fork", *options])
    config, _, _ = run.config_from_args(arguments)
    elastic_launch(config, _work)(arguments.training_script, arguments.training_script_args)


def _work(script: str, arguments: list[str]) -> None:
    """A worker: its script as the main module, as if Python had been started with it."""
    faulthandler.register(STACKS, all_threads=True)
    # With PYTHONUNBUFFERED each part of a `print` is a write of its own, and those of several workers mix.
    sys.stdout.reconfigure(write_through=False, line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
