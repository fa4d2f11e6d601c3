"""Who may save: a rank's place in a job, taken at the registry, and the one process that has it here."""

from __future__ import annotations

import asyncio
import time

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..errors import FastCheckdError, FencedError, IncarnationOverError, NoQuorumError
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..registry.model import LOCAL
from ..store.replica_store import ReplicaStore
from ..view import ViewFollower
from .rank_state import RankState
from .segment_supply import SegmentSupply
from .session import TrainerSession

OPEN_TIMEOUT_S = 5.0


class Sessions:
    """Of all ranks of one data process. Owned by the event loop's thread.

    Args:
        ranks: by job and rank; those that save are added.
    """

    def __init__(
        self,
        config: Config,
        identity: NodeLife,
        store: ReplicaStore,
        registry: RegistryClient,
        view: ViewFollower,
        supply: SegmentSupply,
        ranks: dict[tuple[str, int], RankState],
    ) -> None:
        self._config = config
        self._identity = identity
        self._store = store
        self._registry = registry
        self._view = view
        self._supply = supply
        self._ranks = ranks

    def of(self, job: str, rank: int) -> RankState:
        """What is known of a rank, from now on."""
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
        rank = self.of(request.job, request.rank)
        self.check(rank, number)
        older = rank.stream
        if number > rank.session:
            if older is not None:
                self.fence(rank, taken_over(rank))
            self._supply.let_go(rank, discard=True)
            rank.begin_session(number)
            # In the order in which they were taken: what there are too many of goes from the front.
            self._ranks[rank.job, rank.rank] = self._ranks.pop((rank.job, rank.rank), rank)
            await asyncio.to_thread(self._store.retire, rank.job, rank.rank, number)
            self.check(rank, number)
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
    def check(rank: RankState, number: int) -> None:
        """Raise FencedError if the rank has a newer session."""
        if number < rank.session:
            raise taken_over(rank)

    def fence(self, rank: RankState, error: FastCheckdError) -> None:
        """The session is over: its process may live, so what it can write to is not used again."""
        stream = rank.stream
        if stream is None or stream.over:
            return
        stream.fence(error)
        self._unlend(stream)
        self._supply.let_go(rank, discard=True)
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
            self._supply.let_go(rank, discard=False)

    async def close(self, session: TrainerSession) -> None:
        """The rank's process is done: the memory that it copied into is not kept for another step of it."""
        self.leave(session)
        await asyncio.to_thread(self._store.retire, session.job, session.rank, session.number + 1)


def taken_over(rank: RankState) -> FencedError:
    """What a session is told whose rank has a newer one."""
    return FencedError(
        f"another process has taken over rank {rank.rank} of job {rank.job!r}; this one's saves are refused"
    )
