"""The leader's placements over the replicated state: who is taken, who stays, and what is said of domains."""

import asyncio

import pytest

from fastcheckd.config import Config, Voter
from fastcheckd.errors import PlacementError
from fastcheckd.health.detector import FailureDetector
from fastcheckd.registry.leader import Leader
from fastcheckd.registry.reports import Reports
from fastcheckd.registry.state import apply, new_state


class OneProcess:
    """The engine's promise with nobody else to agree with."""

    failure = None
    is_leader = True
    term = 1
    leader = Voter(node_id="n0", registry_address="h:1", raft_address="h:2")
    voters = (leader,)

    def __init__(self):
        self.state = new_state()

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
        address = {f"{kind}_address": f"{node_id}:{i}" for i, kind in enumerate(("agent", "data", "lane"), 1)}
        node = {"node_id": node_id, "voter": False, "ram_budget_bytes": 1 << 30, "labels": {}, **address}
        life_id = f"{node_id}-{self.state['next_incarnation']}"
        assert apply(self.state, {"type": "register", "node": node, "life_id": life_id, "at_ms": 1})["ok"]
        self.state["nodes"][node_id]["labels"] = {"rack": rack} if rack else {}

    def ref(self, node_id):
        return [node_id, self.state["nodes"][node_id]["incarnation"]]

    def becomes(self, node_id, state):
        command = {
            "type": "set_state",
            "node": self.ref(node_id),
            "state": state,
            "reason": "test",
            "at_ms": 1,
        }
        assert apply(self.state, command)["ok"]

    def open(self, owner="n0"):
        command = {
            "type": "open_rank", "job": "gpt", "rank": 0, "world_size": 1, "client": "c", "node": self.ref(owner),
        }  # fmt: skip
        return apply(self.state, command)["session"]

    def place(self, owner="n0", avoid=(), state_bytes=30 << 20):
        self.step += 1

        async def on_a_loop():
            return self.leader.place(**request)

        request = {
            "job": "gpt", "step": self.step, "rank": 0, "world_size": 1, "session": self.open(owner),
            "owner": self.ref(owner), "state_bytes": state_bytes, "chunk_bytes": 1 << 20,
            "avoid": avoid, "oldest_step": self.step,
        }  # fmt: skip
        return asyncio.run(on_a_loop())

    def commit(self, placement, owner="n0"):
        shards = [
            {
                "offset": p.offset,
                "bytes": p.size_bytes,
                "digest": "00" * 16,
                "holders": [self.ref(h) for h in p.holders],
            }
            for p in placement.shards
        ]
        record = {
            "rank": 0, "session": self.open(owner), "owner": self.ref(owner),
            "state_bytes": sum(p.size_bytes for p in placement.shards), "shards": shards,
        }  # fmt: skip
        command = {
            "type": "commit", "job": "gpt", "step": self.step, "world_size": 1, "epoch": self.state["epoch"],
            "tolerate": self.config.tolerate, "keep_steps": 2, "ranks": [record],
        }  # fmt: skip
        result = apply(self.state, command)
        assert result["ok"], result


def holders(placement):
    return [planned.holders for planned in placement.shards]


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
    lost = first.shards[1].holders[0]
    registry.becomes(lost, state)
    second = registry.place()
    for old, new in zip(holders(first), holders(second), strict=True):
        assert new == old if lost not in old else lost not in new


def test_a_suspect_or_an_avoided_holder_gets_nothing_while_others_can():
    registry = Registry(plain(8))
    first = registry.place()
    registry.commit(first)
    suspect, avoided = first.shards[0].holders[0], first.shards[1].holders[0]
    registry.leader.arbiter.avoided = frozenset({tuple(registry.ref(suspect))})
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
    assert len((registry.place()).shards[0].holders) == 2
    registry.becomes("n2", "DRAINING")
    with pytest.raises(PlacementError, match="only 1"):
        registry.place()
