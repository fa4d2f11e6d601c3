"""How much of a store's memory is in use for each job, and how much one job may have: none starves another.

What is free counts for no job: it comes back as soon as anybody needs it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter

from ..errors import JobBudgetError

#: Threads that may wait at once for memory of one job that is at its limit: others' copies begin in the same threads.
WAITERS_MAX = 2


class JobShares:
    """The books. Every method is called with the store's lock held.

    Args:
        budget_bytes: most that may be in use for one job; 0: no limit of its own.
        changed: the store's lock, notified when memory comes back.
    """

    def __init__(self, budget_bytes: int, changed: threading.Condition) -> None:
        self.budget_bytes = budget_bytes
        self._changed = changed
        #: In use, or set aside; no job has 0.
        self._bytes: Counter[str] = Counter()
        self._waiters: Counter[str] = Counter()

    def left_for(self, job: str) -> float:
        """Bytes that a job may still have; infinite for no job."""
        limited = job and self.budget_bytes
        return self.budget_bytes - self._bytes[job] if limited else math.inf

    def charge(self, job: str, size: int) -> None:
        """So many bytes more are in use for a job, or less."""
        if job:
            self._bytes[job] += size
            assert self._bytes[job] >= 0, job
            if not self._bytes[job]:
                del self._bytes[job]

    def wait(self, job: str, size: int, left_s: float) -> None:
        """Return when something has come back.

        Raises:
            JobBudgetError: no time is left, or enough others wait for the same job's memory.
        """
        if left_s <= 0 or self._waiters[job] >= WAITERS_MAX:
            raise JobBudgetError(
                f"{size} bytes asked for, and job {job!r} has {self._bytes[job]} of the {self.budget_bytes} "
                "bytes that one job may have on this node: raise job_budget_bytes, keep fewer steps, or spread its "
                "ranks over more nodes"
            )
        self._waiters[job] += 1
        try:
            self._changed.wait(left_s)
        finally:
            self._waiters[job] -= 1
            if not self._waiters[job]:
                del self._waiters[job]

    def in_use(self) -> dict[str, int]:
        """Bytes of each job that has any."""
        return dict(self._bytes)
