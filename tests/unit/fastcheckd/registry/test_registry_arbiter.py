"""The judge at work: whom it asks, when it proposes, and that it asks nobody in good times.

Behind it are the real state machine and detector; in front of it stands a scripted outside world.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from small_cluster import apply, register

from fastcheck_proto.v1 import node_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config import Config, Voter
from fastcheckd.errors import NoQuorumError
from fastcheckd.health.detector import FailureDetector, Finding
from fastcheckd.registry.arbiter import ASKERS_MAX, Arbiter
from fastcheckd.registry.model import State, state_name

VOTERS = tuple(Voter(node_id=f"n{i}", registry_address=f"h:{i}1", raft_address=f"h:{i}2") for i in range(3))


class OneProcess:
    """An engine without consensus: what is proposed is committed, unless `quorum` is gone."""

    failure, is_leader, term, leader, voters = None, True, 1, VOTERS[0], VOTERS

    def __init__(self, nodes: int) -> None:
        self.state = State()
        self.quorum = True
        self.proposed = 0
        for i in range(nodes):
            apply(self.state, register(f"n{i}"))

    def read(self, reader: Callable[[Any], Any]) -> Any:
        return reader(self.state)

    async def propose(self, command: Any, *, timeout_s: float = 4.0) -> Any:
        self.proposed += 1
        if not self.quorum:
            raise NoQuorumError("no quorum")
        return apply(self.state, command)


class World:
    """Everybody's answers, by what is dead; and what was asked."""

    def __init__(self) -> None:
        self.dead: dict[str, Finding] = {}
        self.silence_s = 0.0
        self.asked: list[tuple[str, str]] = []
        self.at_once = self.at_once_max = 0

    async def probe(self, agent_address: str, life: Any, timeout_s: float) -> Finding:
        self.asked.append(("probe", life[0]))
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        return self.dead.get(life[0], Finding.ANSWERED)

    async def corroborate(self, voter: Voter, request: Any, timeout_s: float) -> Any:
        self.asked.append((voter.node_id, request.node.node_id))
        if voter.node_id in self.dead:
            return None
        found = self.dead.get(request.node.node_id, Finding.ANSWERED)
        finding = node_pb2.ProbeFinding.Value(f"PROBE_FINDING_{found.name}")
        return rpb.CorroborateResponse(silence_s=self.silence_s, finding=finding)

    async def probe_through(
        self, asker_id: str, asker_address: str, target: str, life: Any, timeout_s: float
    ) -> Any:
        self.asked.append((asker_address, life[0]))
        return self.dead.get(life[0], Finding.ANSWERED)

    async def replicate(self, node_id: str, data_address: str, request: Any, timeout_s: float) -> Any:
        raise AssertionError("no business of the arbiter")


class Office:
    """A leading voter n0 with its judge; `beats` lets the living be heard."""

    def __init__(self, nodes: int = 6) -> None:
        self.config = Config(node_id="n0", voters=VOTERS, raft_key_file="unused")  # type: ignore[arg-type]
        self.engine, self.world = OneProcess(nodes), World()
        self.detector = FailureDetector(suspect_after_s=0.04, down_after_s=0.08, hush_s=0.02)
        self.changes = 0
        self.arbiter = Arbiter(
            self.config, self.engine, self.detector, self.world, self._changed,
            wall_ms=lambda: 7, draw=random.Random(1),
        )  # fmt: skip
        self.beating = {f"n{i}" for i in range(nodes)}

    def _changed(self) -> None:
        self.changes += 1

    def lives(self) -> list[tuple[str, int]]:
        return [(node.node_id, node.incarnation) for node in self.engine.state.nodes.values()]

    async def judge_until(self, done: Callable[[], Any], within_s: float = 60.0) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while not done():
            assert loop.time() < end, "it did not come to that"
            for life in self.lives():
                if life[0] in self.beating:
                    self.detector.heard(life, loop.time())
            self.arbiter.judge()
            await asyncio.sleep(0.005)

    async def settle(self) -> None:
        loop = asyncio.get_running_loop()
        self.arbiter.leadership_gained()
        calm = loop.time() + 0.1
        await self.judge_until(lambda: loop.time() > calm)

    def falls_silent(self, node_id: str, finding: Finding) -> None:
        self.beating.discard(node_id)
        self.world.dead[node_id] = finding
        self.world.silence_s = 5.0

    def state_of(self, node_id: str) -> str:
        return state_name(self.engine.state.nodes[node_id].state)


def test_nobody_is_asked_anything_while_everybody_is_heard():
    async def story():
        office = Office()
        await office.settle()
        assert office.world.asked == [] and office.engine.proposed == 0
        assert office.arbiter.suspects == office.arbiter.avoided == frozenset() and office.changes == 0

    asyncio.run(story())


def test_at_most_three_nodes_are_asked_to_ask():
    async def story():
        office = Office(nodes=12)
        await office.settle()
        office.falls_silent("n11", Finding.SILENT)
        await office.judge_until(lambda: office.world.asked)
        await office.judge_until(lambda: len(office.world.asked) >= 3 + ASKERS_MAX)
        first = office.world.asked[: 3 + ASKERS_MAX]
        assert sum(who.endswith(":1") for who, _ in first) == ASKERS_MAX

    asyncio.run(story())


def test_one_round_at_a_time_about_a_node_and_a_bounded_number_in_all():
    async def story():
        office = Office(nodes=60)
        await office.settle()
        for i in range(3, 60):
            office.falls_silent(f"n{i}", Finding.REFUSED)
        await office.judge_until(lambda: all(office.state_of(f"n{i}") == "DOWN" for i in range(3, 60)))
        assert office.world.at_once_max <= 16

    asyncio.run(story())


def test_a_judge_that_resigns_has_no_opinion_and_asks_no_more():
    async def story():
        office = Office()
        await office.settle()
        office.beating.discard("n4")
        await office.judge_until(lambda: office.arbiter.suspects)
        office.arbiter.leadership_lost()
        assert office.arbiter.suspects == frozenset() and office.arbiter.why(("n4", 5)) == ""
        await asyncio.sleep(0)
        asked = len(office.world.asked)
        await asyncio.sleep(0.05)
        assert len(office.world.asked) == asked

    asyncio.run(story())


def test_a_broken_stream_ends_the_pause_at_once():
    async def story():
        office = Office()
        office.arbiter._config = Config(suspect_after_s=400, down_after_s=800)  # a tick of 100 s
        loop = asyncio.get_running_loop()
        started = loop.time()
        loop.call_later(0.01, office.arbiter.wake)
        await office.arbiter.pause()
        assert loop.time() - started < 50

    asyncio.run(story())
