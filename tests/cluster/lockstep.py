"""Starts and steers a job whose ranks train in lockstep (`lockstep_rank.py`), each a process on a node of its own."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from types import TracebackType
from typing import Any

from tests.cluster.harness import until
from tests.forks import Fork
from tests.sockets import free_port

from fastcheck.local import LocalCluster

END_S = 60.0


class LockstepJob:
    """A context: when it ends, the ranks are told to, and killed if they do not."""

    def __init__(
        self,
        cluster: LocalCluster,
        nodes: list[str],
        name: str = "lockstep",
        *,
        megabytes: float = 38,
        pause_s: float = 0.3,
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._name = name
        self._options = ["--megabytes", str(megabytes), "--pause", str(pause_s)]
        self.ranks: list[Fork] = []
        self.events: list[list[dict[str, Any]]] = []

    def __enter__(self) -> LockstepJob:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self) -> None:
        """All ranks, as new processes."""
        port = free_port()
        self.events = [[] for _ in self._nodes]
        for rank, node in enumerate(self._nodes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self._nodes)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = Fork(
                [
                    "-m",
                    "tests.cluster.lockstep_rank",
                    self._name,
                    self._cluster.address(node),
                    *self._options,
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self.ranks.append(process)
            threading.Thread(target=self._listen, args=(process, self.events[rank]), daemon=True).start()

    @staticmethod
    def _listen(process: Fork, events: list[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))

    def end(self) -> None:
        """Tell the ranks to end, and see to it that they do."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.ranks = []

    def kill(self) -> None:
        """SIGKILL every rank."""
        for process in self.ranks:
            process.kill()
        self.end()

    def committed(self, rank: int = 0) -> int:
        """Newest step whose commit a rank was told of."""
        return max((e["committed"] for e in self.events[rank] if "committed" in e), default=0)

    def failures(self, rank: int = 0) -> list[dict[str, Any]]:
        """Steps of a rank that were not committed, each with its error."""
        return [e for e in self.events[rank] if "failed" in e]

    def goes_on(self, commits: int = 2, timeout_s: float = END_S) -> None:
        """So many more steps are committed, by every rank's account."""
        for rank in range(len(self._nodes)):
            wanted = self.committed(rank) + commits

            def done(rank: int = rank, wanted: int = wanted) -> bool:
                ended = [r for r, process in enumerate(self.ranks) if process.poll() is not None]
                assert not ended, f"ranks {ended} have ended"
                return self.committed(rank) >= wanted

            until(
                done,
                f"rank {rank} to commit step {wanted}; its last events: {self.events[rank][-3:]}",
                timeout_s,
            )
