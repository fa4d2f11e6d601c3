"""The demo's launcher: one process per rank, their events in one queue, their end by process id."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..local.ports import find_free_ports
from ..local.processes import python_path, tail
from . import TrainSettings

Event = dict[str, Any]

#: Events not read yet; far more than a run has, so a full queue means that nobody reads.
_EVENTS_MAX = 100_000
_END_TIMEOUT_S = 10.0


class RankGroup:
    """The processes of one run of the training. Always `kill_all` it at the end; a context manager does.

    Args:
        settings: what they train.
        addresses: of each rank's daemon, by rank; None: without FastCheck.
        log_dir: takes one log per rank, appended to.
        digest_at: step after which every rank says its state's digest.
    """

    def __init__(
        self,
        settings: TrainSettings,
        addresses: Sequence[str] | None,
        world_size: int,
        log_dir: Path,
        *,
        name: str,
        digest_at: int | None = None,
    ) -> None:
        self.world_size = world_size
        self._name = name
        self._log_dir = log_dir
        self._addresses = addresses
        self._arguments = [sys.executable, "-m", "fastcheck.demo.trainer", *settings.arguments()]
        if digest_at is not None:
            self._arguments.append(f"--digest-at={digest_at}")
        # Rank 0 listens there; below the ephemeral range nobody takes it meanwhile.
        self._master_port = find_free_ports(1)[0]
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._events: queue.Queue[Event] = queue.Queue(_EVENTS_MAX)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill_all()

    def start(self, rank: int) -> None:
        """Start a rank; it builds its model with the others and then waits for `begin`."""
        with self.log_file(rank).open("ab") as log:
            process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(rank, os.environ),
                text=True,
                # Ctrl-C is for the launcher, which ends its ranks itself.
                start_new_session=True,
            )
        self._processes[rank] = process
        threading.Thread(target=self._read, args=(rank, process), daemon=True, name=f"rank-{rank}").start()

    def begin(self, rank: int) -> None:
        """Tell a rank that its daemon is there: it may load and train."""
        stdin = self._processes[rank].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: its "ended" event tells
            stdin.write("begin\n")
            stdin.flush()

    def events(self, timeout_s: float) -> Iterator[Event]:
        """The ranks' events as they come, and `ended` with the exit code of each. Endless.

        Raises:
            TimeoutError: nothing came for `timeout_s`.
        """
        while True:
            try:
                yield self._events.get(timeout=timeout_s)
            except queue.Empty:
                raise TimeoutError(
                    f"the ranks of the {self._name} said nothing for {timeout_s:g} s"
                ) from None

    def kill(self, rank: int) -> None:
        """SIGKILL one rank and wait until it is gone."""
        process = self._processes[rank]
        process.kill()
        process.wait(_END_TIMEOUT_S)

    def kill_all(self) -> None:
        """SIGKILL what still runs."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(_END_TIMEOUT_S)
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def log_file(self, rank: int) -> Path:
        """What the rank wrote to stderr."""
        return self._log_dir / f"{self._name}-rank-{rank}.log"

    def log_tails(self) -> str:
        """The end of every rank's log that says something."""
        tails = {rank: tail(self.log_file(rank)) for rank in self._processes}
        return "\n".join(f"--- {self.log_file(rank)}\n{text}" for rank, text in tails.items() if text)

    def _environment(self, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        environment = {k: v for k, v in inherited.items() if not k.startswith("FASTCHECK_")}
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._master_port),
            # One thread per rank: as many ranks share the machine, and sums keep their order.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": python_path(("fastcheck", "fastcheck_proto"), inherited),
            "PYTHONUNBUFFERED": "1",
        }
        if self._addresses is None:
            environment["FASTCHECK_DISABLE"] = "1"
        else:
            environment["FASTCHECK_ADDRESS"] = self._addresses[rank]
        return environment

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                # A rank that is killed in the middle of a line leaves half of it.
                with contextlib.suppress(json.JSONDecodeError):
                    self._put(json.loads(line))
        self._put({"event": "ended", "rank": rank, "code": process.wait(), "at_s": time.monotonic()})

    def _put(self, event: Event) -> None:
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(event)
