"""Which step of a job may be committed next: the leader's collection of rank reports. Pure.

It lives in the leader's memory only; owners repeat their reports until they have an answer, so a new
leader's collection fills by itself. Steps of a job are committed in order, but a complete newer step
waits for an older one only while that one still makes progress. Times are parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from .model import AnyRef, Ref
from .shared_state import Digests

#: An older step holds a complete newer one up while its last new report is younger than this.
STALE_AFTER_S = 5.0
#: Steps of one job under way at once, and jobs. Beyond, the oldest is given up.
STEPS_MAX = 32
JOBS_MAX = 4096
#: A placed step of which nothing more is heard is not shown as under way for longer than this.
SHOWN_S = 120.0
ABSENT_SHOWN_MAX = 16


@dataclass
class Collection:
    """What the leader has heard about one step."""

    step: int
    world_size: int
    #: Newest report of each rank, as a commit holds it.
    reports: dict[int, rpb.RankRecord] = field(default_factory=dict)
    #: What each found in a state that all should hold alike, as it came with that report.
    digests: dict[int, Digests] = field(default_factory=dict)
    #: Bytes of the ranks that asked for a placement, and the nodes that they are on, in the life in which each asked.
    placed_bytes: dict[int, int] = field(default_factory=dict)
    placed_on: dict[int, Ref] = field(default_factory=dict)
    #: When the last report came that said something new.
    progress_at: float = 0.0
    touched_at: float = 0.0
    #: A rank of it was taken over by a new process: nothing waits for this step any more.
    broken: bool = False

    @property
    def complete(self) -> bool:
        """All ranks are in."""
        return len(self.reports) == self.world_size

    def holds_up(self, now: float) -> bool:
        """Whether a newer step of the job has to wait for this one."""
        return bool(self.reports) and not self.broken and now - self.progress_at < STALE_AFTER_S


class WorldSizeConflictError(Exception):
    """A report names another world size than the ranks before it."""


class Collector:
    """All steps under way."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[int, Collection]] = {}

    def _collection(self, job: str, step: int, world_size: int, now: float) -> tuple[Collection, list[int]]:
        """The step's collection, and older steps that were given up to make room."""
        steps = self._jobs.setdefault(job, {})
        collection = steps.setdefault(step, Collection(step, world_size, touched_at=now))
        collection.touched_at = now
        dropped = [old for old in sorted(steps)[:-STEPS_MAX] if old != step]
        for old in dropped:
            del steps[old]
        if len(self._jobs) > JOBS_MAX:
            idle = min(self._jobs, key=lambda j: max(c.touched_at for c in self._jobs[j].values()))
            del self._jobs[idle]
        return collection, dropped

    def placed(
        self,
        job: str,
        step: int,
        *,
        world_size: int,
        rank: int,
        node: Ref,
        state_bytes: int,
        oldest_step: int,
        now: float,
    ) -> None:
        """A rank has begun to replicate a step; of those below `oldest_step` it will report no more."""
        collection, _ = self._collection(job, step, world_size, now)
        collection.placed_bytes[rank] = state_bytes
        collection.placed_on[rank] = node
        for older, past in self._jobs[job].items():
            if older < oldest_step:
                past.placed_bytes.pop(rank, None)

    def stopped(self, node: Ref) -> None:
        """The data process of a node is gone: what it was at work on is not sent, unless the next one says so."""
        for steps in self._jobs.values():
            for collection in steps.values():
                for rank in [rank for rank, on in collection.placed_on.items() if on == node]:
                    collection.placed_bytes.pop(rank, None)

    def absent(self, job: str, step: int, is_live: Callable[[AnyRef], bool]) -> list[int]:
        """Ranks that neither reported a step nor are at work on it, as far as this leader knows: a few of them.

        `is_live` says whether a node is still in that life: what an earlier one was at work on is not sent any more,
        unless its next life says so.
        """
        collection = self._jobs.get(job, {}).get(step)
        if collection is None:
            return []
        absent = (
            rank
            for rank in range(collection.world_size)
            if rank not in collection.reports
            and (rank not in collection.placed_bytes or not is_live(collection.placed_on[rank]))
        )
        return list(islice(absent, ABSENT_SHOWN_MAX))

    def report(
        self,
        job: str,
        step: int,
        world_size: int,
        record: rpb.RankRecord,
        now: float,
        digests: Digests | None = None,
    ) -> list[int]:
        """A rank is replicated. Returns older steps that are given up because too many are under way.

        `digests` are what it found in a state that all ranks should hold alike.

        Raises:
            WorldSizeConflictError: other ranks of the step reported another world size.
        """
        collection, dropped = self._collection(job, step, world_size, now)
        if collection.world_size != world_size:
            if collection.reports and record.session < max(r.session for r in collection.reports.values()):
                raise WorldSizeConflictError(
                    f"step {step} of job {job} is being saved with world size {collection.world_size}, "
                    f"not {world_size}"
                )
            collection.world_size = world_size
            collection.reports.clear()
        known = collection.reports.get(record.rank)
        if known != record and (known is None or known.session <= record.session):
            collection.reports[record.rank] = record
            collection.digests[record.rank] = digests or {}
            collection.progress_at = now
            collection.broken = False
        return dropped

    def next_commit(self, job: str, now: float) -> Collection | None:
        """The complete step that may be proposed now."""
        for _, collection in sorted(self._jobs.get(job, {}).items()):
            if collection.complete:
                return collection
            if collection.holds_up(now):
                return None
        return None

    def committed(self, job: str, step: int) -> list[int]:
        """A step was committed; returns the older ones, whose place it has taken. All are forgotten."""
        steps = self._jobs.get(job, {})
        superseded = [old for old in sorted(steps) if old < step]
        for old in [*superseded, step]:
            steps.pop(old, None)
        self._forget_empty(job)
        return superseded

    def reported(self, job: str, step: int, rank: int) -> rpb.RankRecord | None:
        """What the rank has reported of a step that is under way."""
        collection = self._jobs.get(job, {}).get(step)
        return None if collection is None else collection.reports.get(rank)

    def drop(self, job: str, step: int, ranks: Iterable[int]) -> None:
        """These ranks' reports of a step do not hold: they have to come again."""
        collection = self._jobs.get(job, {}).get(step)
        for rank in ranks if collection else ():
            assert collection is not None
            collection.reports.pop(rank, None)

    def opened(self, job: str, rank: int, session: int) -> list[int]:
        """A new process took a rank's place: its predecessor's reports are void. Returns their steps."""
        voided = []
        for step, collection in sorted(self._jobs.get(job, {}).items()):
            report = collection.reports.get(rank)
            if report is not None and report.session < session:
                del collection.reports[rank]
                collection.broken = True
                voided.append(step)
            collection.placed_bytes.pop(rank, None)
            if not collection.reports and not collection.placed_bytes:
                del self._jobs[job][step]
        self._forget_empty(job)
        return voided

    def recheck(
        self, job: str, check: Callable[[int, int, rpb.RankRecord], log_pb2.RegistryResult | None]
    ) -> list[tuple[int, int, log_pb2.RegistryResult]]:
        """Drop what `check(step, world_size, record)` refuses of a job; returns (step, rank, refusal) of each."""
        dropped = []
        for step, collection in self._jobs.get(job, {}).items():
            for rank, record in list(collection.reports.items()):
                if refusal := check(step, collection.world_size, record):
                    del collection.reports[rank]
                    dropped.append((step, rank, refusal))
        return dropped

    def jobs(self) -> list[str]:
        """Jobs with steps under way."""
        return list(self._jobs)

    def under_way(self, job: str, now: float) -> list[Collection]:
        """Steps to show as replicating, oldest first."""
        steps = sorted(self._jobs.get(job, {}).items())
        return [collection for _, collection in steps if now - collection.touched_at < SHOWN_S]

    def late(self, job: str, now: float) -> list[int]:
        """Ranks that have reported no step under way, or else those that the newest waits for: a few of them."""
        steps = [step for step in self.under_way(job, now) if step.reports]
        if not steps:
            return []

        def missing(of: list[Collection]) -> list[int]:
            ranks = range(max(step.world_size for step in of))
            found = (rank for rank in ranks if not any(rank in step.reports for step in of))
            return list(islice(found, ABSENT_SHOWN_MAX))

        return missing(steps) or missing(steps[-1:])

    def expire(self, now: float) -> None:
        """Forget what nobody reports or places any more."""
        for job, steps in list(self._jobs.items()):
            for step, collection in list(steps.items()):
                if now - collection.touched_at >= SHOWN_S:
                    del steps[step]
            self._forget_empty(job)

    def clear(self) -> None:
        """Leadership is lost: forget everything."""
        self._jobs.clear()

    def _forget_empty(self, job: str) -> None:
        if not self._jobs.get(job, True):
            del self._jobs[job]
