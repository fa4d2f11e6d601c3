"""Three real engines, pysyncobj and all, and messages that come twice, late, or from a leader that is over."""

from __future__ import annotations

import asyncio
import random

import pytest
from pysyncobj.syncobj import _RAFT_STATE
from pysyncobj.tcp_connection import CONNECTION_STATE
from tests.simulation import voter
from tests.simulation.machine import World
from tests.simulation.run import left_alone
from tests.simulation.voter import grounded

from fastcheckd.registry.commands import noop
from fastcheckd.registry.model import SCHEMA
from fastcheckd.registry.raft import snapshots
from fastcheckd.registry.raft.transport import CONNECT_S, KEEP_ALIVE_S, VoterNode


class Lab:
    """Voters without nodes or jobs; a test says what they hear."""

    def __init__(self):
        self.world = World(7, 1, nodes=3)
        for machine in self.world.machines.values():
            machine.install_registry()

    def run(self, story):
        """Run a coroutine; what `World` checks of every change must hold, too."""
        loop = self.world.loop
        random.seed(7)
        asyncio.set_event_loop(loop)
        with left_alone():
            try:
                with grounded(loop, self.world.hosts, self.world.rng("challenges")):
                    loop.run_until_complete(story(self))
            finally:
                asyncio.set_event_loop(None)
                loop.close()
        assert self.world.truth.violation is None, self.world.truth.violation
        assert loop.errors == []

    async def until(self, condition, seconds=10.0):
        give_up_at = self.world.loop.now + seconds
        while not condition():
            assert self.world.loop.now < give_up_at, "did not come true"
            await asyncio.sleep(0.01)

    def start(self):
        for machine in self.machines():
            machine.start()

    def machines(self):
        return list(self.world.machines.values())

    def leaders(self):
        return [m for m in self.machines() if m.process("registry") and m.raft.is_leader]

    async def led(self):
        """The leader, and the two others, when all have the same entries and have agreed on their schema."""
        await self.until(self.leaders)
        await self.until(
            lambda: all(m.raft.read(lambda state: state.schema) == SCHEMA for m in self.machines())
        )
        (leader,) = self.leaders()
        others = [machine for machine in self.machines() if machine is not leader]
        for machine in others:
            await self.until(lambda machine=machine: self.same(machine, leader))
        await asyncio.sleep(0.5)
        return leader, *others

    def same(self, one, other):
        return self.log(one)[-1] == self.log(other)[-1]

    async def propose(self, machine, count):
        """So many commands are committed."""
        for _ in range(count):
            process = machine.process("registry")
            await process.start(machine.raft.propose(noop()))

    def log(self, machine):
        return machine.raft._engine.journal[:]

    def cut_off(self, machine):
        names = self.world.machines
        self.world.network.weather.cut |= {
            link
            for name in names
            if name != machine.name
            for link in ((name, machine.name), (machine.name, name))
        }

    def hears(self, machine, sender, **message):
        """A voter's message reaches another one, whenever it was sent."""
        engine = machine.raft._engine
        node = VoterNode(sender.config.own_voter)
        process = machine.process("registry")
        process.context.run(engine._SyncObj__onMessageReceived, node, message)

    def append(self, leader, begin, count, **more):
        """What the leader sends, or sent: so many of its entries from an index on."""
        engine, log = leader.raft._engine, self.log(leader)
        at = begin - log[0][1]
        return {
            "type": "append_entries",
            "term": engine.raftCurrentTerm,
            "commit_index": engine.raftCommitIndex,
            "prevLogIdx": begin - 1,
            "prevLogTerm": log[at - 1][2],
            "entries": log[at : at + count],
        } | more


@pytest.fixture(autouse=True)
def no_compaction(monkeypatch):
    monkeypatch.setattr(voter, "COMPACTION_ODDS", 0.0)


@pytest.mark.parametrize("count", [3, 0], ids=["entries", "a heartbeat"])
def test_an_append_that_comes_late_or_twice_deletes_nothing(count):
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        await lab.propose(leader, 9)
        await lab.until(lambda: lab.same(follower, leader))
        log, disk = lab.log(follower), bytes(follower.platter.files["log"].data)
        lab.hears(follower, leader, **lab.append(leader, log[-6][1], count))
        assert lab.log(follower) == log and bytes(follower.platter.files["log"].data) == disk
        assert lab.world.consensus.cuts == 0

    Lab().run(story)


def test_a_committed_command_survives_a_late_append_and_the_loss_of_the_leader():
    """The third voter was away; the leader's first batch comes once more to the second, and then the leader is lost."""

    async def story(lab):
        lab.start()
        leader, follower, away = await lab.led()
        first = lab.log(leader)[-1][1] + 1
        lab.cut_off(away)
        await lab.propose(leader, 6)
        committed = lab.log(leader)
        assert leader.raft._engine.raftCommitIndex == first + 5
        lab.hears(follower, leader, **lab.append(leader, first, 3))
        leader.crash(wipe=False)
        lab.world.network.weather.clear()
        await lab.until(lambda: [m for m in lab.leaders() if m is not leader])
        (newer,) = [m for m in lab.leaders() if m is not leader]
        await lab.propose(newer, 1)
        assert newer is follower, "the other one has not got them"
        assert set(committed[-6:]) <= set(lab.log(newer))
        await lab.until(lambda: lab.same(away, newer))

    Lab().run(story)


