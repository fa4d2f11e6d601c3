"""A leader's repairs from beginning to end, with nodes that answer as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from small_cluster import DIGEST, RANKS, apply, cluster, commit, register, set_state

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.config import Config, Voter
from fastcheckd.errors import NoQuorumError, PeerError
from fastcheckd.registry import repair_planner
from fastcheckd.registry.model import Ref, ShardId, State
from fastcheckd.registry.redundancy import RecordedReplica, is_lost
from fastcheckd.registry.repairs import Repairs


class OneVoter:
    """A consensus of one: what is proposed is applied, unless `cut`."""

    failure: str | None = None
    is_leader = True
    term = 1
    leader: Voter | None = None
    voters: tuple[Voter, ...] = ()

    def __init__(self, state: State) -> None:
        self.state = state
        self.cut = False
        self.proposed: list[Any] = []

    def read(self, reader: Callable[[State], Any]) -> Any:
        return reader(self.state)

    async def propose(self, command: Any, *, timeout_s: float = 4.0) -> Any:
        if self.cut:
            raise NoQuorumError("cut")
        self.proposed.append(command)
        return apply(self.state, command)


class Nodes:
    """The nodes, as a voter reaches them."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.fetched: list[tuple[str, ShardId]] = []
        self.running = 0
        self.most_running = 0
        #: By data address; None: does not answer.
        self.holds: dict[str, list[peer_pb2.Replica] | None] = {}

    async def replicate(
        self, node_id: str, data_address: str, request: peer_pb2.ReplicateRequest, timeout_s: float
    ) -> peer_pb2.ReplicateResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if data_address in self.hangs:
                await asyncio.sleep(3600)
            if data_address in self.fails:
                raise PeerError("out of order")
        finally:
            self.running -= 1
        key = request.key
        self.fetched.append((data_address, ShardId(key.job, key.step, key.rank, key.shard)))
        return peer_pb2.ReplicateResponse(digest=request.digest)

    async def list_replicas(
        self, node_id: str, data_address: str, timeout_s: float
    ) -> list[peer_pb2.Replica]:
        replicas = self.holds.get(data_address)
        if replicas is None:
            raise PeerError("does not answer")
        return replicas


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_planner, "GONE_GRACE_S", 0.0)
    monkeypatch.setattr(repair_planner, "BACKOFF_S_MIN", 0.05)


def committed() -> State:
    """n0 and n1 own a rank of two shards each, n2 holds all of it; n3 and n4 have nothing."""
    state = cluster()
    assert apply(state, commit(5, RANKS)).ok
    for name in ("n3", "n4"):
        assert apply(state, register(name)).ok
    return state


def down(state: State, name: str) -> None:
    assert apply(state, set_state(Ref.of(state.nodes[name]), "DOWN")).ok


def play(state: State, story: Callable[[Repairs, OneVoter, Nodes], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        engine, nodes = OneVoter(state), Nodes()
        repairs = Repairs(Config(node_id="n0"), engine, nodes, unwell=frozenset)  # type: ignore[arg-type]
        running = asyncio.create_task(repairs.run())
        try:
            async with asyncio.timeout(30):
                await story(repairs, engine, nodes)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert nodes.running == 0 and repairs.redundancy().repairing == 0

    asyncio.run(whole())


async def eventually(repairs: Repairs, condition: Callable[[], bool]) -> None:
    while not condition():
        repairs.changed()
        await asyncio.sleep(0.01)


def holders(state: State) -> set[str]:
    (kept,) = state.jobs["gpt"].steps
    return {holder.node_id for record in kept.ranks for one in record.shards for holder in one.holders}


def test_orders_to_a_node_that_dies_are_called_off() -> None:
    state = committed()
    down(state, "n2")
    down(state, "n4")

    async def story(repairs: Repairs, engine: OneVoter, nodes: Nodes) -> None:
        nodes.hangs = {"n3:2"}
        nodes.fails = {"n0:2", "n1:2"}
        await eventually(repairs, lambda: nodes.running == 1)
        down(state, "n3")
        await eventually(repairs, lambda: repairs.redundancy().repairing == 0)
        assert nodes.running == 0

    play(state, story)


def test_copies_that_could_not_be_committed_are_committed_later_without_being_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastcheckd.registry.repairs.PROPOSE_RETRY_S", 0.01)
    state = committed()
    down(state, "n2")

    async def story(repairs: Repairs, engine: OneVoter, nodes: Nodes) -> None:
        engine.cut = True
        await eventually(repairs, lambda: len(nodes.fetched) >= 2)
        made = len(nodes.fetched)
        engine.cut = False
        await eventually(repairs, lambda: repairs.redundancy().short_shards == 0)
        assert len(nodes.fetched) == 4 and made <= 4

    play(state, story)


def test_a_node_that_says_it_lost_a_shard_is_replaced_as_its_holder() -> None:
    state = committed()

    async def story(repairs: Repairs, engine: OneVoter, nodes: Nodes) -> None:
        lost = ShardId("gpt", 5, 0, 1)
        lives = [Ref("n2", 3), Ref("n2", 2), Ref("n4", 5)]
        await repairs.mark_lost(RecordedReplica(lost, ref) for ref in lives)
        # The record names the first one alone.
        assert [is_lost(state, RecordedReplica(lost, ref)) for ref in lives] == [True, None, None]
        assert repairs.redundancy().short_shards == 1
        await eventually(repairs, lambda: repairs.redundancy().short_shards == 0)
        assert [shard for _, shard in nodes.fetched] == [lost]
        left = state.jobs["gpt"].steps[0].ranks[0].shards[1].holders
        assert [holder.node_id for holder in left] != ["n2"] and len(left) == 1

    play(state, story)


def test_what_a_node_does_not_hold_any_more_is_found_by_asking_it() -> None:
    state = committed()

    async def story(repairs: Repairs, engine: OneVoter, nodes: Nodes) -> None:
        def replica(rank: int, shard: int) -> peer_pb2.Replica:
            return peer_pb2.Replica(key=pb.ShardKey(job="gpt", step=5, rank=rank, shard=shard), digest=DIGEST)

        nodes.holds["n2:2"] = [replica(0, 0), replica(0, 1), replica(1, 0)]  # rank 1's shard 1 is gone
        await eventually(repairs, lambda: len(nodes.fetched) == 1)
        assert nodes.fetched[0][1] == ShardId("gpt", 5, 1, 1)

    play(state, story)
