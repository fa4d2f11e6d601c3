"""Asks about silent nodes and proposes that the dead are DOWN. The detector decides which they are.

Nobody is asked anything while every node is heard. A node in question gets one round of questions after the
other, each with all its answers in before the next begins; answers wake the arbiter as they come, so that a verdict
waits for no straggler that would not change it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config, Voter
from ..errors import FastCheckdError
from ..health.detector import FailureDetector, Life, Verdict
from ..health.probe import from_wire
from . import commands
from .model import DOWN, UP, Ref, State
from .outward import Outward
from .raft.consensus import Consensus

logger = logging.getLogger(__name__)

#: Nodes, beside the voters, that are asked to ask.
ASKERS_MAX = 3
#: Rounds at once. More nodes than that die at once only when half a data centre does; the rest wait their turn.
ROUNDS_MAX = 16
#: A voter that reported silence renews no lease of that life for so long: the time to decide.
WITHHOLD_S = 2.0
#: A proposal takes part of it, the age of the evidence the rest.
PROPOSE_S = 1.0
#: Events within this time are judged together.
MERGE_S = 0.005


@dataclass(frozen=True)
class _Member:
    life: Life
    agent_address: str
    #: May be asked to ask others: UP.
    is_up: bool


class Arbiter:
    """Judges while its voter leads; listens always.

    Args:
        on_change: called when what is thought of some node has changed.
        wall_ms: the wall clock, for people to read in the history.
        draw: random choice of the nodes that are asked to ask.
    """

    def __init__(
        self,
        config: Config,
        raft: Consensus,
        detector: FailureDetector,
        outward: Outward,
        on_change: Callable[[], None],
        *,
        wall_ms: Callable[[], int],
        draw: random.Random | None = None,
    ) -> None:
        self._config = config
        self._raft = raft
        self._detector = detector
        self._outward = outward
        self._on_change = on_change
        self._draw = draw or random.Random()  # noqa: S311  a choice of askers, no secret
        self._wall_ms = wall_ms
        self._woken = asyncio.Event()
        self._rounds = asyncio.Semaphore(ROUNDS_MAX)
        self._tasks: dict[tuple[str, Life], asyncio.Task[None]] = {}
        self._epoch = -1
        self._members: dict[Life, _Member] = {}
        self._shown: dict[Life, tuple[Verdict, str]] = {}
        #: SUSPECT in the leader's opinion; empty while this voter does not lead.
        self.suspects: frozenset[Life] = frozenset()
        #: These, and the damped: nothing new is placed there while others can take it.
        self.avoided: frozenset[Life] = frozenset()

    @property
    def tick_s(self) -> float:
        """Time between two judgements when nothing happens."""
        return self._config.suspect_after_s / 4

    def why(self, life: Life) -> str:
        """What this voter, while it leads, has against a node, or why it is damped; empty: nothing."""
        return self._shown.get(life, (Verdict.UP, ""))[1]

    def wake(self) -> None:
        """Something happened that may change a verdict: judge soon."""
        self._woken.set()

    async def listen(self) -> None:
        """Note, leader or not, that this process is awake. Ends by being cancelled."""
        while True:
            self._detector.awake(self._now())
            await asyncio.sleep(self.tick_s)

    def leadership_gained(self) -> None:
        """This voter leads from now on."""
        self._detector.became_leader(self._now())

    async def pause(self) -> None:
        """Until the next judgement is due, or something has happened."""
        try:
            async with asyncio.timeout(self.tick_s):
                await self._woken.wait()
                await asyncio.sleep(MERGE_S)
        except TimeoutError:
            pass
        self._woken.clear()

    def leadership_lost(self) -> None:
        """This voter does not lead any more: what it thought is nobody's concern."""
        for task in list(self._tasks.values()):
            task.cancel()
        self._show({})

    def judge(self) -> None:
        """Judge everybody, propose who is DOWN, ask about who is in question."""
        self._refresh_members()
        now = self._now()
        judgements = self._detector.judge(self._members, len(self._raft.voters), now)
        for life, judgement in judgements.items():
            if judgement.verdict is Verdict.DOWN:
                self._detector.withhold(life, now + WITHHOLD_S)
                self._once("down", life, self._propose_down, judgement.reason)
        for life in sorted(
            self._detector.in_question()
        ):  # so that a run that is replayed asks in the same order
            if life in self._members and ("down", life) not in self._tasks:
                self._once("round", life, self._round)
        self._show({life: (j.verdict, j.reason) for life, j in judgements.items()})

    def _refresh_members(self) -> None:
        def look(state: State) -> None:
            if state.epoch == self._epoch:
                return
            self._epoch = state.epoch
            self._members = {
                Ref.of(node): _Member(Ref.of(node), node.agent_address, node.state == UP)
                for node in state.nodes.values()
                if node.state != DOWN
            }

        self._raft.read(look)

    def _show(self, shown: dict[Life, tuple[Verdict, str]]) -> None:
        if shown == self._shown:
            return
        before = self._shown
        self._shown = shown
        self.suspects = frozenset(life for life, (verdict, _) in shown.items() if verdict is not Verdict.UP)
        self.avoided = frozenset(life for life, (_, reason) in shown.items() if reason)
        for life, (verdict, reason) in shown.items():
            if verdict is Verdict.SUSPECT and before.get(life, (Verdict.UP, ""))[0] is Verdict.UP:
                logger.info("registry: node %s in incarnation %d is SUSPECT: %s", *life, reason)
        # Lives that come and go change the view by themselves.
        if any(
            before.get(life, (Verdict.UP, "")) != shown.get(life, (Verdict.UP, "")) for life in before | shown
        ):
            self._on_change()

    def _once(
        self, what: str, life: Life, work: Callable[..., Coroutine[Any, Any, None]], *more: Any
    ) -> None:
        """Start work about a node unless it is under way."""
        key = (what, life)
        if key not in self._tasks:
            task = asyncio.ensure_future(work(life, *more))
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, Life], task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("registry: the %s about node %s failed", key[0], key[1][0], exc_info=error)

    # Asking

    async def _round(self, life: Life) -> None:
        """One round of questions; the next one begins a tick after its last answer."""
        async with self._rounds:
            member = self._members.get(life)
            if member is None:
                return
            own = self._config.node_id
            others = [voter for voter in self._raft.voters if voter.node_id != own]
            askers = self._askers(life, {own, *(voter.node_id for voter in others)})
            names = {own, *(voter.node_id for voter in others), *(asker.life[0] for asker in askers)}
            number = self._detector.ask(life, names, self._now())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask_node(member, number))
                for voter in others:
                    group.create_task(self._ask_voter(voter, member, number))
                for asker in askers:
                    group.create_task(self._ask_through(asker, member, number))
        await asyncio.sleep(self.tick_s)

    def _askers(self, life: Life, voters: set[str]) -> list[_Member]:
        """Random nodes that are well; the voters are asked anyhow."""
        fit = [
            member
            for member in self._members.values()
            if member.is_up
            and member.life[0] not in voters
            and member.life != life
            and member.life not in self.suspects
        ]
        return self._draw.sample(fit, min(ASKERS_MAX, len(fit)))

    async def _ask_node(self, member: _Member, number: int) -> None:
        timeout_s = self._config.probe_timeout_s
        finding = await self._outward.probe(member.agent_address, member.life, timeout_s)
        self._detector.found(member.life, number, self._config.node_id, finding)
        self.wake()

    async def _ask_voter(self, voter: Voter, member: _Member, number: int) -> None:
        timeout_s = self._config.probe_timeout_s
        request = rpb.CorroborateRequest(
            node=Ref(*member.life).message(),
            agent_address=member.agent_address,
            # Less silence is told too, but is no reason to withhold a lease: refused connections prove more.
            silence_s=self._config.down_after_s,
            probe_timeout_s=timeout_s,
            withhold_s=WITHHOLD_S,
        )
        answer = await self._outward.corroborate(voter, request, timeout_s)
        if answer is not None and answer.HasField("silence_s"):
            self._detector.reported(member.life, number, voter.node_id, answer.silence_s)
        finding = None if answer is None else from_wire(answer.finding)
        self._detector.found(member.life, number, voter.node_id, finding)
        self.wake()

    async def _ask_through(self, asker: _Member, member: _Member, number: int) -> None:
        finding = await self._outward.probe_through(
            asker.life[0],
            asker.agent_address,
            member.agent_address,
            member.life,
            self._config.probe_timeout_s,
        )
        self._detector.found(member.life, number, asker.life[0], finding)
        self.wake()

    async def _propose_down(self, life: Life, reason: str) -> None:
        command = commands.set_state(Ref(*life), DOWN, reason, at_ms=self._wall_ms())
        try:
            result = await self._raft.propose(command, timeout_s=PROPOSE_S)
            logger.warning("registry: node %s in incarnation %d is DOWN: %s", *life, result.message or reason)
        except FastCheckdError as error:
            logger.warning("registry: could not decide that node %s is DOWN: %s", life[0], error)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
