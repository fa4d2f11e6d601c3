"""Whether a node runs a registry process; what would be the parent notes what it is asked, and starts none."""

import asyncio
import contextlib
import dataclasses
import socket

import pytest

from fastcheck_proto.v1 import node_pb2 as pb
from fastcheckd.config import Config, Voter
from fastcheckd.errors import InvalidRequestError
from fastcheckd.process.supervisor import Supervisor
from fastcheckd.process.voter_role import VoterRole
from fastcheckd.registry.known_voters import (
    joining_file,
    read_voters,
    remember,
    voters_file,
    with_remembered_voters,
    write_voters,
)
from fastcheckd.registry.raft.membership import voter_of

A, B, C, D = (
    Voter(node_id=n, registry_address=f"127.0.0.1:{i}1", raft_address=f"127.0.0.1:{i}2")
    for i, n in enumerate("abcd", 10)
)


def config_of(tmp_path, node_id, **values):
    settings = {
        "cluster_id": "test",
        "node_id": node_id,
        "voters": (A, B, C),
        "raft_key_file": tmp_path / "k",
    }
    return Config(**(settings | {"state_dir": tmp_path / "state"} | values))


class Watched:
    """A VoterRole whose registry processes and news are noted."""

    def __init__(self, config):
        self._node_id, self._started, self.voters, self.told = config.node_id, [], (), []
        self._requests, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        self.supervisor = Supervisor(line)
        self.voter_role = VoterRole(config, self.supervisor, self.told.append, self._fatal)
        asyncio.get_running_loop().add_reader(self._requests, self._take)

    def _take(self):
        with contextlib.suppress(BlockingIOError):
            while True:
                request = pb.ParentRequest.FromString(self._requests.recv(4096))
                answer = pb.NodeProcesses(answered=request.number)
                if request.HasField("run_registry"):
                    self.voters = tuple(map(voter_of, request.run_registry.voters))
                    self._started += [v for v in self.voters if v.node_id == self._node_id]
                    answer.registry.pid = 1
                self._requests.send(answer.SerializeToString())

    @property
    def started(self):
        self._take()
        return self._started

    def close(self):
        asyncio.get_running_loop().remove_reader(self._requests)
        self._requests.close()
        self.supervisor.close()

    def _fatal(self, error):
        raise error

    @property
    def runs(self):
        return self.voter_role._running


def voting(config, scenario):
    async def run():
        watched = Watched(config)
        watched.voter_role.start()
        telling = asyncio.create_task(watched.supervisor.run())
        try:
            await scenario(watched)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            watched.close()

    asyncio.run(run())


def test_a_node_that_is_asked_waits_with_an_empty_log_to_be_added(tmp_path):
    config = config_of(tmp_path, "d")

    async def scenario(node):
        assert node.started == [] and not node.voter_role.is_voter
        for _ in range(2):  # asked again, it is done
            await node.voter_role.become("test", [A, B, D])
        assert node.started == [D] and node.voters == (A, B, D)
        folder = config.state_dir / "registry"
        assert [p.name for p in folder.iterdir()] == ["JOIN"] and folder.stat().st_mode & 0o77 == 0
        assert not node.voter_role.is_voter, "the registry has not said so yet"
        remember(config, [A, B, D], 5)
        await node.voter_role.look()
        assert node.voter_role.is_voter and node.runs == D and node.started == [D], "it runs on"
        assert node.told == [(A, B, D)] and not joining_file(config).exists()

    voting(config, scenario)


def test_what_was_named_before_a_node_was_asked_does_not_stop_it(tmp_path):
    config = config_of(tmp_path, "d")

    async def scenario(node):
        await node.voter_role.become("test", [A, C, D], version=5)
        remember(config, [A], 5)  # heard late
        await node.voter_role.look()
        assert node.runs == D and joining_file(config).exists() and node.told == [(A,)]
        remember(config, [A, C, D], 6)
        await node.voter_role.look()
        assert node.runs == D and node.started == [D] and not joining_file(config).exists()
        remember(config, [A, B, C], 7)
        await node.voter_role.look()
        assert node.runs is None

    voting(config, scenario)


