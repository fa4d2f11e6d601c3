"""Three voters of one process, their wire in the test's hand."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from fastcheckd.config import Config, Voter
from fastcheckd.errors import NoQuorumError
from fastcheckd.registry.inprocess import Disk, InProcessRaft

NAMES = ("a", "b", "c")
VOTERS = tuple(
    Voter(node_id=n, registry_address=f"127.0.0.1:{7000 + i}", raft_address=f"127.0.0.1:{7100 + i}")
    for i, n in enumerate(NAMES)
)
DEADLINE_S = 20.0


class Cluster:
    """Voters, and which of them are cut off."""

    def __init__(self):
        self.disks = {name: Disk() for name in NAMES}
        self.cut = set()
        self.applied = {name: [] for name in NAMES}
        self.rafts = {}
        for name in NAMES:
            self.start(name)

    def start(self, name, snapshot_odds=0.0):
        raft = InProcessRaft(
            Config(node_id=name, voters=VOTERS, raft_key_file=Path("unused")),
            lambda: None,
            disk=self.disks[name],
            wire=self,
            rng=random.Random(name),
            on_applied=lambda index, command, result, state: self.applied[name].append((index, command)),
            snapshot_odds=snapshot_odds,
        )
        self.rafts[name] = raft
        raft.start()

    def stop(self, name):
        self.rafts.pop(name).close()
        self.applied[name].clear()

    def send(self, sender, receiver, message):
        if not {sender, receiver} & self.cut and receiver in self.rafts:
            asyncio.get_running_loop().call_soon(self.rafts[receiver].receive, message)

    async def leader(self, among=NAMES):
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for name in among:
                    if name in self.rafts and self.rafts[name].is_leader:
                        return name, self.rafts[name]
                await asyncio.sleep(0.02)

    def close(self):
        for raft in self.rafts.values():
            raft.close()


def drain(node_id):
    return {"type": "set_draining", "node_id": node_id, "draining": True, "at_ms": 0}


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


def run(story):
    async def told():
        cluster = Cluster()
        try:
            await story(cluster)
        finally:
            cluster.close()

    asyncio.run(told())


def test_what_a_leader_commits_every_voter_applies_in_the_same_order():
    async def story(cluster):
        _, leader = await cluster.leader()
        for number in range(5):
            await leader.propose(drain(f"node-{number}"))
        await until(lambda: all(len(cluster.applied[n]) == 5 for n in NAMES))
        assert cluster.applied["a"] == cluster.applied["b"] == cluster.applied["c"]

    run(story)


def test_a_leader_that_is_cut_off_commits_nothing_and_steps_down_in_the_end():
    async def story(cluster):
        name, leader = await cluster.leader()
        cluster.cut = {name}
        assert leader.is_leader  # it does not know yet
        with pytest.raises(NoQuorumError):
            await leader.propose(drain("lost"), timeout_s=0.3)
        await until(lambda: not leader.is_leader)
        other, successor = await cluster.leader([n for n in NAMES if n != name])
        await successor.propose(drain("kept"))
        cluster.cut = set()
        await until(lambda: len(cluster.applied[name]) == 1)
        assert [c["node_id"] for _, c in cluster.applied[name]] == ["kept"]
        assert cluster.applied[name] == cluster.applied[other]

    run(story)


def test_a_voter_that_restarts_has_its_log_and_catches_up():
    async def story(cluster):
        name, leader = await cluster.leader()
        await leader.propose(drain("before"))
        follower = next(n for n in NAMES if n != name)
        cluster.stop(follower)
        await leader.propose(drain("meanwhile"))
        cluster.start(follower)
        await until(lambda: [c["node_id"] for _, c in cluster.applied[follower]] == ["before", "meanwhile"])

    run(story)


def test_what_was_committed_survives_the_loss_of_its_leader():
    async def story(cluster):
        name, leader = await cluster.leader()
        await leader.propose(drain("kept"))
        cluster.stop(name)
        _, successor = await cluster.leader()
        await successor.propose({"type": "noop"})
        assert [c["node_id"] for _, c in cluster.applied[successor._voter.node_id] if "node_id" in c] == [
            "kept"
        ]

    run(story)


def test_a_voter_that_wrote_a_snapshot_starts_from_it():
    async def story(cluster):
        _, leader = await cluster.leader()
        node = {
            "node_id": "n", "agent_address": "n:1", "data_address": "n:2", "lane_address": "n:3",
            "voter": False, "ram_budget_bytes": 1,
        }  # fmt: skip
        command = {"type": "register", "node": node, "life_id": "life", "at_ms": 0}
        follower = next(n for n in NAMES if cluster.rafts[n] is not leader)
        cluster.stop(follower)
        cluster.start(follower, snapshot_odds=1.0)
        await leader.propose(command)
        await until(lambda: cluster.disks[follower].snapshot_index)
        cluster.stop(follower)
        cluster.start(follower)
        assert cluster.rafts[follower].read(lambda state: list(state["nodes"])) == ["n"]
        assert cluster.applied[follower] == []

    run(story)
