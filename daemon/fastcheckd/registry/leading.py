"""What the leader does beside committing: judge the nodes, place shards, prove that it leads.

Its judgements are proposals; losing the leadership in the middle of one loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastcheck_proto.v1 import registry_pb2

from ..config import Config, Voter
from ..errors import FastCheckdError, FencedError, NotNewerError, SupersededError
from ..health.detector import FailureDetector, Life, Verdict
from ..health.probing import ProbeResult, probe
from ..placement import PlannedShard, place
from . import commands
from .commits import Standing, check_session, standing
from .engine import Engine
from .records import SHARDS_MAX, Json
from .replacing import replace_voter
from .reporting import Reports

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where a rank's shards go, and the nodes named in it as they are registered."""

    epoch: int
    shards: tuple[PlannedShard, ...]
    nodes: dict[str, Json]


class Leader:
    """This voter's office while it leads; idle otherwise.

    Args:
        on_suspects: called when the set of suspected nodes has changed.
        wall_ms: the wall clock, for what people are shown; nothing is decided by it.
    """

    def __init__(
        self,
        config: Config,
        raft: Engine,
        reports: Reports,
        detector: FailureDetector,
        on_suspects: Callable[[], None],
        *,
        wall_ms: Callable[[], int],
    ) -> None:
        self.wall_ms = wall_ms
        self._config = config
        self._raft = raft
        self._reports = reports
        self._detector = detector
        self._on_suspects = on_suspects
        self._wake = asyncio.Event()
        self._tasks: dict[tuple[str, Life], asyncio.Task[None]] = {}
        self._barrier_running: asyncio.Task[None] | None = None
        self._barrier_next: asyncio.Task[None] | None = None
        #: Term in which this voter has proved that it leads and has applied all that was committed before.
        self._ready_term = -1
        self.suspects: frozenset[Life] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether this voter may answer what only the leader answers."""
        return self._raft.is_leader and self._raft.term == self._ready_term

    def changed(self) -> None:
        """State, role or leader have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Lead whenever this voter is elected. Ends by being cancelled."""
        try:
            while True:
                self._wake.clear()
                if self._raft.is_leader:
                    await self._lead(self._raft.term)
                else:
                    await self._wake.wait()
        finally:
            self._resign()

    async def _lead(self, term: int) -> None:
        try:
            await self._raft.propose(commands.noop())
        except FastCheckdError as error:
            logger.warning("registry: elected, but cannot commit yet: %s", error)
            await asyncio.sleep(0.1)
            return
        self._ready_term = term
        self._detector.became_leader(self._now())
        logger.info("registry: leading in term %d", term)
        self._on_suspects()
        try:
            while self.ready:
                self._judge()
                self._reports.tick()
                await asyncio.sleep(self._config.suspect_after_s / 4)
        finally:
            self._resign()

    def _resign(self) -> None:
        self._ready_term = -1
        self._reports.abandon()
        for task in list(self._tasks.values()):
            task.cancel()
        self.suspects = frozenset()
        self._on_suspects()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Judging

    def _judge(self) -> None:
        nodes = self._raft.read(
            lambda state: {
                (node_id, node["incarnation"]): node["agent_address"]
                for node_id, node in state["nodes"].items()
                if node["state"] != "DOWN"
            }
        )
        now = self._now()
        verdicts = self._detector.judge(nodes, now)
        for life, verdict in verdicts.items():
            if verdict is Verdict.DOWN:
                self._once("down", life, lambda life=life: self._propose_down(life))  # type: ignore[misc]
            elif self._detector.silence_s(life, now) > self._config.suspect_after_s:
                self._once("probe", life, lambda life=life: self._probe(nodes[life], life))  # type: ignore[misc]
        suspects = frozenset(life for life, verdict in verdicts.items() if verdict is not Verdict.UP)
        if suspects != self.suspects:
            self.suspects = suspects
            self._on_suspects()

    def _once(self, what: str, life: Life, work: Callable[[], object]) -> None:
        """Start work about a node unless it is under way."""
        if (what, life) not in self._tasks:
            task = asyncio.ensure_future(work())  # type: ignore[call-overload]
            self._tasks[(what, life)] = task
            task.add_done_callback(lambda _: self._tasks.pop((what, life), None))

    async def _probe(self, agent_address: str, life: Life) -> None:
        sent_at = self._now()
        result = await probe(agent_address, life, self._config.probe_timeout_s)
        if result is ProbeResult.ANSWERED:
            self._detector.probe_answered(life, self._now())
        elif result is ProbeResult.REFUSED:
            self._detector.probe_refused(life, sent_at)

    async def _propose_down(self, life: Life) -> None:
        try:
            reason = "no sign of life"
            down = commands.set_state(life, "DOWN", reason, at_ms=self.wall_ms())
            result = await self._raft.propose(down)
            logger.warning(
                "registry: node %s in incarnation %d is DOWN: %s", *life, result.get("message", "decided")
            )
        except FastCheckdError as error:
            logger.warning("registry: could not decide that node %s is DOWN: %s", life[0], error)

    # Answering

    def place(
        self,
        *,
        job: str,
        step: int,
        rank: int,
        world_size: int,
        session: int,
        owner: list[object],
        state_bytes: int,
        chunk_bytes: int,
        avoid: Collection[str],
        oldest_step: int,
    ) -> Placement:
        """Split a rank's state into shards and name their holders.

        Raises:
            FencedError: the session or the owner's life is over.
            SupersededError, NotNewerError: a step at least as new is committed.
            PlacementError: too few healthy nodes.
        """

        def decide(state: Json) -> Placement:
            if fenced := check_session(state, job, rank, session, owner):
                raise FencedError(fenced["message"])
            stands = standing(state["jobs"][job], step, rank, session)
            if stands is Standing.SUPERSEDED:
                raise SupersededError(f"step {step} of job {job} was given up for a newer one")
            if stands is not Standing.OPEN:
                raise NotNewerError(
                    f"step {step} of job {job} is not newer than the committed {state['jobs'][job]['newest']}"
                )
            up = {node_id: node for node_id, node in state["nodes"].items() if node["state"] == "UP"}
            suspects = {
                node_id for node_id, node in up.items() if (node_id, node["incarnation"]) in self.suspects
            }
            shards = place(
                members=up,
                owner=str(owner[0]),
                job=job,
                rank=rank,
                state_bytes=state_bytes,
                chunk_bytes=chunk_bytes,
                tolerate=self._config.tolerate,
                spread=min(self._config.spread, SHARDS_MAX),
                avoid=suspects | set(avoid),
            )
            named = {holder for shard in shards for holder in shard.holders}
            return Placement(state["epoch"], shards, {node_id: dict(up[node_id]) for node_id in named})

        placement = self._raft.read(decide)
        self._reports.collector.placed(
            job,
            step,
            world_size=world_size,
            rank=rank,
            node_id=str(owner[0]),
            state_bytes=state_bytes,
            oldest_step=oldest_step,
            now=self._now(),
        )
        return placement

    async def replace_voter(self, request: registry_pb2.ReplaceVoterRequest) -> list[Voter]:
        """Replace a voter that is gone for good; returns all voters afterwards.

        Raises:
            InvalidRequestError, UnsafeError, NoQuorumError: see `replacing`.
        """
        return await replace_voter(self._raft, self._config.cluster_id, request, at_ms=self.wall_ms())

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
