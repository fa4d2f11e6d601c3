"""Voters in this process: files, keys, restart, compaction, snapshots. As processes: tests/cluster."""

import asyncio
import contextlib
import dataclasses
import pickletools
import time

import pytest
from tests.eventually import eventually
from tests.sockets import free_address
from tests.unit.fastcheckd.registry.small_cluster import Command, large, register, upgrade

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1.registry_log_pb2 import RaftSnapshot
from fastcheckd.config import Config, Voter
from fastcheckd.errors import ConfigError, InvalidRequestError, NoQuorumError
from fastcheckd.registry import commands, model
from fastcheckd.registry.model import SCHEMA
from fastcheckd.registry.raft import adapter
from fastcheckd.registry.raft import disk as disk_module
from fastcheckd.registry.raft.adapter import Raft
from fastcheckd.registry.state import snapshot


@pytest.fixture
def config(tmp_path):
    voter = Voter(node_id="solo", registry_address=free_address(), raft_address=free_address())
    return Config(cluster_id="test", node_id="solo", voters=(voter,), state_dir=tmp_path / "state")


@contextlib.asynccontextmanager
async def running(config, on_change=lambda: None):
    raft = Raft(config, on_change)
    raft.start()
    try:
        await eventually(lambda: raft.is_leader)
        yield raft
    finally:
        raft.close()


def test_propose_read_and_be_told(config):
    async def scenario():
        told = asyncio.Event()
        async with running(config, told.set) as raft:
            told.clear()
            assert (await raft.propose(register("a"))).incarnation == 1
            assert raft.read(lambda state: list(state.nodes)) == ["a"]
            await asyncio.wait_for(told.wait(), 5)
            assert (await raft.propose(Command())).code == pb.ERROR_CODE_INVALID
            assert (await raft.propose(commands.noop())).ok
            assert raft.leader.node_id == "solo"
            with pytest.raises(InvalidRequestError, match="too large"):
                await raft.propose(large(9 << 20))

    asyncio.run(scenario())


def test_large_commands_and_many_at_once(config):
    async def scenario():
        async with running(config) as raft:
            results = await asyncio.gather(*(raft.propose(register(f"n{i}")) for i in range(100)))
            assert sorted(r.incarnation for r in results) == list(range(1, 101))
            assert (await raft.propose(large(7 << 20))).ok

    asyncio.run(scenario())


def test_a_restart_brings_everything_back_from_the_log_and_from_a_snapshot(config):
    async def fill(first, compact):
        async with running(config) as raft:
            for i in range(first, first + 20):
                await raft.propose(register(f"n{i}"))
            if compact:
                raft._engine.forceLogCompaction()
                await eventually(lambda: len(raft._engine.journal) <= 3)
                await raft.propose(register(f"n{first + 20}"))
            return raft.read(snapshot)

    async def look():
        async with running(config) as raft:
            await raft.propose(commands.noop())
            return raft.read(snapshot)

    first = asyncio.run(fill(0, compact=False))
    assert asyncio.run(look()) == first
    second = asyncio.run(fill(20, compact=True))
    assert asyncio.run(look()) == second
    # Nothing on disk is a pickle.
    folder = config.state_dir / "registry"
    assert RaftSnapshot.FromString((folder / "snapshot").read_bytes()[8:]).format == 3
    for path in folder.iterdir():
        with pytest.raises((ValueError, EOFError, IndexError)):
            list(pickletools.genops(path.read_bytes()))


