"""What the leader does beside committing and judging: place shards, prove that it leads, start and end the rest."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from fastcheck_proto.v1 import common_pb2, registry_pb2

from ..config import Config, Voter
from ..errors import FastCheckdError, NotNewerError, SupersededError, from_code
from ..health.detector import FailureDetector, Life
from ..placement import place
from . import commands
from .arbiter import Arbiter
from .commands import SHARDS_MAX
from .commits import Standing, check_session, standing
from .loads import NodeLoads, domain_label
from .model import Job, Ref, State
from .outward import Outward
from .raft.consensus import Consensus
from .repairs import Repairs
from .reports import Reports
from .voters import add_voters, agree_in_time, replace_voter

logger = logging.getLogger(__name__)

REPAIR_RESTART_S = 1.0


class Leader:
    """What this voter does while it leads; idle otherwise.

    Args:
        on_suspects: called when what is thought of some node, or whether this voter leads, has changed.
        wall_ms: the wall clock, for what people are shown; nothing is decided by it.
        outward: how it asks nodes and voters; by default over the network.
        draw: chooses whom the arbiter asks to ask others.
    """

    def __init__(
        self,
        config: Config,
        raft: Consensus,
        reports: Reports,
        detector: FailureDetector,
        on_suspects: Callable[[], None],
        *,
        wall_ms: Callable[[], int],
        outward: Outward | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self.wall_ms = wall_ms
        self._config = config
        self._raft = raft
        self._reports = reports
        self._on_suspects = on_suspects
        self.outward = outward or Outward()
        self.arbiter = Arbiter(config, raft, detector, self.outward, on_suspects, draw=draw, wall_ms=wall_ms)
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        self._loads = NodeLoads()
        self._barrier_running: asyncio.Task[None] | None = None
        self._barrier_next: asyncio.Task[None] | None = None
        #: Term in which this voter has proved that it leads and has applied all that was committed before.
        self._ready_term = -1
        self.repairs = Repairs(
            config, raft, self.outward, unwell=lambda: frozenset(node_id for node_id, _ in self.suspects)
        )

    @property
    def suspects(self) -> frozenset[Life]:
        """Lives that get nothing new while others can take it: SUSPECT or damped."""
        return self.arbiter.avoided

    @property
    def ready(self) -> bool:
        """Whether this voter may answer what only the leader answers."""
        return self._raft.is_leader and self._raft.term == self._ready_term

    def changed(self) -> None:
        """State, role or leader have changed."""
        self._wake.set()
        self._tell()
        self.repairs.changed()

    async def news(self) -> None:
        """Return when state, role or leader have changed again, or when this voter has become `ready`."""
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Lead whenever this voter is elected, listen always. Ends by being cancelled."""
        listening = asyncio.ensure_future(self.arbiter.listen())
        try:
            while True:
                self._wake.clear()
                if self._raft.is_leader:
                    await self._lead(self._raft.term)
                else:
                    await self._wake.wait()
        finally:
            listening.cancel()
            self._leadership_lost()

    async def _lead(self, term: int) -> None:
        try:
            await self._raft.propose(commands.noop())
        except FastCheckdError as error:
            logger.warning("registry: elected, but cannot commit yet: %s", error)
            await asyncio.sleep(0.1)
            return
        self._ready_term = term
        self._reports.leadership_gained()
        self._tell()
        self.arbiter.leadership_gained()
        logger.info("registry: leading in term %d", term)
        self._on_suspects()
        repairing = asyncio.create_task(self._repair(), name="repairs")
        agreeing = asyncio.create_task(agree_in_time(self._raft, self._config.node_id, self.outward))
        try:
            while self.ready:
                self.arbiter.judge()
                self._reports.tick()
                await self.arbiter.pause()
        finally:
            repairing.cancel()
            agreeing.cancel()
            self._leadership_lost()
            await asyncio.gather(repairing, agreeing, return_exceptions=True)

    async def _repair(self) -> None:
        """Have lost copies made anew, until cancelled. A defect there must not cost the leadership."""
        while True:
            try:
                await self.repairs.run()
            except Exception:
                logger.exception("registry: repairs begin anew after an error")
            await asyncio.sleep(REPAIR_RESTART_S)

    def _leadership_lost(self) -> None:
        self._ready_term = -1
        self._reports.leadership_lost()
        self.arbiter.leadership_lost()
        self._loads.forget()
        self._on_suspects()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Answering

    def place(self, asked: registry_pb2.PlaceRequest) -> registry_pb2.PlaceResponse:
        """Split a rank's state into shards and name their holders.

        Raises:
            FencedError: the session or the owner's life is over.
            SupersededError, NotNewerError: a step at least as new is committed.
            PlacementError: too few healthy nodes.
        """
        newest_load, age_s = self._reports.newest_load(asked.job)
        placed = self._raft.read(lambda state: self._place(state, asked))
        placed.newest_load, placed.newest_load_age_s = newest_load, age_s
        self._reports.collector.placed(
            asked.job,
            asked.step,
            world_size=asked.world_size,
            rank=asked.rank,
            node=Ref.of(asked.owner),
            state_bytes=asked.state_bytes,
            oldest_step=min(asked.oldest_step, asked.step),
            now=self._now(),
        )
        return placed

    def _place(self, state: State, asked: registry_pb2.PlaceRequest) -> registry_pb2.PlaceResponse:
        job, step, rank, owner = asked.job, asked.step, asked.rank, asked.owner.node_id
        if fenced := check_session(state, job, rank, asked.session, asked.owner):
            raise from_code(fenced.code, fenced.message)
        stands = standing(state.jobs[job], step, rank, asked.session)
        if stands is Standing.SUPERSEDED:
            raise SupersededError(f"step {step} of job {job} was given up for a newer one")
        if stands is not Standing.OPEN:
            raise NotNewerError(
                f"step {step} of job {job} is not newer than the committed {state.jobs[job].newest}"
            )
        nodes = state.nodes
        suspects = {
            node_id
            for node_id, incarnation in self.suspects
            if node_id in nodes and nodes[node_id].incarnation == incarnation
        }
        label = self._config.failure_domain
        spread = min(self._config.spread, SHARDS_MAX)
        plan = place(
            members=self._loads.members(state, label),
            owner=owner,
            owner_domain=domain_label(nodes[owner], label),
            job=job,
            rank=rank,
            state_bytes=asked.state_bytes,
            chunk_bytes=asked.chunk_bytes,
            tolerate=self._config.tolerate,
            spread=spread,
            avoid=suspects | set(asked.avoid),
            previous=self._loads.earlier(state, job, rank, asked.world_size),
            load=self._loads.by_node(state),
            groups=self._loads.groups(state, label, spread),
        )
        self._loads.placed(state, job, rank, asked.world_size, step, plan)
        placed = registry_pb2.PlaceResponse(
            epoch=state.epoch,
            domains_short=plan.domains_short,
            generation=_takeovers(state.jobs[job]),
        )
        for shard in plan.shards:
            holders = [
                common_pb2.Holder(
                    node=Ref.of(node).message(),
                    data_address=node.data_address,
                    lane_address=node.lane_address,
                )
                for node in map(nodes.__getitem__, shard.holders)
            ]
            placed.shards.add(shard=shard.shard, offset=shard.offset, bytes=shard.size_bytes, holders=holders)
        return placed

    def data_process_gone(self, life: Life) -> None:
        """A node's agent says that its data process has ended, and perhaps that the next one is starting."""
        self._reports.collector.stopped(Ref(*life))

    async def replace_voter(self, request: registry_pb2.ReplaceVoterRequest) -> list[Voter]:
        """Replace a voter that is gone for good; returns all voters afterwards.

        Raises:
            InvalidRequestError, UnsafeError, NoQuorumError: see `voters`.
        """
        return await replace_voter(
            self._raft, self._config.cluster_id, request, at_ms=self.wall_ms(), outward=self.outward
        )

    async def add_voters(self, request: registry_pb2.AddVotersRequest) -> list[Voter]:
        """Have more nodes vote; returns all voters afterwards.

        Raises:
            InvalidRequestError, UnsafeError, NoQuorumError: see `voters`.
        """
        return await add_voters(
            self._raft,
            self._config.cluster_id,
            request,
            at_ms=self.wall_ms(),
            outward=self.outward,
        )

    async def confirm(self) -> None:
        """Return when this voter has been proved to lead after the call began: what it then reads is current.

        Callers that come while one proof is under way share the next one.

        Raises:
            NoQuorumError: it could not be proved.
        """
        if self._barrier_next is None:
            self._barrier_next = asyncio.ensure_future(self._barrier(self._barrier_running))
            # Whoever waited may be gone; the error is theirs, not the event loop's.
            self._barrier_next.add_done_callback(lambda t: t.cancelled() or t.exception())
        await asyncio.shield(self._barrier_next)

    async def _barrier(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._barrier_running, self._barrier_next = self._barrier_next, None
        await self._raft.propose(commands.noop())


def _takeovers(job: Job) -> int:
    """How often ranks were taken over: sessions beyond the first of each, and a number that is constant for the job."""
    return job.next_session - len(job.ranks)
