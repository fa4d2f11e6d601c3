"""How the saves of each job end here, for whoever watches: lines in the log, and what `fastcheck status` is told.

A save that is refused, waits or is never committed shows in its trainer's handle, which nobody may look at. So the
room says here what becomes of each attempt, and this module keeps the little that tells a job that is well from one
that is not: since when nothing is committed, how many saves in a row have failed, and why the last one did.

Decides nothing about saves. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from fastcheck_proto.v1 import peer_pb2

from ..counters import Counters
from ..errors import FastCheckdError, FencedError, SupersededError
from ..log import Episode
from ..rpc import detail
from .job_progress import JobProgress
from .save import SaveKey

logger = logging.getLogger(__name__)

#: A trainer that is held up for longer is told of in the log.
WAIT_TOLD_S = 1.0
#: Jobs that a report names: those that fail first, then those that saved last.
JOBS_TOLD_MAX = 32
#: Of an error's text in a report.
REASON_CHARS_MAX = 500

Rank = tuple[str, int]


@dataclass
class _Job:
    """What is known of one job's saves."""

    #: By the monotonic clock: the newest attempt to save.
    tried_at: float
    #: The first seal after the last commit; None: nothing was sealed since.
    unsettled_since: float | None = None
    #: Saves in a row that failed or were refused since the last commit, and the last of them.
    failures: int = 0
    failure: FastCheckdError | None = None
    failed_at: float = 0.0


class _Rank:
    """A rank's lines in the log."""

    def __init__(self, rank: Rank) -> None:
        whose = f"rank {rank[1]} of job {rank[0]}"
        self.refusals = Episode(logger, f"a save of {whose} is refused")
        self.waits = Episode(logger, f"a save of {whose} waits")


class Outcomes:
    """Of one data process."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._ranks: dict[Rank, _Rank] = {}

    @contextlib.contextmanager
    def beginning(self, key: SaveKey, why_waiting: Callable[[], str]) -> Iterator[None]:
        """While a trainer asks for memory for a step: a refusal, and a wait of more than a moment, are told.

        Args:
            why_waiting: what it waits for, asked when it has waited that long.
        """
        rank = self._lines(key)
        self._of(key.job).tried_at = self._clock()
        waited = False

        def tell() -> None:
            nonlocal waited
            waited = True
            rank.waits.again("step %d, for more than %g s: %s", key.step, WAIT_TOLD_S, why_waiting())

        timer = asyncio.get_running_loop().call_later(WAIT_TOLD_S, tell)
        try:
            yield
        except FastCheckdError as error:
            self._counters.add("saves_refused")
            self._failed(key.job, error)
            rank.refusals.again("step %d: %s", key.step, error)
            raise
        except asyncio.CancelledError:
            self._counters.add("saves_refused")
            rank.refusals.again("step %d: its trainer waits no longer, or is gone", key.step)
            raise
        else:
            rank.refusals.over()
            if not waited:
                rank.waits.over()
        finally:
            timer.cancel()

    def refused(self, key: SaveKey, error: FastCheckdError) -> None:
        """A step that a trainer has handed over is not taken."""
        self._of(key.job).tried_at = self._clock()
        self._counters.add("saves_refused")
        self._failed(key.job, error)
        self._lines(key).refusals.again("step %d: %s", key.step, error)

    def _lines(self, key: SaveKey) -> _Rank:
        if (rank := self._ranks.get((key.job, key.rank))) is None:
            rank = self._ranks[key.job, key.rank] = _Rank((key.job, key.rank))
        return rank

    def sealed(self, key: SaveKey, waited_s: float = 0.0) -> None:
        """A trainer has handed a step over, after it had waited for so long."""
        lines = self._lines(key)
        lines.refusals.over()
        if waited_s < WAIT_TOLD_S:
            lines.waits.over()
        job = self._of(key.job)
        job.tried_at = self._clock()
        if job.unsettled_since is None:
            job.unsettled_since = job.tried_at

    def ended(self, key: SaveKey, error: FastCheckdError | None) -> None:
        """A step that was handed over is committed, or will not be."""
        job = self._of(key.job)
        if error is None:
            job.unsettled_since = job.failure = None
            job.failures = 0
        else:
            self._failed(key.job, error)

    def _failed(self, name: str, error: FastCheckdError) -> None:
        # Given up for a newer step, or of a process whose place another one has: neither says anything of the next.
        if not isinstance(error, SupersededError | FencedError):
            job = self._of(name)
            job.failures += 1
            job.failure, job.failed_at = error, self._clock()

    def _of(self, job: str) -> _Job:
        if (known := self._jobs.get(job)) is None:
            known = self._jobs[job] = _Job(self._clock())
        return known

    def forget_except(self, ranks: Collection[Rank]) -> None:
        """These ranks alone are known here any more."""
        self._ranks = {rank: known for rank, known in self._ranks.items() if rank in ranks}
        jobs = {job for job, _ in ranks}
        self._jobs = {name: job for name, job in self._jobs.items() if name in jobs}

    def reports(
        self, progress: Collection[JobProgress], stalled: Mapping[str, FastCheckdError]
    ) -> list[peer_pb2.JobSaves]:
        """One report per job.

        Args:
            progress: how far each job has come.
            stalled: job → why its oldest step under way does not move; missing: it does, or there is none.
        """
        now = self._clock()
        come = {each.job: each for each in progress}
        names = sorted(
            self._jobs, key=lambda name: (not self._jobs[name].failures, -self._jobs[name].tried_at)
        )
        return [
            self._report(name, self._jobs[name], come.get(name), stalled.get(name), now)
            for name in names[:JOBS_TOLD_MAX]
        ]

    @staticmethod
    def _report(
        name: str, job: _Job, come: JobProgress | None, stalled: FastCheckdError | None, now: float
    ) -> peer_pb2.JobSaves:
        report = peer_pb2.JobSaves(
            job=name,
            tried_ms_ago=_ms(now - job.tried_at),
            failures=job.failures,
            stalled_because="" if stalled is None else str(stalled)[:REASON_CHARS_MAX],
        )
        if job.unsettled_since is not None:
            report.uncommitted_ms = _ms(now - job.unsettled_since)
        if job.failure is not None:
            report.last_failure.CopyFrom(detail(job.failure))
            report.last_failure.message = report.last_failure.message[:REASON_CHARS_MAX]
            report.failed_ms_ago = _ms(now - job.failed_at)
        if come is not None:
            report.staged_step = come.staged_step
            if come.interval_s is not None:
                report.interval_ms = _ms(come.interval_s)
        return report


def _ms(seconds: float) -> int:
    return max(0, round(1000 * seconds))
