"""Steers a trainer process (`steered_rank.py`): tells it what to do, reads what it says, stops it, kills it."""

from __future__ import annotations

import json
import signal
import subprocess
from types import TracebackType
from typing import Any

from tests.forks import Fork

from fastcheck.local import LocalCluster

END_S = 60.0


class SteeredRank:
    """A context: when it ends, so does the process."""

    def __init__(
        self,
        cluster: LocalCluster,
        node: str,
        job: str,
        *,
        megabytes: float,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        arguments = [job, cluster.address(node), str(megabytes), str(rank), str(world_size)]
        self.process = Fork(
            ["-m", "tests.cluster.steered_rank", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> SteeredRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None and kind is not None:
            self.kill()
        self.proceed()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()

    def tell(self, **what: object) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the trainer has ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def load(self) -> tuple[int | None, int]:
        """Step and mark of what it loads."""
        self.tell(load=None)
        heard = self.hear()
        return heard["loaded"], heard["mark"]

    def save(self, step: int, mark: int) -> None:
        """Save, and return when `save` does."""
        self.tell(save=step, mark=mark)
        assert self.hear() == {"saving": step}
        assert self.hear() == {"saved": step}

    def error_of(self, step: int) -> str | None:
        """What a save ended with; None: it was committed."""
        self.tell(end_of=step)
        error: str | None = self.hear()["error"]
        return error

    def commit(self, step: int, mark: int) -> None:
        """Save, and return when the step is committed."""
        self.save(step, mark)
        error = self.error_of(step)
        assert error is None, error

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def proceed(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
