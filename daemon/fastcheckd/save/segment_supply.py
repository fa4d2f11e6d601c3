"""The memory of ranks' steps: what each has set aside ahead of its saves, and what gives way where it is short.

A rank's segments are in use by its steps, lent to its trainer, or spare. One that no step needs any more is set aside
again for the same session, and lent as soon as the trainer may have one more step under way. Segments of a session that
is over are never used again: its process may still write to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError, JobBudgetError, OverBudgetError, StoreError, StoreFullError
from ..store.replica_store import ReplicaStore
from ..store.retention import Kept
from ..store.segments import Segment, rounded
from ..tasks import to_its_end
from ..view import ViewFollower
from .backlog import Backlog
from .committed_steps import Committed
from .contract import LEAN_SEGMENTS, Contract, Demand, Holding, advice, settle, whole_bytes
from .given_up import GivenUp
from .rank_state import RankState
from .session import TrainerSession

logger = logging.getLogger(__name__)

#: How long a trainer waits for memory that older steps are just about to give back.
ROOM_WAIT_S = 0.25

Rank = tuple[str, int]


class SegmentSupply:
    """Of one data process. Owned by the event loop's thread, but for `_give_up_older`.

    Args:
        ranks: all that are known here.
        short_of_room: ranks for whose copies a holder had no room, as it becomes known.
    """

    def __init__(
        self,
        *,
        config: Config,
        store: ReplicaStore,
        view: ViewFollower,
        counters: Counters,
        ranks: Mapping[Rank, RankState],
        short_of_room: set[Rank],
    ) -> None:
        self._config = config
        self._store = store
        self._view = view
        self._counters = counters
        self._ranks = ranks
        self._short_of_room = short_of_room
        #: Newest committed step of each job by the view that the store was last tidied up by.
        self._tidied: dict[str, int] = {}
        self._tidying = asyncio.Event()

    # --- contracts -------------------------------------------------------------------------------

    def reserve(self, rank: RankState, state_bytes: int, record_bytes: int) -> None:
        """Settle what a rank has set aside, or settle it anew where its states have grown. Nothing is allocated yet.

        Raises:
            OverBudgetError, JobBudgetError: not even the least fits. The numbers are in the message.
        """
        config = self._config
        if state_bytes > config.ram_budget_bytes:
            raise OverBudgetError(
                f"this rank's state has {state_bytes} bytes, but node {config.node_id} may use only "
                f"{config.ram_budget_bytes}: raise ram_budget_bytes"
            )
        if 0 < self._store.job_budget_bytes < state_bytes:
            rank.state_bytes = max(rank.state_bytes, state_bytes)
            self._counters.add("job_budget_refused")
            raise JobBudgetError(
                f"a step of this rank has {state_bytes} bytes, and one job may have {self._store.job_budget_bytes} on "
                f"this node; {self.advice(rank.job)}"
            )
        segment_bytes = rounded(state_bytes + record_bytes)
        if rank.contract is not None and segment_bytes <= rank.contract.segment_bytes:
            return
        before, rank.state_bytes = rank.state_bytes, state_bytes
        try:
            try:
                self._check_least(rank, segment_bytes)
            except (OverBudgetError, JobBudgetError):
                self._settle_others(rank)
                self._check_least(rank, segment_bytes)
        except (OverBudgetError, JobBudgetError) as error:
            if isinstance(error, JobBudgetError):
                self._counters.add("job_budget_refused")
            rank.state_bytes = before
            raise
        rank.contract = self._settle(rank, segment_bytes)
        # What is too small would only be in the way.
        self._shed(rank, [s for s in rank.spare if s.size_bytes < segment_bytes])
        self._settle_others(rank)
        contract = rank.contract
        logger.info(
            "rank %d of job %s has %d segments of %d bytes set aside here%s",
            rank.rank, rank.job, contract.segments, contract.segment_bytes,
            ", the least that will do: older steps are kept as differences" if contract.lean else "",
        )  # fmt: skip

    def _settle(self, rank: RankState, segment_bytes: int) -> Contract:
        in_flight = rank.stream.in_flight if rank.stream is not None else self._config.max_in_flight
        return settle(
            (self._demand(rank, ""), self._demand(rank, rank.job)),
            segment_bytes,
            keep_steps=self._config.keep_steps,
            in_flight=in_flight,
        )

    def _settle_others(self, newcomer: RankState) -> None:
        """A rank has come: where there is not room for all, none keeps more than the least."""
        for rank in self._ranks.values():
            if rank is newcomer or rank.contract is None or rank.contract.lean:
                continue
            contract = self._settle(rank, rank.contract.segment_bytes)
            if contract.lean:
                rank.contract = contract
                self._shed(rank, list(rank.spare))
                if rank.stream is not None:
                    rank.stream.tell_reserved(contract.message(self.offered(rank)))

    def _shed(self, rank: RankState, segments: Iterable[Segment]) -> None:
        for segment in segments:
            rank.spare.remove(segment)
            self._store.discard(segment)

    def _demand(self, rank: RankState, job: str) -> Demand:
        """What counts against the node's budget, or against that of a job.

        What ranks of other nodes will have here is not known at a job's first save: as much as this node's ranks have
        there, if the job has ranks elsewhere.
        """
        ranks = [each for each in self._ranks.values() if job in {"", each.job}]
        own_bytes = sum(each.state_bytes for each in ranks)
        of_job = [each for each in ranks if each.job == rank.job and each.state_bytes]
        world_size = rank.stream.world_size if rank.stream is not None else len(of_job)
        elsewhere = world_size > len(of_job)
        expected = self._config.tolerate * sum(each.state_bytes for each in of_job) if elsewhere else 0
        return Demand(
            budget_bytes=self._store.job_budget_bytes if job else self._config.ram_budget_bytes,
            own_bytes=own_bytes,
            others_bytes=sum(e.contract.bytes for e in ranks if e is not rank and e.contract is not None),
            copies_bytes=max(expected, self._copies_bytes(job)),
        )

    def _copies_bytes(self, job: str) -> int:
        """Of one step of each rank of another node of which something is held here."""
        replicas = {
            (held.key.job, held.key.rank, held.key.shard): held.manifest.bytes
            for held in self._store.held(job)
            if held.kind == pb.REPLICA_KIND_COPY
        }
        return sum(replicas.values())

    def _check_least(self, rank: RankState, segment_bytes: int) -> None:
        """Refuse a rank that does not fit beside what is in use for others: its own older steps will go."""
        least = LEAN_SEGMENTS * segment_bytes
        own = self._own_bytes(rank)
        usage = self._store.usage()
        others = max(0, usage.used_bytes - usage.free_bytes - own)
        words = f"this rank needs {LEAN_SEGMENTS} segments of {segment_bytes} bytes, for its newest step and the next;"
        if others + least > usage.budget_bytes:
            raise OverBudgetError(
                f"{words} {others} of the RAM budget of {usage.budget_bytes} bytes are others'; {self.advice()}"
            )
        budget = self._store.job_budget_bytes
        others = max(0, self._store.job_bytes().get(rank.job, 0) - own)
        if budget and others + least > budget:
            raise JobBudgetError(
                f"{words} job {rank.job!r} has {others} of the {budget} bytes that one job may have on this node "
                f"in use otherwise; {self.advice(rank.job)}"
            )

    def _own_bytes(self, rank: RankState) -> int:
        lent = list(rank.stream.held.values()) if rank.stream is not None else []
        under_way = [save.segment for save in rank.saves if not save.done]
        segments = {segment: segment.size_bytes for segment in (*rank.spare, *lent, *under_way)}
        published = 0
        for held in self._store.held(rank.job):
            if held.kind == pb.REPLICA_KIND_OWNER and held.key.rank == rank.rank:
                if held.segment is not None:
                    segments[held.segment] = held.segment.size_bytes
                else:
                    published += held.stored_bytes
        return sum(segments.values()) + published

    def is_lean(self, rank: RankState) -> bool:
        """Whether memory is short for this rank: by its contract, or by what has come to be held here since."""
        if rank.contract is not None and rank.contract.lean:
            return True
        if (rank.job, rank.rank) in self._short_of_room:
            return True
        return self.is_short(rank.job)

    def is_short(self, job: str) -> bool:
        """Whether the node, or the job here, has no room to keep every step as it is: neither own ones nor copies."""
        for name in ("", job):
            budget = self._store.job_budget_bytes if name else self._config.ram_budget_bytes
            step_bytes = self._saved_by(name) + self._copies_bytes(name)
            if budget and budget < whole_bytes(step_bytes, keep_steps=self._config.keep_steps):
                return True
        return False

    def _saved_by(self, job: str) -> int:
        """What the ranks of a job here, or of all, save per step."""
        return sum(rank.state_bytes for rank in self._ranks.values() if job in {"", rank.job})

    def advice(self, job: str = "") -> str:
        """For whoever was refused: the budgets that would do and who has the memory, of all jobs or of one."""
        config, store = self._config, self._store
        return advice(
            self._saved_by(job),
            tolerate=config.tolerate,
            keep_steps=config.keep_steps,
            budget_bytes=store.job_budget_bytes if job else config.ram_budget_bytes,
            holdings=self._holdings(job),
            job=job,
        )

    def _holdings(self, job: str) -> list[Holding]:
        """What each job has here, or the one that is named."""
        kept = self._view.kept_steps()
        uncommitted: Counter[str] = Counter()
        copies: Counter[str] = Counter()
        for held in self._store.held(job):
            if held.kind == pb.REPLICA_KIND_COPY:
                copies[held.key.job] += held.stored_bytes
            elif held.key.step not in kept.get(held.key.job, ()):
                uncommitted[held.key.job] += held.stored_bytes
        return [
            Holding(name, size, uncommitted[name], copies[name])
            for name, size in self._store.job_bytes().items()
            if job in {"", name}
        ]

    # --- lending ---------------------------------------------------------------------------------

    def replenish(self, rank: RankState) -> None:
        """See to it, in the background, that a rank has what its contract says, and its trainer what it may fill."""
        if rank.stream is None or rank.stream.over or rank.contract is None:
            return
        self._lend(rank)
        if rank.supplying is None or rank.supplying.done():
            rank.supplying = asyncio.create_task(self._replenish(rank), name=f"supply-{rank.job}-{rank.rank}")

    async def _replenish(self, rank: RankState) -> None:
        try:
            while (stream := rank.stream) is not None and not stream.over and self._is_short(rank):
                async with rank.allocating:
                    self._set_aside(rank, stream, await self._allocate(rank, stream))
                self._lend(rank)
        except FastCheckdError as error:
            # It is needed at the next save but this one, or later: then somebody waits for it, and is told.
            logger.info("no further segment for rank %d of job %s yet: %s", rank.rank, rank.job, error)

    def _is_short(self, rank: RankState) -> bool:
        """Whether fewer segments are set aside or in use for the rank than its contract says."""
        return rank.contract is not None and self._in_use(rank) < rank.contract.segments

    def _may_have_more(self, rank: RankState) -> bool:
        """The same, where steps that wait for a registry or for other ranks do not count."""
        idle = len(rank.given_up) + sum(save.provisional for save in rank.saves)
        return rank.contract is not None and self._in_use(rank) - idle < rank.contract.segments

    def _in_use(self, rank: RankState) -> int:
        return self._store.count_segments(rank.pool) - len(self._store.free_segments(rank.pool))

    async def _allocate(self, rank: RankState, stream: TrainerSession, wait_s: float = 0.0) -> Segment:
        """A segment, the one that was free for longest if there is one. To be called with `allocating` held."""
        assert rank.contract is not None
        allocate = partial(self._store.allocate, rank.contract.segment_bytes, rank.pool, wait_s=wait_s)
        # What was made for a request that another one has replaced is as good for that.
        return await to_its_end(allocate, undo=partial(self._set_aside, rank, stream))

    def _set_aside(self, rank: RankState, stream: TrainerSession, segment: Segment) -> None:
        """A segment of the stream's session is spare, unless the session is over."""
        if rank.session == stream.number and not stream.over:
            rank.spare.append(segment)
        else:
            self._store.discard(segment)

    def _lend(self, rank: RankState) -> None:
        stream = rank.stream
        if stream is None or stream.over:
            return
        while rank.spare and len(stream.held) + stream.sealing + len(rank.under_way()) < stream.in_flight:
            stream.offer(rank.spare.pop(0))

    def offered(self, rank: RankState) -> int:
        """Segments that a trainer has before its first save, once the contract's memory is there."""
        assert rank.contract is not None and rank.stream is not None
        return min(rank.stream.in_flight, rank.contract.segments)

    def take_back(self, rank: RankState, stream: TrainerSession, segment: Segment) -> None:
        """A segment that the trainer will not seal, and does not write to any more."""
        fits = rank.contract is not None and segment.size_bytes >= rank.contract.segment_bytes
        if rank.session == stream.number and not stream.over and fits:
            rank.spare.append(segment)
        else:
            self._store.discard(segment)
        self.replenish(rank)

    def let_go(self, rank: RankState, *, discard: bool) -> None:
        """Nothing is set aside for the rank any more; without `discard` the memory stays warm until it is needed."""
        for segment in rank.spare:
            (self._store.discard if discard else self._store.release)(segment)
        rank.spare.clear()

    # --- a save that waits -----------------------------------------------------------------------

    async def lend_for(
        self, rank: RankState, stream: TrainerSession, step: int | None, gives_way: GiveWay
    ) -> None:
        """Lend a segment to a trainer that has none for a step; where memory is short, older steps make room for it.

        A step that is under way gives room when it is committed, and is waited for. Provisional steps are not: they may
        have more memory than the contract says, while there is some, and are given up for newer ones when there is not.

        Raises:
            OverBudgetError, JobBudgetError, StoreFullError: nothing can give way.
        """
        contract = rank.contract
        assert contract is not None
        newer_step = -1 if step is None else step
        if not self._store.free_segments(rank.pool) and not rank.spare:
            await self._until_tidy(rank.job, gives_way.committed.newest_seen(rank.job))
        while not stream.over and not stream.holds(contract.segment_bytes):
            if rank.spare:
                stream.offer(rank.spare.pop(0))
                return
            if not self._may_have_more(rank) and (under_way := len(rank.under_way())):
                await gives_way.backlog.wait_below(
                    rank, under_way, newer_step, ready=lambda: bool(rank.spare) or self._may_have_more(rank)
                )
                continue
            # Without any segment yet there is nothing that could come back.
            wait_s = ROOM_WAIT_S if self._store.count_segments(rank.pool) else 0.0
            try:
                # One after the other: who asks again after a deadline finds what the first attempt has made.
                async with rank.allocating:
                    if rank.spare or stream.holds(contract.segment_bytes) or stream.over:
                        continue
                    self._set_aside(rank, stream, await self._allocate(rank, stream, wait_s))
            except (OverBudgetError, StoreFullError) as error:
                if not await self._make_room(rank, newer_step, gives_way):
                    raise self._explained(rank, error) from None

    def _explained(self, rank: RankState, error: FastCheckdError) -> FastCheckdError:
        if isinstance(error, JobBudgetError):
            self._counters.add("job_budget_refused")
            return JobBudgetError(f"{error}; {self.advice(rank.job)}")
        if isinstance(error, OverBudgetError):
            return OverBudgetError(f"{error}; {self.advice()}")
        return error

    async def _make_room(self, rank: RankState, newer_step: int, gives_way: GiveWay) -> bool:
        """Have something of the rank give way to a newer step; whether anything may have."""
        waiting = rank.droppable()
        for old in rank.uncommittable():
            await gives_way.backlog.give_up(rank, old, newer_step)
        if await gives_way.given_up.rule_out_for_room(rank):
            return True
        if await gives_way.given_up.drop_of_earlier_sessions(rank):
            return True
        if len(waiting) >= 2:
            await gives_way.backlog.give_up(rank, waiting[0], waiting[-1].key.step)
            return True
        if under_way := len(rank.under_way()):
            await gives_way.backlog.wait_below(rank, under_way, newer_step)
            return True
        newest = gives_way.committed.newest(rank.job)
        return await asyncio.to_thread(self._give_up_older, rank.job, rank.rank, newest)

    def tidied(self, jobs: Mapping[str, Kept]) -> None:
        """What the registry does not keep any more has been dropped here."""
        self._tidied = {name: max(kept.steps) for name, kept in jobs.items() if kept.steps}
        self._tidying.set()
        self._tidying = asyncio.Event()
        for rank in self._ranks.values():
            self.replenish(rank)

    async def _until_tidy(self, job: str, committed: int) -> None:
        """Step `committed` is committed; soon a view says so, and the warm memory of an older one is free."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_WAIT_S):
                while self._tidied.get(job, -1) < committed:
                    await self._tidying.wait()

    def _give_up_older(self, job: str, rank: int, newest: int) -> bool:
        """Drop the rank's own bytes of steps before `newest`, the newest committed one; whether memory comes back.

        The last resort: without it no step could be saved any more. Their copies at the holders stay. Blocks.
        """
        own = sorted(
            (h for h in self._store.held(job) if h.kind == pb.REPLICA_KIND_OWNER and h.key.rank == rank),
            key=lambda h: h.key.step,
        )
        older = [h for h in own if h.key.step < newest]
        if not older or not any(h.key.step == newest for h in own):
            return False
        # Up to the first that has a segment: what is in slots alone may be too little.
        last = next((h.key.step for h in older if h.segment is not None), older[-1].key.step)
        logger.warning(
            "no room for another step of rank %d of job %r: its steps up to %d stay at their holders alone",
            rank, job, last,
        )  # fmt: skip
        try:
            for held in [h for h in older if h.key.step <= last]:
                self._store.drop(held)
        except StoreError as error:
            logger.warning("and cannot be dropped here: %s", error)
            return False
        self._counters.add("own_steps_dropped")
        return True


class GiveWay:
    """What may give way to a newer step, and how that is done."""

    def __init__(self, backlog: Backlog, given_up: GivenUp, committed: Committed) -> None:
        self.backlog = backlog
        self.given_up = given_up
        self.committed = committed
