"""Voters replaced in the log: what every voter goes by afterwards, restarts and half-done changes included."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from tests.eventually import eventually
from tests.sockets import free_address
from tests.unit.fastcheckd.registry import small_cluster
from tests.unit.fastcheckd.registry.small_cluster import set_state

from fastcheck_proto.v1 import node_pb2, registry_pb2
from fastcheckd.config import Config, Voter
from fastcheckd.errors import ConfigError, InvalidRequestError, NoQuorumError, UnsafeError
from fastcheckd.registry import commands
from fastcheckd.registry.model import SCHEMA
from fastcheckd.registry.raft import adapter as raft_module
from fastcheckd.registry.raft.adapter import Raft
from fastcheckd.registry.raft.membership import (
    Change,
    enough_without,
    voter_of,
    voter_to_list,
    voters_after,
)
from fastcheckd.registry.state import snapshot
from fastcheckd.registry.voters import add_voters, plan, plan_added, replace_voter


def voter(name):
    return Voter(node_id=name, registry_address=free_address(), raft_address=free_address())


class House:
    """Voters in this process, each with a folder of its own."""

    def __init__(self, folder, count=3):
        self.folder = folder
        self.first = tuple(voter(f"v{i}") for i in range(count))
        self.running = {}
        self.key = folder / "key"
        self.key.write_bytes(b"k" * 32)
        self.key.chmod(0o600)

    def config(self, who, voters):
        return Config(
            cluster_id="test",
            node_id=who.node_id,
            voters=voters,
            raft_key_file=self.key,
            state_dir=self.folder / who.raft_address,
        )

    def start(self, who, voters=None, *, joining=False):
        config = self.config(who, voters or self.first)
        if joining:
            (config.state_dir / "registry").mkdir(parents=True)
            (config.state_dir / "registry" / "JOIN").touch()
        raft = Raft(config, lambda: None)
        raft.start()
        self.running[who] = raft
        return raft

    def stop(self, who):
        self.running.pop(who).close()

    @property
    def leader(self):
        return next((raft for raft in self.running.values() if raft.is_leader), None)

    async def commit(self, command=None):
        """Commit at whoever leads."""
        end = asyncio.get_running_loop().time() + 30
        while True:
            await eventually(lambda: self.leader)
            try:
                return await self.leader.propose(command or commands.noop())
            except NoQuorumError:
                assert asyncio.get_running_loop().time() < end

    def follower(self):
        return next(who for who, raft in self.running.items() if not raft.is_leader)

    async def replace(self, old, new):
        end = asyncio.get_running_loop().time() + 40
        while True:
            await eventually(lambda: self.leader)
            try:
                return await self.leader.replace_member(old, new, timeout_s=10)
            except (NoQuorumError, UnsafeError):  # just elected: it has not heard the others yet
                assert asyncio.get_running_loop().time() < end
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def house(folder, count=3):
    built = House(folder, count)
    try:
        for who in built.first:
            built.start(who)
        await built.commit()
        yield built
    finally:
        for who in list(built.running):
            built.stop(who)


def register(node_id):
    return small_cluster.register(node_id, agent_address="127.0.0.1:1")


@pytest.mark.parametrize(("compact", "leader_goes"), [(False, True), (True, False)])
def test_a_voter_is_replaced_and_the_new_one_counts(tmp_path, compact, leader_goes):
    async def scenario():
        async with house(tmp_path) as h:
            for i in range(10):
                await h.commit(register(f"n{i}"))
            old = next(w for w, r in h.running.items() if r is h.leader) if leader_goes else h.follower()
            h.stop(old)
            await h.commit()
            if compact:
                for raft in h.running.values():
                    raft._engine.forceLogCompaction()
                    await eventually(lambda raft=raft: len(raft._engine.journal) <= 3)
            new = voter("new")
            after = [*(w for w in h.first if w != old), new]
            late = h.start(new, tuple(after), joining=True)
            await asyncio.sleep(1.5)  # longer than any election timeout
            assert late.term == 0, "it does not campaign before it is one of them"
            await h.replace(old, new)
            assert not (tmp_path / new.raft_address / "registry" / "JOIN").exists() or late._joining
            for raft in h.running.values():
                await eventually(lambda raft=raft: set(raft.voters) == set(after))
            await h.replace(old, new)  # said again, it is done

            # Now the new one is needed for a majority.
            h.stop(next(w for w in h.running if w != new))
            await h.commit(register("later"))
            await eventually(lambda: late.read(lambda s: "later" in s.nodes))

            # All stop, and start with the config of the first day.
            for who in list(h.running):
                h.stop(who)
            for who in after:
                h.start(who, h.first if who != new else tuple(after))
            await h.commit()
            for raft in h.running.values():
                assert set(raft.voters) == set(after)
            # The one that was replaced comes back with its old log and config: nobody hears it.
            term = h.leader.term
            ghost = h.start(old)
            await h.commit()
            await asyncio.sleep(1.5)
            assert h.leader.term == term and ghost.leader is None
            h.stop(old)
            # And the new one goes on through compaction and a restart of its own.
            h.running[new]._engine.forceLogCompaction()
            await eventually(lambda: len(h.running[new]._engine.journal) <= 3)
            h.stop(new)
            await h.commit()
            again = h.start(new, h.first if new in h.first else tuple(after))
            await eventually(lambda: again.leader is not None)
            assert set(again.voters) == set(after)
            # Each snapshot says who votes.
            wanted = h.leader.read(snapshot)
            await eventually(lambda: again.read(snapshot) == wanted)

    asyncio.run(scenario())


def test_one_change_at_a_time_and_none_without_a_majority(tmp_path):
    async def scenario():
        async with house(tmp_path) as h:
            own = next(w for w, r in h.running.items() if r is h.leader)
            a, b = (w for w in h.first if w != own)
            new = voter("new")
            with pytest.raises(InvalidRequestError, match="cannot replace itself"):
                await h.leader.replace_member(own, new, timeout_s=5)
            # `a` lives and makes the majority: without it, and with `b` gone, nothing could be committed.
            h.stop(b)
            await eventually(lambda: len(h.leader._engine.healthy(1.0)) == 2)
            with pytest.raises(UnsafeError, match=f"without {a.node_id} too few"):
                await h.leader.replace_member(a, new, timeout_s=5)
            assert set(h.leader.voters) == set(h.first), "nothing was changed"
            h.start(b)
            await eventually(lambda: len(h.leader._engine.healthy(1.0)) == 3)
            h.stop(a)
            # Two changes at once at the engine: the second is refused, not queued behind the first.
            await eventually(lambda: h.leader is not None and len(h.leader._engine.healthy(1.0)) == 2)
            engine, answers = h.leader._engine, []
            for change in (Change("rem", a), Change("add", new)):
                engine.change(change, lambda _, reason: answers.append(reason))
            await eventually(lambda: len(answers) == 2)
            assert sorted(answers) == [
                raft_module.FAIL_REASON.SUCCESS,
                raft_module.FAIL_REASON.REQUEST_DENIED,
            ]

    asyncio.run(scenario())


def test_a_half_done_replacement_is_completed_by_the_next_leader(tmp_path):
    async def scenario():
        async with house(tmp_path, 5) as h:
            old = h.follower()
            h.stop(old)
            new = voter("new")
            after = [*(w for w in h.first if w != old), new]
            await eventually(lambda: h.leader and len(h.leader._engine.healthy(1.0)) == 4)
            done = []
            h.leader._engine.change(Change("rem", old), lambda _, reason: done.append(reason))
            await eventually(lambda: done == [0])
            h.stop(next(w for w, r in h.running.items() if r is h.leader))  # and it dies
            await h.commit()
            assert len(h.leader.voters) == 4
            h.start(new, tuple(after), joining=True)
            await h.replace(old, new)
            assert set(h.leader.voters) == set(after)

    asyncio.run(scenario())


def test_a_voter_goes_by_its_log_before_anything_is_committed(tmp_path):
    """An entry that removes a voter counts at a restart, though nobody has said that it is committed."""
    h = House(tmp_path)
    who, gone = h.first[0], h.first[2]

    async def scenario():
        h.start(who)
        await asyncio.sleep(0.3)
        journal = h.running[who]._engine.journal
        command = bytes([2]) + raft_module.pysyncobj.pickle.dumps(Change("rem", gone).to_request())
        journal.setCurrentTerm(1, None)
        journal.add(command, journal[-1][1] + 1, 1)
        h.stop(who)
        raft = h.start(who)
        assert set(raft.voters) == {who, h.first[1]}
        h.stop(who)

    asyncio.run(scenario())


def test_a_voter_whose_log_says_that_it_was_removed_does_not_start(tmp_path):
    h = House(tmp_path)
    who = h.first[0]

    async def scenario():
        h.start(who)
        journal = h.running[who]._engine.journal
        command = bytes([2]) + raft_module.pysyncobj.pickle.dumps(Change("rem", who).to_request())
        journal.setCurrentTerm(1, None)
        journal.add(command, journal[-1][1] + 1, 1)
        h.stop(who)
        with pytest.raises(ConfigError, match="is no voter any more"):
            h.start(who)

    asyncio.run(scenario())


# What decides, without a network


def test_changes_say_who_votes():
    a, b, c = (voter(n) for n in "abc")
    voters = {v.raft_address: v for v in (a, b)}
    changes = [Change("add", c), Change("rem", a)]
    after = voters_after(voters, changes)
    assert set(after.values()) == {b, c}
    for counted in range(3):  # some may be in it already
        assert voters_after(voters_after(voters, changes[:counted]), changes) == after
    assert Change.from_request(Change("add", c).to_request()) == Change("add", c)
    for bad in (
        [],
        ["add", "x", voter_to_list(c)],
        ["mul", c.raft_address, voter_to_list(c)],
        ["add", "x", [1]],
    ):
        with pytest.raises(ValueError):
            Change.from_request(bad)


@pytest.mark.parametrize(
    ("count", "healthy", "enough"), [(3, 2, True), (3, 1, False), (5, 3, True), (5, 2, False), (1, 0, False)]
)
def test_a_replacement_needs_a_majority_all_the_way(count, healthy, enough):
    voters = {v.raft_address: v for v in (voter(f"v{i}") for i in range(count))}
    gone = list(voters.values())[-1]
    up = [gone.raft_address, *list(voters)[:healthy]]
    assert enough_without(voters, gone, voter("new"), up) is enough


def request(old, new, **addresses):
    return registry_pb2.ReplaceVoterRequest(old_node_id=old, new_node_id=new, **addresses)


def node(state, host="10.0.0.9"):
    return registry_pb2.NodeRecord(
        state=registry_pb2.NodeState.Value(f"NODE_STATE_{state}"), agent_address=f"{host}:7450"
    )


VOTERS = [
    Voter(node_id=n, registry_address=f"10.0.0.{i}:7453", raft_address=f"10.0.0.{i}:7454")
    for i, n in enumerate("abc")
]


def test_the_new_voter_gets_the_old_ones_ports_unless_told_otherwise():
    nodes = {"c": node("DOWN"), "d": node("UP")}
    old, new = plan(request("c", "d"), VOTERS, nodes)
    assert old == VOTERS[2]
    assert new == Voter(node_id="d", registry_address="10.0.0.9:7453", raft_address="10.0.0.9:7454")
    _, new = plan(request("c", "d", raft_address="h:1", registry_address="h:2"), VOTERS, nodes)
    assert (new.raft_address, new.registry_address) == ("h:1", "h:2")
    same = {"c": node("UP", "10.0.0.2")}
    _, new = plan(request("c", "c", raft_address="10.0.0.2:9"), VOTERS, same)
    assert new.registry_address == VOTERS[2].registry_address
    assert plan(request("z", "a"), VOTERS, {}) == (VOTERS[0], VOTERS[0])


@pytest.mark.parametrize(
    ("old", "new", "nodes", "error", "message"),
    [
        ("z", "d", {}, InvalidRequestError, "z is no voter"),
        ("c", "d", {}, InvalidRequestError, "no node d"),
        ("c", "d", {"d": node("DOWN")}, InvalidRequestError, "must be UP"),
        ("c", "d", {"c": node("UP"), "d": node("UP")}, UnsafeError, "only a voter that is DOWN"),
        ("c", "b", {"b": node("UP")}, InvalidRequestError, "voter already"),
        ("c", "c", {"c": node("UP", "10.0.0.2")}, InvalidRequestError, "needs another raft address"),
        ("c", "d", {"d": node("UP", "10.0.0.1")}, InvalidRequestError, "taken by another voter"),
    ],
)
def test_what_does_not_fit_is_refused(old, new, nodes, error, message):
    with pytest.raises(error, match=message):
        plan(request(old, new), VOTERS, nodes)


def test_a_node_that_refuses_changes_nothing(tmp_path):
    async def scenario():
        async with house(tmp_path) as h:
            old = h.follower()
            h.stop(old)
            for name, state in ((old.node_id, "DOWN"), ("d", "UP")):
                incarnation = (await h.commit(register(name))).incarnation
                life = [name, incarnation]
                await h.commit(set_state(life, state, "test"))
            asked = []

            async def refuse(node_id, address, cluster_id, voters, version, named):
                asked.append((node_id, address, cluster_id, [v.node_id for v in voters]))
                raise InvalidRequestError("no certificate")

            wish = request(old.node_id, "d", raft_address=free_address(), registry_address=free_address())
            with pytest.raises(InvalidRequestError, match="no certificate"):
                await replace_voter(
                    h.leader, "test", wish, at_ms=1, outward=SimpleNamespace(become_voter=refuse)
                )
            assert asked[0][:3] == ("d", "127.0.0.1:1", "test") and "d" in asked[0][3]
            assert old.node_id not in asked[0][3] and set(h.leader.voters) == set(h.first)

    asyncio.run(scenario())


def wanted(*names, **addresses):
    return registry_pb2.AddVotersRequest(
        voters=[node_pb2.VoterRecord(node_id=name, **addresses) for name in names]
    )


def test_added_voters_get_the_first_ones_ports_and_make_an_odd_number():
    nodes = {"d": node("UP", "10.0.0.4"), "e": node("UP", "10.0.0.5")}
    assert plan_added(wanted("d", "e"), VOTERS[:1], nodes) == [
        Voter(node_id=n, registry_address=f"10.0.0.{i}:7453", raft_address=f"10.0.0.{i}:7454")
        for i, n in enumerate("de", 4)
    ]
    half_done = [VOTERS[0], *plan_added(wanted("d", "e"), VOTERS[:1], nodes)[:1]]
    assert [v.node_id for v in plan_added(wanted("d", "e"), half_done, nodes)] == ["d", "e"], "said again"


@pytest.mark.parametrize(
    ("names", "addresses", "message"),
    [
        (["z", "d"], {}, "no node z"),
        (["d"], {}, "that would make 2 voters"),
        (["d", "d"], {}, "taken by another voter"),
        (["d", "gone"], {}, "gone is DOWN"),
        (["d", "e"], {"raft_address": "h:1"}, "taken by another voter"),
        ([], {}, "name each new voter once"),
    ],
)
def test_what_cannot_be_added_is_refused(names, addresses, message):
    nodes = {"d": node("UP", "10.0.0.4"), "e": node("UP", "10.0.0.5"), "gone": node("DOWN")}
    with pytest.raises(InvalidRequestError, match=message):
        plan_added(wanted(*names, **addresses), VOTERS[:1], nodes)


def test_beside_a_voter_that_was_alone_one_more_may_come_and_a_third_only_while_both_are_well():
    alone, pair = ({v.raft_address: v for v in VOTERS[:n]} for n in (1, 2))
    first, second = (v.raft_address for v in VOTERS[:2])
    assert enough_without(alone, None, VOTERS[1], [first])
    assert enough_without(pair, None, VOTERS[2], [first, second])
    assert not enough_without(pair, None, VOTERS[2], [first])
    three = {v.raft_address: v for v in VOTERS}
    assert not enough_without(three, None, voter("new"), [first, second])


def test_voters_are_added_to_one_that_was_left_and_named_to_everyone(tmp_path):
    async def scenario():
        async with house(tmp_path, 1) as h:
            left = h.first[0]
            for name in ("d", "e"):
                life = [name, (await h.commit(register(name))).incarnation]
                await h.commit(set_state(life, "UP"))
            # What the registry named before most of them were lost.
            lost = [left, voter("x"), voter("y")]
            assert (await h.commit(commands.set_voters(lost, at_ms=1))).ok
            asked = {}

            async def ask(node_id, address, cluster_id, voters, version, _named):
                asked[node_id] = version, [v.node_id for v in named(h)]
                own = next(v for v in voters if v.node_id == node_id)
                if own not in h.running:
                    h.start(own, tuple(voters), joining=True)

            async def knows_schema(new, timeout_s):
                return SCHEMA if new in h.running else None

            outward = SimpleNamespace(become_voter=ask, knows_schema=knows_schema)

            wish = wanted("d", "e")
            for record in wish.voters:
                record.registry_address, record.raft_address = free_address(), free_address()
            for _ in range(2):  # said again, it is done
                after = await add_voters(h.leader, "test", wish, at_ms=1, outward=outward)
                assert [v.node_id for v in after] == ["d", "e", left.node_id]
            assert [known for _, known in asked.values()] == [[left.node_id]] * 2, (
                "of the lost nobody is told"
            )
            assert all(version == asked["d"][0] for version, _ in asked.values())
            assert set(named(h)) == set(h.leader.voters) == set(after)
            h.stop(left)
            await h.commit()

    asyncio.run(scenario())


def named(h):
    return list(map(voter_of, h.leader.read(lambda state: state.voters)))
