"""What pysyncobj does when it is used as it comes, one test for each trap that `registry/raft` guards against."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import psutil
import pytest
from pysyncobj.monotonic import monotonic
from tests.eventually import eventually
from tests.sockets import free_address
from tests.unit.fastcheckd.registry.small_cluster import forget

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.config import Config, Voter, split_address
from fastcheckd.log import COMPLAINTS_MAX
from fastcheckd.registry.commands import noop
from fastcheckd.registry.model import SCHEMA
from fastcheckd.registry.raft import adapter as raft_module
from fastcheckd.registry.raft.adapter import Raft
from fastcheckd.registry.raft.messages import Seal, derive_key

ROOT = Path(__file__).resolve().parents[4]


@contextlib.asynccontextmanager
async def voters(folder, count=1):
    """So many voters in this process, one of which leads."""
    named = tuple(
        Voter(node_id=f"v{i}", registry_address=free_address(), raft_address=free_address())
        for i in range(count)
    )
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    running = []
    try:
        for voter in named:
            config = Config(
                cluster_id="test",
                node_id=voter.node_id,
                voters=named,
                raft_key_file=key,
                state_dir=folder / voter.node_id,
            )
            running.append(Raft(config, lambda: None))
            running[-1].start()
        await eventually(lambda: any(raft.is_leader for raft in running))
        yield running
    finally:
        for raft in running:
            raft.close()


def test_a_command_that_raises_is_answered_and_wedges_nobody(tmp_path, monkeypatch):
    real = raft_module.apply

    def broken(state, command):
        if b"bomb" in command:
            raise RuntimeError("a bug in the state machine")
        return real(state, command)

    monkeypatch.setattr(raft_module, "apply", broken)

    async def scenario():
        async with voters(tmp_path) as (raft,):
            answer = await raft.propose(forget("bomb"))
            assert not answer.ok and answer.code == pb.ERROR_CODE_INTERNAL and "a bug" in answer.message
            assert (await raft.propose(noop())).ok
            raft.close()
            raft.start()  # the log is read anew, bomb included
            await eventually(lambda: raft.is_leader)
            assert (await raft.propose(noop())).ok

    asyncio.run(scenario())


def test_only_the_configured_address_is_listened_on(tmp_path):
    async def scenario():
        async with voters(tmp_path) as (raft,):
            port = split_address(raft._voter.raft_address)[1]
            bound = [
                c.laddr.ip
                for c in psutil.Process().net_connections("tcp")
                if c.status == psutil.CONN_LISTEN and c.laddr.port == port
            ]
            assert bound == ["127.0.0.1"]
            assert socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, "::1")) == "::1"

    asyncio.run(scenario())


def test_compaction_forks_nothing(tmp_path, monkeypatch):
    def fork():
        raise AssertionError("forked beside gRPC and threads")

    monkeypatch.setattr(os, "fork", fork)

    async def scenario():
        async with voters(tmp_path) as (raft,):
            for _ in range(10):
                await raft.propose(noop())
            raft._engine.forceLogCompaction()
            await eventually(lambda: len(raft._engine.journal) <= 3)
            assert raft._folder.disk.exists("snapshot")

    asyncio.run(scenario())


def test_a_commit_waits_for_no_company(tmp_path):
    """Batching, as it comes, makes every commit wait for up to a period of 0.1 s: here that would be minutes."""

    async def scenario():
        async with voters(tmp_path, 3) as running:
            await eventually(lambda: all(raft.leader for raft in running))
            leader = next(raft for raft in running if raft.is_leader)
            leader._engine.conf.appendEntriesPeriod = 60.0
            leader._engine.conf.leaderFallbackTimeout = 3600.0
            for raft in running:
                raft._engine.conf.raftMinTimeout = raft._engine.conf.raftMaxTimeout = 3600.0
            for _ in range(20):
                assert (await leader.propose(noop(), timeout_s=30)).ok

    asyncio.run(scenario())


def test_idle_links_between_followers_are_kept_alive(tmp_path):
    """Otherwise they count as broken when an election needs them, and its first vote request is lost."""

    async def scenario():
        async with voters(tmp_path, 3) as running:
            await eventually(lambda: all(raft.leader for raft in running))
            followers = [raft for raft in running if not raft.is_leader]
            links = [raft._engine._SyncObj__transport._connections for raft in followers]
            other = [
                next(c for n, c in links[i].items() if n.voter == followers[1 - i]._voter) for i in (0, 1)
            ]
            await eventually(lambda: all(c.authenticated for c in other))
            await asyncio.sleep(3 * running[0]._engine.conf.connectionTimeout / 2)
            for connection in other:
                idle_s = monotonic() - connection._TcpConnection__lastReadTime
                assert idle_s < running[0]._engine.conf.connectionTimeout, f"{idle_s} s without a word"

    asyncio.run(scenario())


def test_there_is_one_replicated_method_and_it_has_no_versions(tmp_path):
    """pysyncobj forgets, at a restart behind a snapshot, which version was in use: ours is in the state."""

    async def scenario():
        async with voters(tmp_path) as (raft,):
            methods = raft._engine._idToMethod.values()
            assert [method.__name__ for method in methods] == ["apply_v0"]
            assert raft.read(lambda state: state.schema) == SCHEMA

    asyncio.run(scenario())


def test_neither_the_batteries_nor_the_rooms_of_bulk_work_are_in_the_registrys_process():
    """The batteries trust wall clocks; numpy and the store would hold the interpreter for long."""
    code = (
        "import sys, fastcheckd.process.registry\n"
        "print([m for m in sys.modules if m.startswith(('pysyncobj.batteries', 'fastcheckd.store', "
        "'fastcheckd.transfer', 'fastcheckd.codec', 'numpy', 'torch'))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "daemon:client:proto"},
    )
    assert found.stdout.strip() == "[]"


class Stranger:
    """Has the key, and is no voter: it speaks as pysyncobj's other kinds of peers would."""

    def __init__(self, address):
        self.sock = socket.create_connection(split_address(address), timeout=60)
        self.seal = Seal(derive_key(b"k" * 32, "test"))
        self.challenge = os.urandom(32)
        self.say(self.challenge)
        self.theirs = self.hear()

    def say(self, message):
        data = self.seal.encrypt_at_time(zlib.compress(pickle.dumps(message)), 0)
        self.sock.sendall(struct.pack("i", len(data)) + data)

    def hear(self):
        (size,) = struct.unpack("i", self.sock.recv(4, socket.MSG_WAITALL))
        _, message = pickle.loads(
            zlib.decompress(self.seal.decrypt(self.sock.recv(size, socket.MSG_WAITALL)))
        )
        return message

    def is_sent_away(self):
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize(
    "what", ["readonly", ["add", "127.0.0.1:1"], ["status"], "127.0.0.1:1", {"type": "x"}]
)
def test_with_the_key_but_no_voters_name_nothing_is_said(tmp_path, what):
    """A read-only peer could commit commands and forge terms; a utility command could change the membership."""

    async def scenario():
        async with voters(tmp_path) as (raft,):
            term, members = raft.term, raft.voters
            stranger = await asyncio.to_thread(Stranger, raft._voter.raft_address)
            stranger.say((stranger.theirs, what))
            assert await asyncio.to_thread(stranger.is_sent_away)
            assert (raft.term, raft.voters) == (term, members) and raft.is_leader

    asyncio.run(scenario())


def test_what_the_engine_says_of_every_entry_is_said_a_few_times(caplog):
    for number in range(1000):
        logging.getLogger("pysyncobj.syncobj").critical("truncating entries from index %d", number)
    assert 1 <= len(caplog.records) <= COMPLAINTS_MAX
    assert "truncating entries from index 0" in caplog.records[0].getMessage()
