"""Rank reports on their way to a commit: the asynchronous shell around `collector`.

A report is answered when its step is committed or it is refused; until then its owner polls. One commit
per job is under way at a time. What is decided here is only which command to propose next.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2

from ..config import Config
from ..errors import InvalidRequestError, NoQuorumError
from .collector import Collection, Collector, WorldSizeConflictError
from .commits import Standing, begun_too_early, check_rank, check_session, newest_load, standing
from .model import State, live, refusal
from .raft.consensus import Consensus
from .shared_state import Digests, describe, disagreements, parts_differ

logger = logging.getLogger(__name__)

Response = registry_pb2.ReportResponse
Result = log_pb2.RegistryResult
Record = registry_pb2.RankRecord

#: Refusals kept for ranks that were not waiting just then.
UNTOLD_MAX = 4096

_COMMITTED = Response(state=registry_pb2.REPORT_STATE_COMMITTED)


def _refused(no: Result) -> Response:
    return Response(
        state=registry_pb2.REPORT_STATE_REFUSED,
        error=pb.ErrorDetail(code=no.code, message=no.message),
        lost_holders=no.lost,
        disagreements=no.disagreements,
    )


def _sessions(state: State, job: str) -> Iterator[tuple[int, int]]:
    seats = state.jobs[job].ranks if job in state.jobs else {}
    return ((rank, seat.session) for rank, seat in seats.items())


def _superseded(job: str, step: int) -> Response:
    return _refused(
        refusal(pb.ERROR_CODE_SUPERSEDED, f"step {step} of job {job} was given up for a newer one")
    )


def _disagreement(job: str, step: Collection) -> Result | None:
    """The refusal of a complete step whose ranks do not hold what they should hold alike."""
    if parts_differ([step.reports[rank] for rank in sorted(step.reports)]):
        return None  # the state machine refuses it, and says why
    found = disagreements({rank: step.digests.get(rank, {}) for rank in step.reports})
    if not found:
        return None
    what = f"step {step.step} of job {job}: {describe(found)}"
    logger.warning("registry: %s", what)
    no = refusal(pb.ERROR_CODE_REPLICAS_DISAGREE, what)
    no.disagreements.extend(found)
    return no


class Reports:
    """The leader's reports under way, and who waits for them."""

    def __init__(self, raft: Consensus, config: Config, *, wall_ms: Callable[[], int] = lambda: 0) -> None:
        """`wall_ms`: the wall clock, for what people are shown; nothing is decided by it."""
        self._raft = raft
        self._config = config
        self._wall_ms = wall_ms
        self.collector = Collector()
        #: At most one waiter per (job, step) and rank: a newer call sends the older one home.
        self._waiters: dict[tuple[str, int], dict[int, asyncio.Future[Response]]] = {}
        self._committing: dict[str, asyncio.Task[None]] = {}
        #: Ranks whose step was refused for what their neighbours hold, between two of their calls: by job, step and
        #: rank, the report and its answer. Nobody else would tell them.
        self._untold: OrderedDict[tuple[str, int, int], tuple[Record, Response]] = OrderedDict()
        #: Since when this voter leads, and the next session of each job then.
        self._leads_since = 0.0
        self._inherited: dict[str, int] = {}
        #: Job → the newest session for a load that was opened since, and when at the latest.
        self._newest_loads: dict[str, tuple[int, float]] = {}

    def leadership_gained(self) -> None:
        """This voter leads, and has applied all that was committed before."""
        self._leads_since = self._now()
        self._inherited = self._raft.read(
            lambda state: {name: known.next_session for name, known in state.jobs.items()}
        )

    def newest_load(self, job: str) -> tuple[int, float]:
        """A job's newest session that loads (0: none), and for how long it has been open at least."""
        session, _ = self._raft.read(lambda state: newest_load(state, job))
        opened, at = self._newest_loads.get(job, (0, 0.0))
        if session == opened:
            return session, self._now() - at
        return session, self._now() - self._leads_since if session < self._inherited.get(job, 0) else 0.0

    async def report(
        self,
        job: str,
        step: int,
        world_size: int,
        record: Record,
        wait_s: float,
        digests: Digests | None = None,
    ) -> Response:
        """Take a (well-formed) record in and wait for the step's end, at most `wait_s`.

        `digests` are what the rank found in a state that all ranks should hold alike.

        Raises:
            NoQuorumError: this voter lost its leadership.
        """
        if (answer := self._raft.read(lambda s: self._early(s, job, step, world_size, record))) is not None:
            return answer
        untold = self._untold.pop((job, step, record.rank), None)
        if untold is not None and untold[0] == record:
            return untold[1]
        try:
            dropped = self.collector.report(job, step, world_size, record, self._now(), digests)
        except WorldSizeConflictError as error:
            return _refused(refusal(pb.ERROR_CODE_WORLD_SIZE, str(error)))
        for old in dropped:
            self._settle(job, old, None, _superseded(job, old))
        self._try_commit(job)
        waiters = self._waiters.setdefault((job, step), {})
        if earlier := waiters.pop(record.rank, None):
            _set(earlier, self._waiting(job, step))
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        waiters[record.rank] = future
        try:
            async with asyncio.timeout(wait_s):
                return await future
        except TimeoutError:
            return self._waiting(job, step)
        finally:
            if waiters.get(record.rank) is future:
                del waiters[record.rank]
            if not waiters and self._waiters.get((job, step)) is waiters:
                del self._waiters[(job, step)]

    def _waiting(self, job: str, step: int) -> Response:
        absent = self._raft.read(
            lambda state: self.collector.absent(job, step, lambda node: live(state, node))
        )
        return Response(state=registry_pb2.REPORT_STATE_WAITING, absent_ranks=absent)

    def _early(self, state: State, job: str, step: int, world_size: int, record: Record) -> Response | None:
        """The answer that needs no waiting, if there is one."""
        rank, session = record.rank, record.session
        now_stands = standing(state.jobs.get(job), step, rank, session, record)
        if now_stands is Standing.COMMITTED:
            return _COMMITTED
        if fenced := check_session(state, job, rank, session, record.owner):
            return _refused(fenced)
        if now_stands is Standing.SUPERSEDED:
            return _superseded(job, step)
        if now_stands is Standing.NOT_NEWER:
            newest = state.jobs[job].newest
            no = refusal(pb.ERROR_CODE_NOT_NEWER, f"step {step} of job {job} is not newer than {newest}")
            return _refused(no)
        early = begun_too_early(state, job, step, record) or check_rank(
            state, job, step, world_size, self._config.tolerate, record
        )
        return None if early is None else _refused(early)

    def opened(self, job: str, rank: int, session: int) -> None:
        """A rank has a new session: what was reported in the one before is void.

        If it is for a load, so is what other ranks began before.
        """
        fenced = _refused(
            refusal(
                pb.ERROR_CODE_FENCED,
                f"another process took the place of rank {rank} of job {job}, or its own loaded again",
            )
        )
        for step in self.collector.opened(job, rank, session):
            self._settle(job, step, [rank], fenced)
        newest, _ = self._raft.read(lambda state: newest_load(state, job))
        if newest > self._newest_loads.get(job, (0, 0.0))[0]:
            self._newest_loads[job] = newest, self._now()
            self._recheck(job)
        self._try_commit(job)

    def ended(self, job: str) -> None:
        """The sessions of all ranks are over: what they reported is void."""
        known = self._raft.read(lambda state: list(_sessions(state, job)))
        for rank, session in known:
            fenced = _refused(
                refusal(
                    pb.ERROR_CODE_FENCED, f"the sessions of job {job} have ended: its newest step was deleted"
                )
            )
            for step in self.collector.opened(job, rank, session):
                self._settle(job, step, [rank], fenced)

    def recheck(self) -> None:
        """Reports may name holders or owners that are gone, or a step be superseded: say so before all ranks are in."""
        for job in self.collector.jobs():
            self._recheck(job)

    def _recheck(self, job: str) -> None:
        tolerate = self._config.tolerate

        def refused(state: State, step: int, world_size: int, record: Record) -> Result | None:
            return begun_too_early(state, job, step, record) or check_rank(
                state, job, step, world_size, tolerate, record
            )

        dropped = self._raft.read(lambda state: self.collector.recheck(job, partial(refused, state)))
        for step, rank, no in dropped:
            self._settle(job, step, [rank], _refused(no))

    def tick(self) -> None:
        """Look for steps that have waited long enough for an older one."""
        self.collector.expire(self._now())
        for job in self.collector.jobs():
            self._try_commit(job)

    def leadership_lost(self) -> None:
        """Leadership is lost: owners have to report to the next leader."""
        self.collector.clear()
        for waiters in self._waiters.values():
            for future in waiters.values():
                if not future.done():
                    future.set_exception(
                        NoQuorumError("this voter has lost the leadership; report to the next leader")
                    )
        self._waiters.clear()
        self._untold.clear()
        self._inherited.clear()
        self._newest_loads.clear()
        for task in self._committing.values():
            task.cancel()
        self._committing.clear()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _try_commit(self, job: str) -> None:
        if job not in self._committing and self.collector.next_commit(job, self._now()) is not None:
            task = asyncio.get_running_loop().create_task(self._commit_all(job))
            self._committing[job] = task
            task.add_done_callback(lambda done: self._done(job, done))

    def _done(self, job: str, task: asyncio.Task[None]) -> None:
        if self._committing.get(job) is task:
            del self._committing[job]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("registry: committing a step of job %s failed", job, exc_info=error)

    async def _commit_all(self, job: str) -> None:
        while (ready := self.collector.next_commit(job, self._now())) is not None:
            proposed = dict(ready.reports)
            try:
                # Before anything is proposed: the log has neither digests nor when saves were begun.
                result = (
                    self._too_early(job, ready)
                    or _disagreement(job, ready)
                    or await self._raft.propose(self._command(job, ready))
                )
            except NoQuorumError as error:
                # Not lost: the reports stay here for the next tick, and their owners repeat them.
                logger.warning("registry: step %d of job %s is not committed yet: %s", ready.step, job, error)
                return
            except InvalidRequestError as error:
                result = refusal(pb.ERROR_CODE_INVALID, str(error))
            self._conclude(job, ready, proposed, result)

    def _too_early(self, job: str, ready: Collection) -> Result | None:
        """The refusal of ranks that began a complete step too early."""
        found = self._raft.read(
            lambda state: [
                no
                for record in ready.reports.values()
                if (no := begun_too_early(state, job, ready.step, record))
            ]
        )
        if not found:
            return None
        ranks = tuple(rank for no in found for rank in no.ranks)
        return refusal(found[0].code, found[0].message, ranks)

    def _command(self, job: str, ready: Collection) -> log_pb2.RegistryCommand:
        record = registry_pb2.StepRecord(
            job=job,
            step=ready.step,
            world_size=ready.world_size,
            ranks=[ready.reports[rank] for rank in sorted(ready.reports)],
        )
        return log_pb2.RegistryCommand(
            commit=log_pb2.StepCommit(
                record=record, tolerate=self._config.tolerate, keep_steps=self._config.keep_steps
            ),
            at_ms=self._wall_ms(),
        )

    def _conclude(self, job: str, step: Collection, proposed: dict[int, Record], result: Result) -> None:
        if result.ok:
            for old in self.collector.committed(job, step.step):
                self._settle(job, old, None, _superseded(job, old))
            self._settle(job, step.step, proposed, _COMMITTED)
            # Others are of a run with more ranks: no part of what was committed is theirs.
            self._settle(job, step.step, None, _superseded(job, step.step))
            return
        # A refusal is about what was proposed. What a new process of the rank has reported meanwhile is tried next.
        reported = {rank: self.collector.reported(job, step.step, rank) for rank in result.ranks or proposed}
        records = {rank: record for rank, record in reported.items() if record in (None, proposed.get(rank))}
        self.collector.drop(job, step.step, records)
        for rank, record in records.items():
            # What a waiter is told is about its own record, not about its neighbours'.
            own = (
                None
                if record is None
                else self._raft.read(
                    lambda s, r=record: self._early(s, job, step.step, step.world_size, r)  # type: ignore[misc]
                )
            )
            waits = rank in self._waiters.get((job, step.step), {})
            if not waits and record is not None and result.code == pb.ERROR_CODE_REPLICAS_DISAGREE:
                self._untold[job, step.step, rank] = (record, own or _refused(result))
                while len(self._untold) > UNTOLD_MAX:
                    self._untold.popitem(last=False)
            self._settle(job, step.step, [rank], own or _refused(result))

    def _settle(self, job: str, step: int, ranks: Iterable[int] | None, response: Response) -> None:
        """Answer those who wait for a step: all, or these ranks."""
        waiters = self._waiters.get((job, step), {})
        for rank in list(waiters) if ranks is None else ranks:
            if future := waiters.pop(rank, None):
                _set(future, response)
        if not waiters:
            self._waiters.pop((job, step), None)


def _set(future: asyncio.Future[Response], response: Response) -> None:
    if not future.done():
        future.set_result(response)