def test_the_schema_is_in_a_snapshot_soon_so_that_no_version_that_does_not_know_it_goes_on_from_the_log(
    config, monkeypatch
):
    monkeypatch.setattr(adapter, "COMPACTION_INTERVAL_S", 0.2)

    def schema_on_disk():
        path = config.state_dir / "registry" / "snapshot"
        return RaftSnapshot.FromString(path.read_bytes()[8:]).state.schema if path.exists() else 0

    async def agree():
        async with running(config) as raft:
            assert (await raft.propose(register("a"))).ok
            await eventually(lambda: schema_on_disk() == SCHEMA)
            monkeypatch.setattr(model, "SCHEMA", SCHEMA + 1)
            assert (await raft.propose(upgrade(SCHEMA + 1))).ok
            await eventually(lambda: schema_on_disk() == SCHEMA + 1 and len(raft._engine.journal) <= 3)

    async def go_back():
        async with running(config):
            pass

    asyncio.run(agree())
    asyncio.run(go_back())  # this version goes on from it
    monkeypatch.setattr(model, "SCHEMA", SCHEMA)
    with pytest.raises(
        ConfigError, match=f"has schema {SCHEMA + 1}, this version reads {SCHEMA} to {SCHEMA}"
    ):
        asyncio.run(go_back())


def test_a_lost_log_is_for_the_operator(config):
    async def once():
        async with running(config) as raft:
            await raft.propose(register("a"))

    asyncio.run(once())
    (config.state_dir / "registry" / "log").unlink()
    with pytest.raises(ConfigError, match=r"log .* is gone.*new raft_address"):
        asyncio.run(once())


def test_a_broken_snapshot_or_another_voters_folder_is_refused(config):
    async def once(config=config):
        async with running(config):
            pass

    asyncio.run(once())
    with pytest.raises(ConfigError, match="belongs to the voter"):
        asyncio.run(once(dataclasses.replace(config, cluster_id="other")))
    (config.state_dir / "registry" / "snapshot").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be used.*Nothing was changed.*voters replace"):
        asyncio.run(once())


def test_one_changed_byte_in_a_snapshot_is_found(config):
    async def compact():
        async with running(config) as raft:
            await raft.propose(register("a"))
            raft._engine.forceLogCompaction()
            await eventually(lambda: raft._engine.journal[0][1] > 1)

    async def once():
        async with running(config):
            pass

    asyncio.run(compact())
    path = config.state_dir / "registry" / "snapshot"
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        other = bytes([whole[at] ^ 1])
        path.write_bytes(whole[:at] + other + whole[at + 1 :])
        with pytest.raises(ConfigError, match="cannot be used"):
            asyncio.run(once())
    path.unlink()
    with pytest.raises(ConfigError, match="snapshot of what was before is gone. Nothing was changed"):
        asyncio.run(once())
    path.write_bytes(whole)
    asyncio.run(once())


def test_a_folder_in_use_and_a_port_in_use_are_refused(config):
    async def scenario():
        async with running(config):
            with pytest.raises(ConfigError, match="in use by another registry"):
                Raft(config, lambda: None).start()
            other = dataclasses.replace(config, state_dir=config.state_dir / "other")
            with pytest.raises(ConfigError, match=r"raft_address.*port") as caught:
                Raft(other, lambda: None).start()
            assert config.voters[0].raft_address in str(caught.value)

    asyncio.run(scenario())


def test_the_key_is_checked(config, tmp_path):
    async def start(config):
        async with running(config):
            pass

    asyncio.run(start(config))
    own = config.state_dir / "raft.key"
    assert own.stat().st_mode & 0o777 == 0o600 and len(own.read_bytes()) == 32

    # Several need a key, which the config checks already: tests/unit/fastcheckd/test_config.py.
    more = tuple(
        Voter(node_id=f"v{i}", registry_address=free_address(), raft_address=free_address()) for i in (1, 2)
    )
    key = tmp_path / "key"
    with_key = dataclasses.replace(
        config, voters=(*config.voters, *more), state_dir=tmp_path / "several", raft_key_file=key
    )
    with pytest.raises(ConfigError, match="cannot read"):
        asyncio.run(start(with_key))
    key.write_bytes(b"k" * 31)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        asyncio.run(start(with_key))
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="has 31 bytes"):
        asyncio.run(start(with_key))


