"""A job that saves without pause while a test does something to its cluster."""

from __future__ import annotations

import threading
import time

from tests.cluster.harness import Job, until

from fastcheck import SaveHandle

#: Within this, whatever happens that the cluster tolerates, one of the next saves is committed.
BOUND_S = 45.0
STEP_S = 0.03


class Training(threading.Thread):
    """All ranks save step after step; what fails is followed by the next step, as in a training loop."""

    def __init__(self, job: Job, after: int = 0) -> None:
        super().__init__(name="training", daemon=True)
        self.job = job
        self.step = self.newest = after
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.step += 1
                self.settle(self.job.save(self.step))
                self.stopping.wait(STEP_S)
        except BaseException as error:
            self.error = error

    def settle(self, handles: list[SaveHandle]) -> None:
        give_up_at = time.monotonic() + BOUND_S
        while not all(h.done for h in handles) and not any(h.exception() for h in handles):
            assert time.monotonic() < give_up_at, f"step {self.step} does not end: {handles}"
            if self.stopping.wait(0.005):
                return
        if all(h.committed for h in handles):
            self.newest = self.step

    def goes_on(self, commits: int = 1) -> None:
        """So many further steps are committed, within a bounded time."""
        wanted = self.newest + commits
        until(lambda: self.newest >= wanted or self.error, f"steps up to {wanted} to be committed", BOUND_S)
        if self.error:
            raise self.error

    def end(self) -> None:
        """No further step; what was said to be committed stays in `newest`."""
        self.stopping.set()
        self.join(BOUND_S)
        assert not self.is_alive()
        if self.error:
            raise self.error
