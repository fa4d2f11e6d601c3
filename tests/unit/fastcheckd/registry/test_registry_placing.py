"""The leader's placements over the replicated state: who is taken, who stays, and what is said of domains."""

import asyncio

import pytest
from tests.unit.fastcheckd.registry.small_cluster import (
    DIGEST,
    apply,
    commit,
    open_rank,
    record,
    register,
    set_state,
)

from fastcheck_proto.v1 import registry_pb2
from fastcheckd.config import Config, Voter
from fastcheckd.errors import PlacementError
from fastcheckd.health.detector import FailureDetector
from fastcheckd.registry.leader import Leader
from fastcheckd.registry.model import Ref, State
from fastcheckd.registry.reports import Reports


class OneProcess:
    """The engine's promise with nobody else to agree with."""

    failure = None
    is_leader = True
    term = 1
    leader = Voter(node_id="n0", registry_address="h:1", raft_address="h:2")
    voters = (leader,)

    def __init__(self):
        self.state = State()

    def read(self, reader):
        return reader(self.state)

    async def propose(self, command, *, timeout_s=4.0):
        return apply(self.state, command)


class Registry:
    def __init__(self, nodes, **config):
        self.engine = OneProcess()
        self.config = Config(cluster_id="c", node_id="n0", **config)
        reports = Reports(self.engine, self.config)
        detector = FailureDetector(suspect_after_s=1.0, down_after_s=2.0)
        self.leader = Leader(self.config, self.engine, reports, detector, lambda: None, wall_ms=lambda: 0)
        for node_id, rack in nodes.items():
            self.register(node_id, rack)
        self.step = 0

    @property
    def state(self):
        return self.engine.state

    def register(self, node_id, rack=""):
        life_id = f"{node_id}-{self.state.next_incarnation}"
        assert apply(self.state, register(node_id, life_id, labels={"rack": rack} if rack else {})).ok

    def ref(self, node_id):
        return Ref.of(self.state.nodes[node_id])

    def becomes(self, node_id, state):
        assert apply(self.state, set_state(self.ref(node_id), state, "test")).ok

    def open(self, owner="n0"):
        return apply(self.state, open_rank("gpt", 0, 1, "c", self.ref(owner))).session

    def place(self, owner="n0", avoid=(), state_bytes=30 << 20):
        self.step += 1

        request = registry_pb2.PlaceRequest(
            job="gpt", step=self.step, rank=0, world_size=1, session=self.open(owner),
            owner=self.ref(owner).message(), state_bytes=state_bytes, chunk_bytes=1 << 20,
            avoid=avoid, oldest_step=self.step,
        )  # fmt: skip

        async def on_a_loop():
            return self.leader.place(request)

        return asyncio.run(on_a_loop())

    def commit(self, placement, owner="n0"):
        made = record(0, self.open(owner), self.ref(owner), [], sum(p.bytes for p in placement.shards))
        del made.shards[:]
        for p in placement.shards:
            nodes = [holder.node for holder in p.holders]
            made.shards.add(shard=p.shard, offset=p.offset, bytes=p.bytes, digest=DIGEST, holders=nodes)
        result = apply(self.state, commit(self.step, [made], 1, tolerate=self.config.tolerate))
        assert result.ok, result


def names_of(shard):
    return tuple(holder.node.node_id for holder in shard.holders)


def holders(placement):
    return [names_of(planned) for planned in placement.shards]


def plain(count):
    return {f"n{n}": "" for n in range(count)}


def test_nodes_that_come_and_go_do_not_move_a_rank():
    registry = Registry(plain(6))
    first = registry.place()
    registry.commit(first)
    for node_id in ("a-new-one", "m-new-one", "z-new-one"):
        registry.register(node_id)
    used = {h for names in holders(first) for h in names}
    registry.becomes(next(n for n in plain(6) if n != "n0" and n not in used), "DOWN")
    assert holders(registry.place()) == holders(first)


@pytest.mark.parametrize("state", ["DOWN", "DRAINING"])
def test_a_holder_that_is_down_or_draining_is_replaced_and_it_alone(state):
    registry = Registry(plain(8))
    first = registry.place()
    registry.commit(first)
    lost = names_of(first.shards[1])[0]
    registry.becomes(lost, state)
    second = registry.place()
    for old, new in zip(holders(first), holders(second), strict=True):
        assert new == old if lost not in old else lost not in new


def test_a_suspect_or_an_avoided_holder_gets_nothing_while_others_can():
    registry = Registry(plain(8))
    first = registry.place()
    registry.commit(first)
    suspect, avoided = names_of(first.shards[0])[0], names_of(first.shards[1])[0]
    registry.leader.arbiter.avoided = frozenset({registry.ref(suspect)})
    second = registry.place(avoid=[avoided])
    assert not {suspect, avoided} & {h for names in holders(second) for h in names}
    assert second.shards[2].holders == first.shards[2].holders


def test_an_older_life_of_a_suspect_does_not_count():
    registry = Registry(plain(2))
    registry.leader.arbiter.avoided = frozenset({("n1", 0)})
    assert holders(registry.place()) == [("n1",)]


def test_a_second_step_goes_where_the_first_one_is_still_on_its_way_to():
    registry = Registry(plain(8))
    first = registry.place(avoid=["n1", "n2", "n3"])
    assert holders(registry.place()) == holders(first)


def test_copies_lie_in_other_racks_where_the_nodes_allow_it_and_else_it_is_said():
    racks = {f"n{n}": f"r{n % 2}" for n in range(8)}
    registry = Registry(racks, labels={"rack": "r0"}, failure_domain="rack")
    placement = registry.place()
    assert not placement.domains_short
    assert {racks[h] for names in holders(placement) for h in names} == {"r1"}
    for node_id, rack in racks.items():
        if rack == "r1":
            registry.becomes(node_id, "DOWN")
    assert (registry.place()).domains_short


def test_too_few_nodes_that_are_up_is_an_error():
    registry = Registry(plain(3), tolerate=2)
    assert len(registry.place().shards[0].holders) == 2
    registry.becomes("n2", "DRAINING")
    with pytest.raises(PlacementError, match="only 1"):
        registry.place()
