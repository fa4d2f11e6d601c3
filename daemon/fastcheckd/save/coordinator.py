"""The saves of this node's trainers: who may save, what each has reserved, and what becomes of every sealed step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
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
    NoQuorumError,
    NotHeldError,
    NotNewerError,
    StoreError,
    SupersededError,
)
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..registry.model import LOCAL
from ..store.replica_store import ReplicaStore
from ..store.retention import PROVISIONAL_KEPT
from ..store.segments import Segment
from ..view import ViewFollower
from .backlog import Backlog
from .committed_steps import Committed
from .content import NOTHING
from .given_up import GivenUp
from .job_progress import JobProgress, job_progress
from .outcomes import Outcomes
from .rank_state import RankState
from .recovery import left_over
from .replicator import Replicator
from .save import Save, SaveKey
from .save_interval import RANKS_MAX
from .segment_supply import GiveWay, SegmentSupply
from .session import TrainerSession

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
#: How long a trainer's question about a step waits for a restarted process to know its own past.
RESUME_PATIENCE_S = 20.0
#: A trainer may say anything of how long it waited.
WAITED_S_MAX = 3600.0


class SaveCoordinator:
    """All saves of one data process, keyed by job and rank. Owned by the event loop's thread."""

    def __init__(
        self,
        *,
        config: Config,
        identity: NodeLife,
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
        self._ranks: dict[tuple[str, int], RankState] = {}
        self._committed = Committed(store, view)
        self._outcomes = Outcomes(counters)
        self.supply = SegmentSupply(
            config=config, store=store, view=view, counters=counters, ranks=self._ranks,
            short_of_room=replicator.short_of_room,
        )  # fmt: skip
        self._given_up = GivenUp(
            identity=identity, store=store, registry=registry, view=view, silence=replicator.silence
        )
        self._backlog = Backlog(config, counters, replicator.rhythm, self._finish)
        self._gives_way = GiveWay(self._backlog, self._given_up, self._committed)
        #: Set once the steps that an earlier life of this process staged are under way again.
        self._resumed = asyncio.Event()
        self._stopping = False

    # --- reports ---------------------------------------------------------------------------------

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
            for (job, _), rank in self._ranks.items()
            for save in rank.under_way()[:1]
            if (why := save.stalled_because) is not None
        }
        return self._outcomes.reports(self.progress(), stalled)

    # --- sessions --------------------------------------------------------------------------------

    def _of(self, job: str, rank: int) -> RankState:
        if (known := self._ranks.get((job, rank))) is None:
            known = self._ranks[job, rank] = RankState(job, rank)
            known.note_next_session(self._view.next_session(job), time.monotonic())
        return known

    async def open(self, request: tpb.OpenSession, identity: str = LOCAL) -> TrainerSession:
        """Take a rank's place in a job at the registry; whatever an older process left unsealed here goes.

        Raises:
            FencedError: another process has had the place since.
            NoQuorumError: the registry does not answer, and this node does not know the session.
        """
        number = await self._take_place(request, identity)
        rank = self._of(request.job, request.rank)
        self._check_session(rank, number)
        older = rank.stream
        if number > rank.session:
            if older is not None:
                self._fence(rank, _taken_over(rank))
            self.supply.let_go(rank, discard=True)
            rank.begin_session(number)
            # In the order in which they were taken: what there are too many of goes from the front.
            self._ranks[rank.job, rank.rank] = self._ranks.pop((rank.job, rank.rank), rank)
            await asyncio.to_thread(self._store.retire, rank.job, rank.rank, number)
            self._check_session(rank, number)
        elif older is not None:
            self.leave(older)  # the same process: it has lost that stream
        session = TrainerSession(
            rank.job,
            rank.rank,
            number,
            request.world_size,
            request.max_in_flight or self._config.max_in_flight,
        )
        rank.stream, rank.client_id = session, request.client_id
        session.tell_opened()
        return session

    async def _take_place(self, request: tpb.OpenSession, identity: str) -> int:
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
                return (await self._registry.open_rank(asked, timeout_s=OPEN_TIMEOUT_S)).session
            except IncarnationOverError:
                if not await self._identity.outlives(asked.node):
                    raise
            except NoQuorumError:
                if not self._knows(request):
                    raise
                return request.session

    def _knows(self, request: tpb.OpenSession) -> bool:
        """Whether a client that comes back had its session here, by what this process and its store remember.

        Sessions are small numbers that anybody can guess: one that nobody opened would fence the rank's next process.
        """
        if not request.session or request.loads or request.renews:
            return False
        known = self._ranks.get((request.job, request.rank))
        if known is not None and (known.session, known.client_id) == (request.session, request.client_id):
            return True
        newest = known.session if known is not None else 0
        return request.session >= newest and any(
            held.kind == pb.REPLICA_KIND_OWNER
            and (held.key.rank, held.manifest.session) == (request.rank, request.session)
            for held in self._store.held(request.job)
        )

    @staticmethod
    def _check_session(rank: RankState, number: int) -> None:
        if number < rank.session:
            raise _taken_over(rank)

    def _fence(self, rank: RankState, error: FastCheckdError) -> None:
        """The session is over: its process may live, so what it can write to is not used again."""
        stream = rank.stream
        if stream is None or stream.over:
            return
        stream.fence(error)
        self._unlend(stream)
        self.supply.let_go(rank, discard=True)
        rank.contract = None

    def _unlend(self, stream: TrainerSession) -> None:
        """Nobody has said that a copy into these has ended, so the memory is not used again."""
        loop = asyncio.get_running_loop()
        for segment in stream.held.values():
            loop.run_in_executor(None, self._store.discard, segment)
        stream.held.clear()
        if stream.reserving is not None:
            stream.reserving.cancel()

    def stream_of(self, request: tpb.OpenSession) -> TrainerSession | None:
        """The stream that a client which opens one has here already, and has lost without this node knowing."""
        rank = self._ranks.get((request.job, request.rank))
        return rank.stream if rank is not None and rank.client_id == request.client_id else None

    def leave(self, session: TrainerSession) -> None:
        """The stream has ended, and with it the trainer or its way to here; what it has sealed goes on."""
        session.over = True
        session.hang_up()
        self._unlend(session)
        rank = self._ranks.get((session.job, session.rank))
        if rank is not None and rank.stream is session:
            rank.stream = rank.contract = None
            self.supply.let_go(rank, discard=False)

    async def close(self, session: TrainerSession) -> None:
        """The rank's process is done: the memory that it copied into is not kept for another step of it."""
        self.leave(session)
        await asyncio.to_thread(self._store.retire, session.job, session.rank, session.number + 1)

    def note_view(self) -> None:
        """There is a new view: sessions that a deletion has ended are over, and ranks that do nothing are forgotten.

        Of those: the ones whose sessions are over, and the oldest of too many. The registry remembers who may save; a
        process that is told here that its save is not known finds a committed one in the store.
        """
        now = time.monotonic()
        for rank in self._ranks.values():
            rank.note_next_session(self._view.next_session(rank.job), now)
            if self._view.is_void(rank.job, rank.session):
                self._fence(rank, _deleted(rank.job))
        idle = [
            name
            for name, rank in self._ranks.items()
            if not rank.busy() and (rank.stream is None or rank.stream.over)
        ]
        gone = [name for name in idle if self._view.is_void(name[0], self._ranks[name].session)]
        surplus = len(self._ranks) - len(gone) - RANKS_MAX
        if surplus > 0:
            deleted = set(gone)
            gone += [name for name in idle if name not in deleted][:surplus]
        for name in gone:
            del self._ranks[name]
            self._replicator.short_of_room.discard(name)
        if gone:
            self._committed.forget_except({job for job, _ in self._ranks})
            self._outcomes.forget_except(self._ranks.keys())

    # --- memory ----------------------------------------------------------------------------------

    def reserve(self, session: TrainerSession, request: tpb.ReserveMemory) -> None:
        """Have memory set aside; the session is told what, or why not. A newer request takes an older one's place."""
        if session.reserving is not None:
            session.reserving.cancel()
        session.reserving = asyncio.create_task(
            self._reserve(session, request), name=f"reserve-{session.job}-{session.rank}"
        )

    async def _reserve(self, session: TrainerSession, request: tpb.ReserveMemory) -> None:
        step = request.step if request.HasField("step") else None
        rank = self._of(session.job, session.rank)
        key = SaveKey(rank.job, rank.rank, step or 0)
        try:
            if session.over:
                raise _taken_over(rank)
            if step is None:
                await self._set_aside(rank, session, request)
            else:
                with self._outcomes.beginning(key, lambda: _why_waiting(rank)):
                    await self._set_aside(rank, session, request)
        except FastCheckdError as error:
            session.refuse(error, step)
        except Exception as error:
            logger.exception("a reservation of rank %d of job %s met a defect", rank.rank, rank.job)
            session.refuse(FastCheckdError(f"internal error: {error!r}"), step)
        self.supply.replenish(rank)

    async def _set_aside(self, rank: RankState, session: TrainerSession, request: tpb.ReserveMemory) -> None:
        step = request.step if request.HasField("step") else None
        if step is not None:
            self._check_newer(rank, session, step)
        self.supply.reserve(rank, request.state_bytes, request.record_bytes)
        assert rank.contract is not None
        session.tell_reserved(rank.contract.message(self.supply.offered(rank)))
        if step is not None:
            if await self._backlog.wait_below(rank, session.in_flight, step):
                self._counters.add("save_waits")
            self._check_newer(rank, session, step)
        await self.supply.lend_for(rank, session, step, self._gives_way)

    def _check_newer(self, rank: RankState, session: TrainerSession, step: int) -> None:
        newest = self._committed.newest(rank.job)
        # Where steps were deleted that an older view still shows, the registry says when it is asked for a place.
        if step <= newest and self._view.speaks_of(rank.job, session.number):
            raise NotNewerError(
                f"step {step} of job {rank.job!r} is not newer than its newest committed step {newest}; "
                "save a later step, or use another job name for a run of its own"
            )
        for save in rank.saves:
            if not save.done and save.key.step >= step:
                raise NotNewerError(f"step {save.key.step} is already under way; step {step} comes too late")

    def abandon(self, session: TrainerSession, segment_id: str) -> None:
        """A segment that will not be sealed, and that nobody writes to any more; unknown ones are no error."""
        segment = session.held.pop(segment_id, None)
        if segment is not None:
            self.supply.take_back(self._of(session.job, session.rank), session, segment)

    def held(self, job: str, rank: int, number: int, segment_id: str) -> Segment:
        """A segment that a session may fill now.

        Raises:
            FencedError: it is not, or not any more.
        """
        known = self._ranks.get((job, rank))
        stream = known.stream if known is not None else None
        segment = stream.held.get(segment_id) if stream is not None and stream.number == number else None
        if segment is None:
            raise FencedError(
                f"rank {rank} of job {job!r} does not have this segment: another process took over the rank, or its "
                "session's stream has ended"
            )
        return segment

    # --- sealed ----------------------------------------------------------------------------------

    async def sealed(self, session: TrainerSession, sealed: tpb.Sealed) -> None:
        """A trainer has filled a segment: replicate and commit it. The session is told what becomes of it.

        A step that is known already is only followed: a process that lost its stream says again what it has sealed.
        """
        rank = self._of(session.job, session.rank)
        key = SaveKey(session.job, session.rank, sealed.step)
        number = sealed.session or session.number
        segment = session.held.pop(sealed.segment_id, None)
        if segment is None or number != session.number:
            if segment is not None:
                self.supply.take_back(rank, session, segment)
            rank.finding = [task for task in rank.finding if not task.done()]
            rank.finding.append(asyncio.create_task(self._follow(session, key, number)))
            return
        session.sealing += 1
        try:
            save = await self._accept(rank, session, segment, sealed)
        except FastCheckdError as error:
            session.sealing -= 1
            self._outcomes.refused(key, error)
            session.refuse(error, sealed.step)
            self.supply.take_back(rank, session, segment)
            return
        except asyncio.CancelledError:  # the stream has ended: whoever ends the session finds it
            session.sealing -= 1
            session.held[sealed.segment_id] = segment
            raise
        session.sealing -= 1
        self._counters.add("saves_staged")
        self._counters.add("bytes_staged", save.state_bytes)
        waited_s = min(max(0.0, sealed.waited_s), WAITED_S_MAX)
        self._durations.add("save_wait", waited_s)
        if math.isfinite(save.begun_at):
            self._durations.add("save_copy", max(0.0, time.monotonic() - save.begun_at - waited_s))
        self._launch(rank, save, waited_s)
        session.follow(save)
        self.supply.replenish(rank)

    async def _accept(
        self, rank: RankState, session: TrainerSession, segment: Segment, sealed: tpb.Sealed
    ) -> Save:
        if not 0 < sealed.state_bytes <= segment.size_bytes:
            raise InvalidRequestError(
                f"a state of {sealed.state_bytes} bytes does not fit its segment of {segment.size_bytes}"
            )
        self._check_newer(rank, session, sealed.step)
        now = time.monotonic()
        # No later than now; a moment before this node started is as good as any.
        began_at = min(now, sealed.begun_s) if sealed.begun_s > 0 else -math.inf
        save = Save(
            key=SaveKey(rank.job, rank.rank, sealed.step),
            save_id=sealed.segment_id,
            session=session.number,
            world_size=session.world_size,
            segment=segment,
            state_bytes=sealed.state_bytes,
            begun_after=rank.begun_after(began_at),
            begun_at=began_at,
        )
        await save.describe(sealed, self._config.chunk_bytes)
        if session.number != rank.session or session.number != self._of(rank.job, rank.rank).session:
            raise _taken_over(rank)
        return save

    async def _follow(self, session: TrainerSession, key: SaveKey, number: int) -> None:
        """Tell a session of a step that it, or an earlier one of its process, has sealed before."""
        try:
            save = await self.find(key, number)
        except NotHeldError as error:
            if self._committed.by_an_earlier_life(key, number):
                committed = tpb.SaveProgress(session=number, step=key.step, state=tpb.SAVE_STATE_COMMITTED)
                session.tell_progress(committed)
            else:
                session.refuse(error, key.step, number)
        except FastCheckdError as error:
            session.refuse(error, key.step, number)
        else:
            session.follow(save)

    async def find(self, key: SaveKey, number: int) -> Save:
        """A session's sealed step. A process that was just restarted first looks what its earlier life staged.

        Raises:
            NotHeldError: this process does not know it.
            FencedError: nor need it: a deletion has ended the trainer's session meanwhile.
        """
        save = self._known(key, number)
        if save is None and self._view.is_void(key.job, number):
            raise _deleted(key.job)
        if save is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESUME_PATIENCE_S):
                    await self._resumed.wait()
            save = self._known(key, number)
        if save is None and not self._resumed.is_set():
            raise NotHeldError(
                f"{key}: the daemon restarted and has seen no registry since, so "
                "it does not know yet which steps are under way; what was replicated is kept, and reported later"
            )
        if save is None:
            raise NotHeldError(
                f"{key} is not known here: the daemon restarted before it was replicated, or the stream broke while "
                "the state was copied; the next save is not affected"
            )
        return save

    def _known(self, key: SaveKey, number: int) -> Save | None:
        rank = self._ranks.get((key.job, key.rank))
        return None if rank is None else rank.find(key.step, number)

    def _launch(self, rank: RankState, save: Save, waited_s: float = 0.0) -> None:
        """A sealed save is the daemon's: have it replicated and committed."""
        rank.attach(save, partial(self._backlog.note_provisional, rank))
        rank.state_bytes = max(rank.state_bytes, save.state_bytes)
        save.lean = self.supply.is_lean(rank)
        rank.add(save)
        save.sealed_at = time.monotonic()
        self._replicator.rhythm.sealed((rank.job, rank.rank), save.sealed_at)
        save.moved()
        save.advance(tpb.SAVE_STATE_STAGED)
        self._outcomes.sealed(save.key, waited_s)
        save.task = asyncio.create_task(self._run(rank, save), name=f"save-{save.key}")

    async def _run(self, rank: RankState, save: Save) -> None:
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
        self._finish(rank, save, error)

    def _finish(self, rank: RankState, save: Save, error: FastCheckdError | None) -> None:
        if save.done:
            return
        self._outcomes.ended(save.key, error)
        if error is None:
            self._counters.add("saves_committed")
            rank.starved = False
            rank.settled(save.key.step)
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
                self._note_given_up(rank, save)
            else:
                self._drop_own(rank, save.key)
            if isinstance(error, FencedError) and save.session == rank.session:
                self._fence(rank, error)
        # Finished saves are kept for a while, and these are large.
        save.content, save.after = NOTHING, None
        if save.task is None or save.task.done() or save.task is asyncio.current_task():
            self._release(rank, save)
        else:  # its threads read the bytes, or make them lossy, until it has ended
            save.task.add_done_callback(lambda _: self._release(rank, save))

    def _release(self, rank: RankState, save: Save) -> None:
        self._store.release(save.segment)
        self._replenish(rank)

    def _replenish(self, rank: RankState) -> None:
        if not self._stopping:
            self.supply.replenish(rank)

    def _note_given_up(self, rank: RankState, save: Save) -> None:
        """Keep the newest few such steps, in case that they are committed after all; have the others ruled out.

        Where memory is short, here or at a holder, all of them are.
        """
        if save.session != rank.session:
            return  # what is left of it goes as soon as no rank's session is as old
        keep = 0 if self.supply.is_lean(rank) else PROVISIONAL_KEPT
        self._backlog.note_given_up(rank, save, keep=keep)
        self._given_up.rule_out_beside(rank, keep=keep)

    def _drop_own(self, rank: RankState, key: SaveKey) -> None:
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

        # In a thread: older steps may have to be decoded from its bytes first.
        dropping = asyncio.get_running_loop().run_in_executor(None, drop)
        dropping.add_done_callback(lambda _: self._replenish(rank))

    # --- restart and stop ------------------------------------------------------------------------

    def resume(self) -> int:
        """Carry on with staged steps that an earlier life of this process left uncommitted."""
        resumed = 0
        for save in left_over(self._store, self._config.node_id, self._is_over):
            rank = self._of(save.key.job, save.key.rank)
            rank.session = max(rank.session, save.session)
            self._launch(rank, save)
            resumed += 1
        self._resumed.set()
        return resumed

    def _is_over(self, key: SaveKey, session: int) -> bool:
        """Whether a newer step was committed, or the step was deleted and is about to be dropped."""
        newest = self._view.newest_step(key.job)
        return (newest is not None and key.step <= newest) or self._view.is_void(key.job, session)

    async def stop(self) -> None:
        """Cancel what is under way; staged steps with manifests are resumed by the next process."""
        self._stopping = True
        for rank in self._ranks.values():
            if rank.stream is not None:
                rank.stream.hang_up()
        tasks = [task for rank in self._ranks.values() for task in rank.tasks()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _why_waiting(rank: RankState) -> str:
    under_way = rank.under_way()
    if not under_way:
        return "memory is made ready"
    oldest = under_way[0]
    why = f" does not move: {oldest.stalled_because}" if oldest.stalled_because else " is on its way"
    return f"{len(under_way)} older steps are under way, of which {oldest.key.step}{why}"


def _taken_over(rank: RankState) -> FencedError:
    return FencedError(
        f"another process has taken over rank {rank.rank} of job {rank.job!r}; this one's saves are refused"
    )


def _deleted(job: str) -> FencedError:
    return FencedError(
        f"steps of job {job!r} were deleted meanwhile, which ended the sessions of all its trainers; the next save "
        "opens a new one"
    )
