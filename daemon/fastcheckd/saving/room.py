"""The saves of this node's trainers: who may save, how many at once, and what becomes of them.

Bounds the steps under way per rank. A trainer waits only when the bound is reached, and never for a
step that cannot go forward: that one is given up for the newer. It does not wait for provisional steps either:
the newest few of them are kept until there is a registry again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..counters import Counters
from ..durations import Durations
from ..errors import (
    FastCheckdError,
    FencedError,
    IncarnationOverError,
    InvalidRequestError,
    JobBudgetError,
    NoQuorumError,
    NotHeldError,
    NotNewerError,
    OverBudgetError,
    StoreError,
    StoreFullError,
    SupersededError,
)
from ..identity import Identity
from ..registry.client import RegistryClient
from ..registry.owners import LOCAL
from ..store.replica_store import ReplicaStore
from ..store.retention import PROVISIONAL_KEPT
from ..store.segments import Segment, staging_pool
from ..tasks import to_its_end
from ..view import ViewFollower
from .committed import Committed
from .content import NOTHING
from .given_up import GivenUp
from .memory import ROOM_WAIT_S, StepMemory
from .of_rank import RankSaves
from .outcomes import Outcomes
from .progress import JobProgress, job_progress
from .replicate import Replicator
from .resuming import left_over
from .rhythm import RANKS_MAX
from .save import Save, SaveKey

logger = logging.getLogger(__name__)

#: How often a waiting BeginSave looks whether the step before it has stalled.
STALL_CHECK_S = 0.25
#: How long a newer step waits until a given-up one has let go of its memory.
GIVE_UP_PATIENCE_S = 2.0
OPEN_TIMEOUT_S = 5.0
#: How long a trainer's question about a save waits for a restarted process to know its own past.
RESUME_PATIENCE_S = 20.0
#: A segment that its trainer has not sealed for so long will not be sealed any more.
RESERVED_S_MAX = 900.0


class SavingRoom:
    """All saves of one data process, keyed by job and rank. Owned by the event loop's thread."""

    def __init__(
        self,
        *,
        config: Config,
        identity: Identity,
        store: ReplicaStore,
        registry: RegistryClient,
        view: ViewFollower,
        counters: Counters,
        durations: Durations,
        replicator: Replicator,
    ) -> None:
        self._config = config
        self._identity = identity
        self._store = store
        self._registry = registry
        self._view = view
        self._counters = counters
        self._durations = durations
        self._replicator = replicator
        self._ranks: dict[tuple[str, int], RankSaves] = {}
        self._committed = Committed(store, view)
        self._outcomes = Outcomes(counters)
        self._reserved: dict[str, Save] = {}
        self.memory = StepMemory(
            config=config, store=store, view=view, counters=counters, short_of_room=replicator.short_of_room
        )
        self._given_up = GivenUp(
            identity=identity, store=store, registry=registry, view=view, silence=replicator.silence
        )
        #: Set once the steps that an earlier life of this process staged are under way again.
        self._resumed = asyncio.Event()

    @property
    def replicating(self) -> bool:
        """Whether the copies of a save are being made. May be asked from any thread.

        One that cannot go on for want of a registry or of holders moves no bytes.
        """
        # Copies of lists: the event loop changes them meanwhile.
        return any(
            save.state < tpb.SAVE_STATE_REPLICATED and save.stalled_because is None
            for rank in list(self._ranks.values())
            for save in list(rank.saves)
        )

    def _of(self, job: str, rank: int) -> RankSaves:
        if (saves := self._ranks.get((job, rank))) is None:
            saves = self._ranks[job, rank] = RankSaves(job, rank)
        return saves

    @property
    def seats(self) -> int:
        """Places of ranks in jobs that were taken through this process."""
        return len(self._ranks)

    def progress(self) -> list[JobProgress]:
        """How far each job has come here."""
        return job_progress(
            {rank: known.saves for rank, known in self._ranks.items()},
            newest=self._committed.newest,
            committed_at=self._committed.seen_at,
            interval_s=self._replicator.rhythm.interval_s,
            now=time.monotonic(),
        )

    def reports(self) -> list[peer_pb2.JobSaves]:
        """How the saves of each job go here."""
        stalled = {
            job: why
            for (job, _), saves in self._ranks.items()
            for save in saves.under_way()[:1]
            if (why := save.stalled_because) is not None
        }
        return self._outcomes.reports(self.progress(), stalled)

    # --- sessions --------------------------------------------------------------------------------

    def job_of(self, save_id: str) -> str | None:
        """The job of a save that is not sealed yet; None: it is not known."""
        save = self._reserved.get(save_id)
        return None if save is None else save.key.job

    def is_reserved(self, save_id: str) -> bool:
        """Whether a save's memory is still its trainer's to fill."""
        return save_id in self._reserved

    async def open_session(self, request: tpb.OpenSessionRequest, identity: str = LOCAL) -> int:
        """Take a rank's place in a job at the registry; whatever an older process left unsealed here goes."""
        while True:
            await self._identity.until_known(OPEN_TIMEOUT_S)
            asked = rpb.OpenRankRequest(
                job=request.job,
                rank=request.rank,
                world_size=request.world_size,
                client_id=request.client_id,
                node=self._identity.ref(),
                identity=identity,
                again=request.again,
                loads=request.loads,
                renews=request.renews,
            )
            try:
                response = await self._registry.open_rank(asked, timeout_s=OPEN_TIMEOUT_S)
            except IncarnationOverError:
                if not await self._identity.outlives(asked.node):
                    raise
                continue
            await self._admit(request.job, request.rank, response.session)
            return response.session

    async def _check_opened(self, request: tpb.BeginSaveRequest) -> None:
        """Go on if a session is the rank's newest, by what this process knows or else by the registry.

        Sessions are small numbers that anybody can guess: one that nobody opened would fence the rank's next process.

        Raises:
            FencedError: it is not.
            NoQuorumError: the registry does not answer, and nothing here was saved by that session.
        """
        known = self._ranks.get((request.job, request.rank))
        if known is not None and request.session <= known.session:
            self._check_session(known, request.session)
            return
        await self._identity.until_known(OPEN_TIMEOUT_S)
        asked = rpb.OpenRankRequest(
            job=request.job,
            rank=request.rank,
            world_size=request.world_size,
            client_id="who-is-it",
            node=self._identity.ref(),
        )
        try:
            current = await self._registry.current_session(asked, timeout_s=OPEN_TIMEOUT_S)
        except NoQuorumError:
            if not any(
                held.kind == pb.REPLICA_KIND_OWNER
                and (held.key.rank, held.manifest.session) == (request.rank, request.session)
                for held in self._store.held(request.job)
            ):
                raise
            return
        if request.session != current or not current:
            raise FencedError(
                f"session {request.session} does not hold the place of rank {request.rank} of job {request.job!r}: "
                "another process has taken it over, or nobody has opened it"
            )

    async def close_session(self, request: tpb.CloseSessionRequest) -> None:
        """The rank's process is done: the memory that it copied into is not kept for another step of it."""
        await asyncio.to_thread(self._store.retire, request.job, request.rank, request.session + 1)

    async def _admit(self, job: str, rank: int, session: int) -> None:
        """Remember the newest session of a rank; refuse an older one."""
        saves = self._of(job, rank)
        self._check_session(saves, session)
        if session > saves.session:
            saves.begin_session(session)
            self._abandon_reserved(job, rank)
            # In the order in which they were taken: what there are too many of goes from the front.
            self._ranks[job, rank] = self._ranks.pop((job, rank))
            await asyncio.to_thread(self._store.retire, job, rank, session)

    @staticmethod
    def _check_session(saves: RankSaves, session: int) -> None:
        if session < saves.session:
            raise FencedError(
                f"another process has taken over rank {saves.rank} of job {saves.job!r}; this one's saves are refused"
            )

    def forget(self) -> None:
        """Of ranks that do nothing: forget those whose sessions a deletion has ended, and the oldest of too many.

        To be called with each new view. The registry remembers who may save; a process that is told here that its
        save is not known finds a committed one in the store.
        """
        busy = {(save.key.job, save.key.rank) for save in self._reserved.values()}
        idle = [rank for rank, saves in self._ranks.items() if rank not in busy and not saves.busy()]
        gone = [rank for rank in idle if self._view.is_void(rank[0], self._ranks[rank].session)]
        surplus = len(self._ranks) - len(gone) - RANKS_MAX
        if surplus > 0:
            deleted = set(gone)
            gone += [rank for rank in idle if rank not in deleted][:surplus]
        for rank in gone:
            del self._ranks[rank]
            self.memory.forget(rank)
            self._replicator.short_of_room.discard(rank)
        if gone:
            self._committed.forget_except({job for job, _ in self._ranks})
            self._outcomes.forget_except(self._ranks.keys())

    # --- one save --------------------------------------------------------------------------------

    async def begin(self, request: tpb.BeginSaveRequest) -> tuple[Save, float]:
        """Reserve a staging segment; returns the save and the seconds waited for older steps."""
        self._of(request.job, request.rank)  # known from now on, also by what is told of it
        key = SaveKey(request.job, request.rank, request.step)
        with self._outcomes.beginning(key, lambda: self._why_waiting(request)):
            return await self._begin(request, key)

    def _why_waiting(self, request: tpb.BeginSaveRequest) -> str:
        under_way = self._of(request.job, request.rank).under_way()
        if not under_way:
            return "memory is made ready"
        oldest = under_way[0]
        why = f" does not move: {oldest.stalled_because}" if oldest.stalled_because else " is on its way"
        return f"{len(under_way)} older steps are under way, of which {oldest.key.step}{why}"

    async def _begin(self, request: tpb.BeginSaveRequest, key: SaveKey) -> tuple[Save, float]:
        if request.state_bytes > self._config.ram_budget_bytes:
            raise OverBudgetError(
                f"this rank's state has {request.state_bytes} bytes, but node {self._config.node_id} may use only "
                f"{self._config.ram_budget_bytes}: raise ram_budget_bytes"
            )
        began = time.monotonic()
        await self._check_opened(request)
        await self._admit(request.job, request.rank, request.session)
        self._abandon_reserved(request.job, request.rank)  # the trainer came back without sealing it
        self._expire_reserved()
        self._check_newer(request)
        bound = request.max_in_flight or self._config.max_in_flight
        waited_s = await self._wait_for_room(request, bound)
        self._check_newer(request)
        segment = await self._allocate(request)
        saves = self._of(request.job, request.rank)
        if request.session != saves.session:
            self._store.discard(segment)
            self._check_session(saves, request.session)
        save = Save(
            key=key,
            save_id=secrets.token_hex(16),
            session=request.session,
            world_size=request.world_size,
            segment=segment,
            state_bytes=request.state_bytes,
            begun_after=max(request.session + 1, self._view.next_session(request.job)),
        )
        self._durations.add("save_wait", save.begun_at - began)
        self._reserved[save.save_id] = save
        if request.HasField("ahead"):
            save.describe(request.ahead, self._config.chunk_bytes)
        return save, waited_s

    async def _allocate(self, request: tpb.BeginSaveRequest) -> Segment:
        """Memory for a step; where it is short, older provisional steps make room for the newer.

        A step that is under way gives room when it is committed; it is waited for as if no more than that
        might be under way at once.
        """
        rank = (request.job, request.rank)
        self.memory.sized(rank, request.state_bytes)
        if 0 < self._store.job_budget_bytes < request.state_bytes:  # nothing need give way for it
            raise self._too_much(
                request,
                f"step {request.step} has {request.state_bytes} bytes, and one job may have "
                f"{self._store.job_budget_bytes} on this node; ",
            )
        pool = staging_pool(*rank, request.session)
        if not self._store.free_segments(pool):
            await self.memory.until_tidy(request.job, self._committed.newest_seen(request.job))
        while True:
            # Without any segment yet there is nothing that could come back.
            wait_s = ROOM_WAIT_S if self._store.count_segments(pool) else 0.0
            allocate = partial(self._store.allocate, request.state_bytes, pool, wait_s=wait_s)
            try:
                # One after the other: who asks again after a deadline finds what the first attempt has made.
                async with self._of(*rank).allocating:
                    return await to_its_end(allocate, undo=self._store.release)
            except (OverBudgetError, StoreFullError) as error:
                saves = self._of(*rank)
                waiting = saves.droppable()
                for old in saves.uncommittable():
                    await self._give_up(old, request.step)
                if await self._given_up.rule_out_for_room(
                    saves
                ) or await self._given_up.drop_of_earlier_sessions(saves):
                    continue
                if len(waiting) >= 2:
                    await self._give_up(waiting[0], waiting[-1].key.step)
                elif under_way := len(saves.under_way()):
                    await self._wait_for_room(request, under_way)
                elif await asyncio.to_thread(
                    self.memory.give_up_older, *rank, self._committed.newest(request.job)
                ):
                    continue
                elif isinstance(error, JobBudgetError):
                    raise self._too_much(request, f"{error}; ") from None
                elif isinstance(error, OverBudgetError):
                    raise OverBudgetError(f"{error}; {self.memory.advice()}") from None
                else:
                    raise

    def _too_much(self, request: tpb.BeginSaveRequest, why: str) -> JobBudgetError:
        """The job may not have so much memory here."""
        self._counters.add("job_budget_refused")
        return JobBudgetError(why + self.memory.advice(request.job))

    def _abandon_reserved(self, job: str, rank: int) -> None:
        for save in [s for s in self._reserved.values() if (s.key.job, s.key.rank) == (job, rank)]:
            self.abandon(save.save_id)

    def _expire_reserved(self) -> None:
        for save in [s for s in self._reserved.values() if s.idle_s() > RESERVED_S_MAX]:
            logger.warning("%s was reserved but never sealed; removing its segment", save.key)
            self.abandon(save.save_id, may_be_copied_into=True)

    def _check_newer(self, request: tpb.BeginSaveRequest) -> None:
        newest = self._committed.newest(request.job)
        # Where steps were deleted that an older view still shows, the registry says when it is asked for a place.
        if request.step <= newest and self._view.speaks_of(request.job, request.session):
            raise NotNewerError(
                f"step {request.step} of job {request.job!r} is not newer than its newest committed step {newest}; "
                "save a later step, or use another job name for a run of its own"
            )
        for save in self._of(request.job, request.rank).saves:
            if not save.done and save.key.step >= request.step:
                raise NotNewerError(
                    f"step {save.key.step} is already under way; step {request.step} comes too late"
                )

    async def _wait_for_room(self, request: tpb.BeginSaveRequest, bound: int) -> float:
        """Wait until fewer than `bound` steps of the rank are under way; returns the seconds that it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        waited = False
        saves = self._of(request.job, request.rank)
        while len(under_way := saves.under_way()) >= bound:
            oldest = under_way[0]
            patience_s = 0.0 if saves.starved else self._config.stall_after_s
            if oldest.stalled_because is not None and oldest.idle_s() > patience_s:
                saves.starved = True
                await self._give_up(oldest, request.step)
                continue
            waited = True
            self._replicator.rhythm.awaited((request.job, request.rank), loop.time())
            done = asyncio.create_task(oldest.until_done())
            await asyncio.wait({done}, timeout=STALL_CHECK_S)
            done.cancel()
        if not waited:
            return 0.0
        self._counters.add("save_waits")
        return loop.time() - started

    async def _give_up(self, save: Save, newer_step: int) -> None:
        self._supersede(save, newer_step)
        if save.task is not None:
            # Then its memory is free for the newer one.
            await asyncio.wait({save.task}, timeout=GIVE_UP_PATIENCE_S)

    def _supersede(self, save: Save, newer_step: int) -> None:
        logger.warning("%s given up for step %d: %s", save.key, newer_step, save.stalled_because)
        self._counters.add("saves_superseded")
        if not save.reported:
            self._of(save.key.job, save.key.rank).obsolete.append(save.key.step)
        kind = "provisional step" if save.provisional else "step"
        self._finish(
            save, SupersededError(f"{kind} given up for step {newer_step}, because: {save.stalled_because}")
        )
        if save.task is not None:
            save.task.cancel()

    def _note_provisional(self, save: Save) -> None:
        """One more: the newest few are kept, older ones are given up for them."""
        self._counters.add("saves_provisional")
        saves = self._of(save.key.job, save.key.rank)
        saves.starved = False
        for old in saves.too_many():
            self._supersede(old, save.key.step)

    def abandon(self, save_id: str, *, may_be_copied_into: bool = False) -> None:
        """Give back a segment that will not be sealed; unknown ids are no error.

        `may_be_copied_into`: nobody has said that the copy has ended, so the memory is not used again.
        """
        save = self._reserved.pop(save_id, None)
        if save is None:
            return
        release = self._store.discard if may_be_copied_into else self._store.release
        if save.described is not None:
            save.described.cancel()
        release(save.segment)

    # --- sealed ----------------------------------------------------------------------------------

    async def seal(self, save_id: str, said: tpb.SealSaveRequest | tpb.PushSeal | None) -> Save:
        """The trainer is done writing: replicate and commit. None: the state is as was said when the save began.

        Raises:
            InvalidRequestError: header or layout do not fit the state.
            NotHeldError: the save is not known any more.
        """
        unknown = NotHeldError(
            "this save is not known any more: the daemon restarted, or another process took over the rank"
        )
        save = self._reserved.get(save_id)
        if save is None:
            raise unknown
        if said is not None:
            save.describe(said, self._config.chunk_bytes)
        if (described := save.described) is None:
            raise InvalidRequestError("nothing was said of this state when its save began")
        await asyncio.wait({described})
        if described.cancelled():  # it was given back meanwhile
            raise unknown
        described.result()
        if self._reserved.pop(save_id, None) is not save:
            raise unknown
        self._counters.add("saves_staged")
        self._counters.add("bytes_staged", save.state_bytes)
        self._durations.add("save_copy", time.monotonic() - save.begun_at)
        self._launch(save)
        return save

    def _launch(self, save: Save) -> None:
        """A sealed save is the daemon's: have it replicated and committed."""
        rank = (save.key.job, save.key.rank)
        saves = self._of(*rank)
        saves.attach(save, self._note_provisional)
        self.memory.sized(rank, save.state_bytes)
        save.lean = self.memory.is_lean(rank)
        saves.add(save)
        self.memory.begun(rank, len(saves.under_way()))
        save.sealed_at = time.monotonic()
        self._replicator.rhythm.sealed(rank, save.sealed_at)
        save.moved()
        save.advance(tpb.SAVE_STATE_STAGED)
        self._outcomes.sealed(save.key)
        save.task = asyncio.create_task(self._run(save), name=f"save-{save.key}")
        if saves.making_spares is None or saves.making_spares.done():
            making = asyncio.create_task(self.memory.make_spares(save), name=f"spares-{save.key}")
            saves.making_spares = making

    async def _run(self, save: Save) -> None:
        try:
            await self._replicator.run(save)
            error = None
        except FastCheckdError as failure:
            error = failure
        except asyncio.CancelledError:
            return  # given up, or shutting down: whoever cancelled has settled the save
        except Exception as failure:
            logger.exception("%s failed by a defect", save.key)
            error = FastCheckdError(f"internal error: {failure!r}")
        self._finish(save, error)

    def _finish(self, save: Save, error: FastCheckdError | None) -> None:
        if save.done:
            return
        self._outcomes.ended(save.key, error)
        if error is None:
            self._counters.add("saves_committed")
            saves = self._of(save.key.job, save.key.rank)
            saves.starved = False
            saves.settled(save.key.step)
            self._durations.add("save_replicate", save.replicate_s)
            self._durations.add("save_commit", save.commit_s)
            self._committed.saw(save.key, save.session, time.monotonic())
            save.advance(tpb.SAVE_STATE_COMMITTED)
        else:
            self._counters.add("saves_failed")
            logger.warning("%s not committed: %s", save.key, error)
            may_be_committed = save.reported or (
                isinstance(error, NotNewerError | SupersededError) and not save.provisional
            )
            save.advance(tpb.SAVE_STATE_FAILED, error)
            if may_be_committed:
                self._note_given_up(save)
            else:
                self._drop_own(save.key)
        # Finished saves are kept for a while, and these are large.
        save.content, save.after = NOTHING, None
        if save.task is None or save.task.done() or save.task is asyncio.current_task():
            self._store.release(save.segment)
        else:  # its threads read the bytes, or make them lossy, until it has ended
            save.task.add_done_callback(lambda _: self._store.release(save.segment))

    def _note_given_up(self, save: Save) -> None:
        """Keep the newest few such steps, in case that they are committed after all; have the others ruled out.

        Where memory is short, here or at a holder, all of them are.
        """
        saves = self._of(save.key.job, save.key.rank)
        if save.session != saves.session:
            return  # what is left of it goes as soon as no rank's session is as old
        saves.given_up.append(save.key.step)
        keep = 0 if self.memory.is_lean((saves.job, saves.rank)) else PROVISIONAL_KEPT
        for old in saves.uncommittable(keep):
            self._supersede(old, save.key.step)
        self._given_up.rule_out_beside(saves, keep=keep)

    def _drop_own(self, key: SaveKey) -> None:
        """Forget the owner's bytes of a step that cannot be committed any more.

        Not for one that was reported: the report may still become part of a commit, and then these bytes
        are one of its copies. Once a newer step is committed, retention removes what is not needed.
        """
        own = [
            held
            for held in self._store.held(key.job, key.step)
            if held.kind == pb.REPLICA_KIND_OWNER and held.key.rank == key.rank
        ]

        def drop() -> None:
            for held in own:
                try:
                    self._store.drop(held)
                except StoreError as error:
                    logger.info("%s stays here until a newer step is committed: %s", key, error)

        # In a thread: older steps may have to be led to others.
        asyncio.get_running_loop().run_in_executor(None, drop)

    async def find(self, request: tpb.WatchSaveRequest) -> Save:
        """The save that a trainer follows. A process that was just restarted first looks what its earlier life staged.

        Raises:
            NotHeldError: this process does not know it.
            FencedError: nor need it: a deletion has ended the trainer's session meanwhile.
        """
        save = self._known(request)
        if save is None and self._view.is_void(request.job, request.session):
            raise FencedError(
                f"step {request.step} of rank {request.rank} is not kept: steps of job {request.job!r} were deleted "
                "meanwhile, which ended the sessions of all its trainers; the next save opens a new one"
            )
        if save is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESUME_PATIENCE_S):
                    await self._resumed.wait()
            save = self._known(request)
        if save is None and not self._resumed.is_set():
            raise NotHeldError(
                f"step {request.step} of rank {request.rank}: the daemon restarted and has seen no registry since, so "
                "it does not know yet which steps are under way; what was replicated is kept, and reported later"
            )
        if save is None:
            raise NotHeldError(
                f"step {request.step} of rank {request.rank} is not known here: "
                "the daemon restarted before it was replicated"
            )
        return save

    def _known(self, request: tpb.WatchSaveRequest) -> Save | None:
        saves = self._ranks.get((request.job, request.rank))
        return None if saves is None else saves.find(request.step, request.session)

    async def watch(self, request: tpb.WatchSaveRequest) -> AsyncIterator[tpb.WatchSaveResponse]:
        """Follow a save to its end."""
        try:
            save = await self.find(request)
        except NotHeldError:
            if not self._committed.by_an_earlier_life(request):
                raise
            yield tpb.WatchSaveResponse(state=tpb.SAVE_STATE_COMMITTED)
            return
        async for response in save.watch():
            yield response

    # --- restart and stop ------------------------------------------------------------------------

    def resume(self) -> int:
        """Carry on with staged steps that an earlier life of this process left uncommitted."""
        resumed = 0
        for save in left_over(self._store, self._config.node_id, self._is_over):
            saves = self._of(save.key.job, save.key.rank)
            saves.session = max(saves.session, save.session)
            self._launch(save)
            resumed += 1
        self._resumed.set()
        return resumed

    def _is_over(self, key: SaveKey, session: int) -> bool:
        """Whether a newer step was committed, or the step was deleted and is about to be dropped."""
        newest = self._view.newest_step(key.job)
        return (newest is not None and key.step <= newest) or self._view.is_void(key.job, session)

    async def stop(self) -> None:
        """Cancel what is under way; staged steps with manifests are resumed by the next process."""
        tasks = [task for saves in self._ranks.values() for task in saves.tasks()]
        tasks += [s.task for s in self._reserved.values() if s.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