def test_a_node_that_is_no_voter_is_told(config):
    with pytest.raises(ConfigError, match="runs no registry"):
        Raft(dataclasses.replace(config, node_id="else"), lambda: None)


def test_a_log_that_cannot_be_written_stops_the_voter(config, monkeypatch):
    def broken(_descriptor):
        raise OSError(5, "input/output error")

    async def scenario():
        async with running(config) as raft:
            monkeypatch.setattr(disk_module.os, "fdatasync", broken)
            with pytest.raises(NoQuorumError):
                await raft.propose(register("a"), timeout_s=2.0)
            assert "cannot be written" in raft.failure and not raft.is_leader
            assert raft.read(lambda state: state.nodes) == {}, "nothing takes effect that is not on disk"
            monkeypatch.undo()

    asyncio.run(scenario())


@pytest.fixture
def voter(tmp_path):
    """Makes the i-th of three voters."""
    voters = tuple(
        Voter(node_id=f"v{i}", registry_address=free_address(), raft_address=free_address()) for i in range(3)
    )
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)

    def make(i):
        folder = tmp_path / f"v{i}"
        config = Config(
            cluster_id="test", node_id=f"v{i}", voters=voters, raft_key_file=key, state_dir=folder
        )
        return Raft(config, lambda: None)

    return make


def test_a_leader_that_ends_is_followed_without_waiting_for_the_election_timeout(voter):
    async def scenario():
        rafts = [voter(i) for i in range(3)]
        try:
            for raft in rafts:
                raft.start()
            await eventually(
                lambda: len({r.leader and r.leader.node_id for r in rafts}) == 1 and rafts[0].leader
            )
            for raft in rafts:
                conf = raft._engine._SyncObj__conf
                conf.raftMinTimeout, conf.raftMaxTimeout = 300.0, 600.0
            first = next(r for r in rafts if r.is_leader)
            await first.propose(commands.noop())
            # Every voter has heard the leader since, and waits 300 s for it now.
            far = time.monotonic() + 100
            await eventually(
                lambda: all(r._engine._SyncObj__raftElectionDeadline > far for r in rafts if r is not first)
            )
            rafts.remove(first)
            term = first.term
            first.close()
            await eventually(lambda: any(r.is_leader for r in rafts))
            leader = next(r for r in rafts if r.is_leader)
            assert leader.term > term
            assert (await leader.propose(commands.noop())).ok
        finally:
            for raft in rafts:
                raft.close()

    asyncio.run(scenario())


def test_a_voter_that_was_away_gets_the_snapshot_and_large_commands(voter):

    async def scenario():
        rafts = [voter(0), voter(1)]
        try:
            for raft in rafts:
                raft.start()
            await eventually(lambda: any(r.is_leader for r in rafts))
            leader = next(r for r in rafts if r.is_leader)
            many = (leader.propose(register(f"n{i}", "x" * 100), timeout_s=30) for i in range(600))
            await asyncio.gather(*many)
            assert (await leader.propose(large(7 << 20), timeout_s=30)).ok
            for raft in rafts:
                raft._engine.forceLogCompaction()
                await eventually(lambda raft=raft: len(raft._engine.journal) <= 3)
            wanted = leader.read(snapshot)
            assert wanted.ByteSize() > 100_000, "more than one piece of it has to travel"
            late = voter(2)
            rafts.append(late)
            late.start()
            await eventually(lambda: late.read(snapshot) == wanted)
            # From here on it takes part like the others: with it, one of the first two can go.
            other = next(r for r in rafts if not r.is_leader and r is not late)
            rafts.remove(other)
            other.close()
            result = await leader.propose(register("last"), timeout_s=10)
            assert result.incarnation == 601
            await eventually(lambda: late.read(lambda state: "last" in state.nodes))
            assert [r.leader.node_id for r in rafts] == [leader.leader.node_id] * 2
        finally:
            for raft in rafts:
                raft.close()

    asyncio.run(scenario())