def test_what_was_asked_is_remembered_over_a_restart(tmp_path):
    config = config_of(tmp_path, "d")

    async def first(node):
        await node.voter_role.become("test", [A, B, D])

    async def second(node):
        assert node.started == [D] and node.voters == (A, B, D)
        remember(config, [A, B, Voter(node_id="e", registry_address="h:1", raft_address="h:2")], 7)
        await node.voter_role.look()
        assert node.runs is None, "another one was taken"

    voting(config, first)
    voting(config, second)


def test_a_voter_that_was_replaced_stops_and_stays_stopped(tmp_path):
    config = config_of(tmp_path, "c")

    async def scenario(node):
        assert node.runs == C
        remember(config, [A, B, D], 5)
        await node.voter_role.look()
        assert node.runs is None

    async def later(node):
        assert node.started == []

    voting(config, scenario)
    voting(config, later)


@pytest.mark.parametrize(
    ("changed", "cluster_id", "voters", "message"),
    [
        ({}, "other", [A, B, D], "of cluster 'test', not 'other'"),
        ({}, "test", [A, B, C], "not among the voters"),
        ({}, "test", [], "not among"),
        ({}, "test", [A, D], "1, 3, 5 or 7"),
        ({"raft_key_file": None}, "test", [A, B, D], "tls_cert_file"),
    ],
)
def test_a_node_that_cannot_says_why(tmp_path, changed, cluster_id, voters, message):
    config = config_of(tmp_path, "d", **changed)

    async def scenario(node):
        with pytest.raises(InvalidRequestError, match=message):
            await node.voter_role.become(cluster_id, voters)
        assert node.started == [] and not config.state_dir.exists()

    voting(config, scenario)


def test_nobody_talks_a_voter_out_of_its_log(tmp_path):
    config = config_of(tmp_path, "c")
    folder = config.state_dir / "registry"
    moved = dataclasses.replace(C, raft_address="127.0.0.1:999")

    async def scenario(node):
        folder.mkdir(parents=True)
        (folder / "log").write_bytes(b"precious")
        (folder / "VOTER").write_text('{"raft_address": "127.0.0.1:122"}')
        with pytest.raises(InvalidRequestError, match="has its log"):
            await node.voter_role.become("test", [A, B, moved])
        assert node.runs == C and (folder / "log").read_bytes() == b"precious"

    async def lost(node):
        (folder / "log").unlink()
        await node.voter_role.become("test", [A, B, moved])
        assert node.runs == moved and (folder.with_name("registry.old") / "VOTER").exists()

    voting(config, scenario)
    voting(config, lost)


@pytest.mark.parametrize("mark", ['{"raft_address": "127.0.0.1:122"}', "{", "[]"])
def test_a_voter_that_lost_its_log_does_not_vote(tmp_path, caplog, mark):
    config = config_of(tmp_path, "c")
    (config.state_dir / "registry").mkdir(parents=True)
    (config.state_dir / "registry" / "VOTER").write_text(mark)

    async def scenario(node):
        assert node.started == [] and "votes no more" in caplog.text

    voting(config, scenario)


def test_only_newer_views_change_what_is_remembered(tmp_path):
    config = config_of(tmp_path, "d")
    remember(config, [A, B, C], 1)
    assert not voters_file(config).exists(), "the config says the same"
    remember(config, [A, B, D], 5)
    remember(config, [A, B, C], 4)
    remember(config, [], 9)
    assert with_remembered_voters(config).voters == (A, B, D)
    remember(config, [C, B, A], 6)
    assert set(with_remembered_voters(config).voters) == {A, B, C}
    write_voters(voters_file(config), "elsewhere", [D])
    assert read_voters(voters_file(config), "test") is None
