"""The memory of ranks' steps: warm segments ahead of time, whether there is enough, what gives way when there is not.

Which of the steps under way waits or is given up is decided by the room; here is what lies in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Container, Mapping
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError, StoreError
from ..store.replica_store import ReplicaStore
from ..store.retention import Kept
from ..store.segments import staging_pool
from ..tasks import to_its_end
from ..view import ViewFollower
from .room_needed import Holding, advice, whole_bytes
from .save import Save

logger = logging.getLogger(__name__)

#: How long a trainer waits for memory that older steps are just about to give back.
ROOM_WAIT_S = 0.25
#: Saves of a rank by which is judged how many of them are under way at once.
OVERLAPS_KEPT = 8
SPARES_OFFERED_MAX = 8

Rank = tuple[str, int]


class StepMemory:
    """Of one data process. Owned by the event loop's thread, but for `give_up_older`.

    Args:
        short_of_room: ranks for whose copies a holder had no room, as it becomes known.
    """

    def __init__(
        self,
        *,
        config: Config,
        store: ReplicaStore,
        view: ViewFollower,
        counters: Counters,
        short_of_room: Container[Rank],
    ) -> None:
        self._config = config
        self._store = store
        self._view = view
        self._counters = counters
        self._short_of_room = short_of_room
        #: Size of each rank's newest step, and how many of its steps were under way with each of the last.
        self._state_bytes: dict[Rank, int] = {}
        self._overlaps: dict[Rank, deque[int]] = {}
        #: Newest committed step of each job by the view that the store was last tidied up by.
        self._tidied: dict[str, int] = {}
        self._tidying = asyncio.Event()

    def sized(self, rank: Rank, state_bytes: int) -> None:
        """A rank saves a step of so many bytes."""
        self._state_bytes[rank] = state_bytes

    def forget(self, rank: Rank) -> None:
        """A rank will not save any more, as far as is known."""
        self._state_bytes.pop(rank, None)
        self._overlaps.pop(rank, None)

    def begun(self, rank: Rank, under_way: int) -> None:
        """A rank's step is sealed; with it so many of its steps are under way."""
        self._overlaps.setdefault(rank, deque(maxlen=OVERLAPS_KEPT)).append(under_way)

    def is_lean(self, rank: tuple[str, int]) -> bool:
        """Whether memory is short, for all that is known: what is held of others' last steps will come again."""
        replicas = {
            (held.key.job, held.key.rank, held.key.shard): held.manifest.bytes
            for held in self._store.held()
            if held.kind == pb.REPLICA_KIND_COPY
        }
        step_bytes = sum(self._state_bytes.values()) + sum(replicas.values())
        needed = whole_bytes(step_bytes, keep_steps=self._config.keep_steps)
        if self._config.ram_budget_bytes < needed or rank in self._short_of_room:
            return True
        job, budget = rank[0], self._store.job_budget_bytes
        of_job = self._saved_by(job) + sum(size for (name, _, _), size in replicas.items() if name == job)
        return bool(budget) and budget < whole_bytes(of_job, keep_steps=self._config.keep_steps)

    def _saved_by(self, job: str) -> int:
        """What the ranks of a job here, or of all, save per step."""
        return sum(size for (name, _), size in self._state_bytes.items() if job in {"", name})

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

    async def make_spares(self, save: Save) -> None:
        """Have as many segments as this rank's steps take at once, before they are asked for.

        Those that are kept, unless memory is short, and as many more as are under way at once, by the last saves.

        A trainer that is told of them touches their pages in the background, so that only its first
        save finds cold memory.
        """
        rank = (save.key.job, save.key.rank)
        pool = staging_pool(*rank, save.session)
        wanted = (1 if save.lean else self._config.keep_steps) + max(self._overlaps[rank])
        while not save.done:
            save.offer(tuple(self._store.free_segments(pool)[:SPARES_OFFERED_MAX]))
            usage = self._store.usage()
            needed = usage.used_bytes - usage.free_bytes + 2 * save.state_bytes
            budget = self._store.job_budget_bytes
            job_full = budget and self._store.job_bytes().get(rank[0], 0) + 2 * save.state_bytes > budget
            if self._store.count_segments(pool) >= wanted or needed > usage.budget_bytes or job_full:
                return  # all there, or room is short: leave it to what must be kept
            try:
                allocate = partial(self._store.allocate_new, save.state_bytes, pool)
                segment = await to_its_end(allocate, undo=self._store.release)
            except FastCheckdError as error:
                logger.info("no spare segment: %s", error)
                return
            self._store.release(segment)

    def tidied(self, jobs: Mapping[str, Kept]) -> None:
        """What the registry does not keep any more has been dropped here."""
        self._tidied = {name: max(kept.steps) for name, kept in jobs.items() if kept.steps}
        self._tidying.set()
        self._tidying = asyncio.Event()

    async def until_tidy(self, job: str, committed: int) -> None:
        """Step `committed` is committed; soon a view says so, and the warm memory of an older one is free."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_WAIT_S):
                while self._tidied.get(job, -1) < committed:
                    await self._tidying.wait()

    def give_up_older(self, job: str, rank: int, newest: int) -> bool:
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