def test_what_differs_goes_and_what_matches_before_it_stays():
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        await lab.propose(leader, 2)
        await lab.until(lambda: lab.same(follower, leader))
        # Two entries of a leader that nobody followed.
        journal, last, term = follower.raft._engine.journal, lab.log(leader)[-1], leader.raft.term
        for number in (1, 2):
            journal.add(b"\x01", last[1] + number, term - 1)
        message = lab.append(leader, last[1], 1)
        newer = (b"\x01", last[1] + 1, term)
        lab.hears(follower, leader, **message | {"entries": [last, newer]})
        assert lab.log(follower)[-2:] == [last, newer]

    Lab().run(story)


def test_only_what_was_compared_counts_as_committed():
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        await lab.propose(leader, 3)
        await lab.until(lambda: lab.same(follower, leader))
        engine, last = follower.raft._engine, lab.log(leader)[-1]
        engine.journal.add(b"\x01", last[1] + 1, leader.raft.term - 1)
        lab.hears(follower, leader, **lab.append(leader, last[1] + 1, 0, commit_index=last[1] + 9))
        assert engine.raftCommitIndex == last[1], "the entry behind it is of another leader"

    Lab().run(story)


def test_a_snapshot_that_comes_late_or_twice_takes_nothing_back():
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        await lab.propose(leader, 3)
        await lab.until(lambda: lab.same(follower, leader))
        before, last = lab.log(leader)[-2:]
        state = leader.raft.read(lambda state: state)
        data = snapshots.to_bytes(last, before, state, leader.raft._committed)
        await lab.propose(leader, 3)
        await lab.until(lambda: lab.same(follower, leader))
        log, applied = lab.log(follower), follower.raft._engine.raftLastApplied
        half = len(data) // 2
        for piece in ((data[:half], True, False), (data[half:], False, True)):
            lab.hears(
                follower,
                leader,
                type="append_entries",
                term=leader.raft.term,
                commit_index=last[1],
                serialized=piece,
            )
        assert lab.log(follower) == log and follower.raft._engine.raftLastApplied == applied

    Lab().run(story)


def test_a_snapshot_with_a_changed_byte_is_not_taken_and_the_one_on_disk_stays():
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        await lab.propose(leader, 3)
        await lab.until(lambda: "snapshot" in follower.platter.files)
        term, state = leader.raft.term, leader.raft.read(lambda state: state)
        far = (b"\x01", 900, term), (b"\x01", 901, term)
        data = bytearray(snapshots.to_bytes(far[1], far[0], state, leader.raft._committed))
        data[len(data) // 2] ^= 1
        log, kept = lab.log(follower), bytes(follower.platter.files["snapshot"].data)
        lab.hears(
            follower,
            leader,
            type="append_entries",
            term=term,
            commit_index=1,
            serialized=(bytes(data), True, True),
        )
        assert lab.log(follower) == log and bytes(follower.platter.files["snapshot"].data) == kept

    Lab().run(story)


def test_an_answer_to_an_earlier_leadership_counts_for_nothing():
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        engine, node = leader.raft._engine, VoterNode(follower.config.own_voter)
        matched = engine._SyncObj__raftMatchIndex[node]
        answer = {"type": "next_node_idx", "next_node_idx": 99, "reset": False, "success": True}
        lab.hears(leader, follower, **answer, term=leader.raft.term - 1)
        assert engine._SyncObj__raftMatchIndex[node] == matched

    Lab().run(story)


def test_a_vote_counts_once():
    async def story(lab):
        lab.start()
        leader, follower, other = await lab.led()
        for machine in (leader, other):
            lab.cut_off(machine)
        engine = follower.raft._engine
        await lab.until(lambda: engine._SyncObj__raftState == _RAFT_STATE.CANDIDATE)
        engine._SyncObj__otherNodes |= {
            VoterNode(["x", "10.0.0.8:1", "10.0.0.8:2"]),
            VoterNode(["y", "y:1", "10.0.0.9:2"]),
        }
        for _ in range(3):
            lab.hears(follower, other, type="response_vote", term=engine.raftCurrentTerm)
        assert engine._SyncObj__raftState == _RAFT_STATE.CANDIDATE, "two of five are no majority"

    Lab().run(story)


def test_a_leader_that_contradicts_what_was_committed_is_not_followed():
    async def story(lab):
        lab.start()
        leader, follower, _ = await lab.led()
        await lab.propose(leader, 3)
        await lab.until(lambda: follower.raft._engine.raftCommitIndex == leader.raft._engine.raftCommitIndex)
        log = lab.log(follower)
        message = lab.append(leader, log[-1][1], 0, term=99)
        other = (b"\x01", log[-1][1], 98)
        lab.hears(follower, leader, **message | {"entries": [other]})
        assert "was committed here" in follower.raft.failure and lab.log(follower) == log

    Lab().run(story)


def test_voters_whose_machines_boot_are_found_at_once():
    """Two lose their power; the third asks for them in vain for as long as TCP then waits before it asks again."""

    async def story(lab):
        lab.start()
        await lab.led()
        *gone, alone = lab.machines()
        assert all(VoterNode(alone.config.own_voter).id > VoterNode(m.config.own_voter).id for m in gone), (
            "it is the one that connects"
        )
        for machine in gone:
            machine.crash(wipe=False, power_cut=True)
        connections = alone.raft._engine._SyncObj__transport._connections.values()
        await lab.until(lambda: all(c.state == CONNECTION_STATE.CONNECTING for c in connections))
        await asyncio.sleep(3.2)
        gone[0].start()
        await lab.until(lambda: any(c.authenticated for c in connections), CONNECT_S + KEEP_ALIVE_S + 0.1)

    Lab().run(story)
