"""The soak's job: one trainer process per rank, in lockstep, as a launcher would start and end them."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.forks import Fork
from tests.soak.account import HANG_S, Account
from tests.soak.trainer import JOB
from tests.sockets import free_port

from fastcheck.local import LocalCluster

#: Longest wait for what a trainer says next. Beyond HANG_S it is counted, beyond this it is killed.
PATIENCE_S = 120.0


class RankEndedError(Exception):
    """A trainer process has ended by itself, or was killed."""


class Rank:
    """One trainer process, and what it says: what it saves and what became of that goes straight to the account."""

    def __init__(self, account: Account, number: int, command: list[str], log: Path) -> None:
        self.number = number
        self._account = account
        self._heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("ab") as stderr:
            self.process = Fork(
                ["-m", "tests.soak.trainer", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # killed in the middle of it
            if "saving" in event:
                self._account.saving(self.number, event["saving"], event["digest"])
            elif "committed" in event:
                self._account.committed = max(self._account.committed, event["committed"])
                self._account.commits += self.number == 0
            elif "failed" in event:
                self._account.failed_saves[event["error"].split(":")[0]] += 1
            elif "load_failed" in event:
                self._account.failed_loads[event["load_failed"].split(":")[0]] += 1
            else:
                self._heard.put(event)
        self._heard.put(None)

    def tell(self, **what: object) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise RankEndedError(f"rank {self.number} has ended") from None

    def hear(self, what: str) -> dict[str, Any]:
        """What it says next; raises RankEndedError when it is gone."""
        try:
            event = self._heard.get(timeout=PATIENCE_S)
        except queue.Empty:
            self._account.violated("hangs", f"rank {self.number} says nothing of {what} for {PATIENCE_S:g} s")
            self.kill()
            raise RankEndedError(f"rank {self.number} hung") from None
        if event is None:
            raise RankEndedError(f"rank {self.number} has ended")
        if event["seconds"] > HANG_S:
            self._account.violated(
                "hangs", f"rank {self.number}: {what} took {event['seconds']:.0f} s: {event}"
            )
        return event

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


class Job:
    """All ranks."""

    def __init__(self, cluster: LocalCluster, account: Account, parameters: int, log_dir: Path) -> None:
        self._cluster = cluster
        self._account = account
        self._parameters = parameters
        self._log_dir = log_dir
        self.nodes: list[str] = []
        self.ranks: list[Rank] = []
        self.step = 0

    def start(self, nodes: list[str], *, together: bool) -> None:
        """New processes on these nodes, which load; raises RankEndedError if one could not.

        `together`: they form a process group, and agree on the step.
        """
        self.stop()
        floor = self._account.committed
        port = [str(free_port())] if together else []
        self.nodes = nodes
        self.ranks = [
            Rank(
                self._account,
                rank,
                [JOB, self._cluster.address(node), str(rank), str(len(nodes)), str(self._parameters), *port],
                self._log_dir / f"rank-{rank}.log",
            )
            for rank, node in enumerate(nodes)
        ]
        heard = [rank.hear("a load") for rank in self.ranks]
        self._account.loaded([each["loaded"] for each in heard], [each["digest"] for each in heard], floor)
        self.step = heard[0]["loaded"] or 0

    def begin_step(self) -> None:
        """All ranks train and begin to save."""
        self.step += 1
        for rank in self.ranks:
            rank.tell(go=self.step)

    def end_step(self) -> None:
        """All ranks' `save` has returned."""
        for rank in self.ranks:
            rank.hear("a save")

    def stop(self) -> None:
        """As a launcher does when one rank is gone: all others go as well."""
        for rank in self.ranks:
            rank.kill()
        self.ranks = []
