"""Three real voters, and what a crash, a liar or noise on their ports does to them."""

import asyncio
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import struct
import time
import zlib

import psutil
import pytest
from tests.cluster.registry_actors import Node, Rank, connected, eventually, nodes
from tests.cluster.registry_process import RegistryCluster
from tests.sockets import ends

from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheckd.config import split_address
from fastcheckd.errors import FastCheckdError

COMMITTED = registry_pb2.REPORT_STATE_COMMITTED


@pytest.fixture
def cluster(tmp_path):
    cluster = RegistryCluster(tmp_path, 3)
    cluster.start_all()
    yield cluster
    cluster.stop_all()


async def leader_of(client):
    async def known():
        view = await client.view(5)
        return view.leader if view.has_leader else None

    return await eventually(known)


def state_of(view, node_id):
    return next((n.state for n in view.nodes if n.node_id == node_id), None)


def test_heartbeats_probes_and_the_verdicts_from_them(cluster):
    async def scenario():
        config = cluster.config
        async with connected(config) as client, nodes(client, config, 4) as (alive, refusing, hung, quiet):
            # One agent dies, one still answers probes but sends nothing, one takes connections and is mute.
            await refusing.stop()
            await quiet.stop_heartbeats()
            await hung.stop()
            host, port = "127.0.0.1", hung.port
            with socket.socket() as mute:
                mute.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                mute.bind((host, port))
                mute.listen()
                died = time.monotonic()

                async def dead(node):
                    return state_of(await client.view(5), node.node_id) == registry_pb2.NODE_STATE_DOWN

                await eventually(lambda: dead(refusing))
                await eventually(lambda: dead(hung))
                assert time.monotonic() - died >= config.down_after_s - 0.3
            history = await client.history(registry_pb2.HistoryRequest(), timeout_s=5)
            down = registry_pb2.NODE_STATE_DOWN
            why = {t.node.node_id: t.reason for t in history.transitions if t.to == down}
            assert why[refusing.node_id].startswith("ended"), "refused connections are certain"
            assert why[hung.node_id].startswith("unreachable"), "silence has to last"
            await asyncio.sleep(0.5)
            view = await client.view(5)
            assert state_of(view, alive.node_id) == registry_pb2.NODE_STATE_UP
            assert state_of(view, quiet.node_id) in {
                registry_pb2.NODE_STATE_UP,
                registry_pb2.NODE_STATE_SUSPECT,
            }, "an answering probe is a sign of life"

            # Whoever comes back with a life that is over is told by the leader, and starts a new one.
            hung.start_heartbeats()
            await asyncio.wait_for(hung.fenced.wait(), 10)
            old = hung.incarnation
            await hung.register(client)
            assert hung.incarnation > old
            hung.fenced.clear()
            await asyncio.sleep(1.0)
            assert not hung.fenced.is_set()
            assert state_of(await client.view(5), hung.node_id) == registry_pb2.NODE_STATE_UP

    asyncio.run(scenario())


def test_no_commit_is_lost_or_invented_when_leaders_die(cluster):
    """Two ranks save step after step; twice the leader is killed under them and started again."""
    rounds, steps = 3, 12

    async def scenario():
        config = cluster.config
        async with connected(config) as client, nodes(client, config, 4) as started:
            ranks = [Rank(client, started[i], i, 2) for i in range(2)]
            for rank in ranks:
                await rank.open(f"c{rank.rank}")
            acknowledged, begun, seen = [], [], []

            async def save_all(first):
                for step in range(first, first + steps):
                    begun.append(step)
                    answers = await asyncio.gather(*(rank.save(step) for rank in ranks))
                    assert {a.state for a in answers} == {COMMITTED}, answers
                    acknowledged.append(step)

            async def watch():
                async for view in client.watch():
                    seen.extend(max(j.kept_steps) for j in view.jobs if j.kept_steps)

            watching = asyncio.create_task(watch())
            for round_number in range(rounds):
                saving = asyncio.create_task(save_all(1 + round_number * steps))
                if round_number < rounds - 1:
                    target = round_number * steps + steps // 3
                    await eventually(lambda target=target: len(acknowledged) >= target)
                    leader = await leader_of(client)
                    cluster.kill(leader)
                    killed = time.monotonic()
                    done = len(acknowledged)
                    await eventually(lambda done=done: len(acknowledged) > done + 1)
                    assert time.monotonic() - killed < 5
                    cluster.start(leader)
                await asyncio.wait_for(saving, 60)

            found = await client.lookup(registry_pb2.LookupRequest(job="gpt"), timeout_s=10)
            assert found.record.step == acknowledged[-1] == rounds * steps == begun[-1]
            assert list(found.kept_steps) == acknowledged[-2:]
            for step in found.kept_steps:
                record = (await client.lookup(registry_pb2.LookupRequest(job="gpt", step=step), 10)).record
                for rank in ranks:
                    assert {s.digest for s in record.ranks[rank.rank].shards} == {rank.digest(step)}
                    assert record.ranks[rank.rank].session == rank.session
            await eventually(lambda: bool(seen) and seen[-1] == rounds * steps)
            watching.cancel()
            assert seen == sorted(seen), "the newest step never went back in any view"
            assert set(seen) <= set(begun)

    asyncio.run(scenario())


def test_voters_come_back_with_what_they_knew(cluster):
    async def scenario():
        async with connected(cluster.config) as client:
            async with nodes(client, cluster.config, 4) as started:
                rank = Rank(client, started[0], 0, 1)
                await rank.open("c")
                for step in (1, 2, 3):
                    assert (await rank.save(step)).state == COMMITTED
            before = await client.lookup(registry_pb2.LookupRequest(job="gpt"), timeout_s=10)
            assert before.record.step == 3
            for voter in cluster.voters:
                cluster.kill(voter.node_id)
            cluster.start_all()
            assert await client.lookup(registry_pb2.LookupRequest(job="gpt"), timeout_s=20) == before

            # A voter whose log is gone must not come back as if it had never voted. Two go on without it.
            leader = await leader_of(client)
            follower = next(v.node_id for v in cluster.voters if v.node_id != leader)
            cluster.kill(follower)
            (cluster.folder / follower / "registry" / "log").unlink()
            cluster.start(follower)
            assert cluster.processes[follower].wait(15) != 0
            assert "is gone: a voter without its log" in cluster.log(follower)
            assert await client.lookup(registry_pb2.LookupRequest(job="gpt"), timeout_s=20) == before

    asyncio.run(scenario())


def test_without_a_majority_nothing_is_decided_and_views_say_so(cluster):
    async def scenario():
        async with connected(cluster.config) as client, nodes(client, cluster.config, 4) as started:
            rank = Rank(client, started[0], 0, 1)
            await rank.open("c")
            assert (await rank.save(1)).state == COMMITTED
            leader = await leader_of(client)
            others = [v.node_id for v in cluster.voters if v.node_id != leader]
            for node_id in others:
                cluster.processes[node_id].send_signal(signal.SIGSTOP)
            with pytest.raises(FastCheckdError, match="registry"):
                await client.lookup(registry_pb2.LookupRequest(job="gpt"), timeout_s=2)

            async def leaderless():
                return not (await client.view(5)).has_leader

            await eventually(leaderless)
            view = await client.view(5)
            assert [list(job.kept_steps) for job in view.jobs] == [[1]], "what is known is still shown"
            for node_id in others:
                cluster.processes[node_id].send_signal(signal.SIGCONT)
            assert (await rank.save(2)).state == COMMITTED
            view = await client.view(5)
            assert all(n.state != registry_pb2.NODE_STATE_DOWN for n in view.nodes), (
                "nobody was condemned for it"
            )

    asyncio.run(scenario())


def hostile_inputs(tmp_path):
    """What a voter's ports may be sent by anyone who reaches them."""

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    code = zlib.compress(pickle.dumps(Attack()))
    yield os.urandom(1000)
    yield b"GET / HTTP/1.0\r\n\r\n"
    yield struct.pack("i", 2**31 - 1) + b"x" * 100_000
    yield struct.pack("i", -5) + b"x" * 100
    yield struct.pack("i", 0)
    yield struct.pack("i", len(code)) + code
    yield struct.pack("i", 32 + len(code)) + bytes(32) + code
    yield struct.pack("i", 4000)  # and then silence


def send(address, data):
    """Send and report whether the other side has closed soon."""
    with socket.create_connection(split_address(address), timeout=60) as s:
        with contextlib.suppress(OSError):  # it has closed already, as is found out next
            s.sendall(data)
        return ends(s, 0.3)


def connect_often(address):
    return [socket.create_connection(split_address(address), timeout=10) for _ in range(100)]


def closed_by_other_side(sockets):
    for s in sockets:
        with s, contextlib.suppress(ConnectionResetError):
            if s.recv(1) != b"":
                return False
    return True


def test_noise_and_attacks_on_the_ports(cluster, tmp_path):
    async def scenario():
        async with connected(cluster.config) as client, nodes(client, cluster.config, 4) as started:
            rank = Rank(client, started[0], 0, 1)
            await rank.open("c")
            assert (await rank.save(1)).state == COMMITTED
            leader = await leader_of(client)
            before = {n: psutil.Process(p.pid).memory_info().rss for n, p in cluster.processes.items()}
            follower = next(v.node_id for v in cluster.voters if v.node_id != leader)
            for voter in (v for v in cluster.voters if v.node_id in {leader, follower}):
                for data in hostile_inputs(tmp_path):
                    closed = await asyncio.to_thread(send, voter.raft_address, data)
                    assert closed or len(data) <= 4, "only an unfinished message is waited for"
                    await asyncio.to_thread(send, voter.registry_address, data[:2000])
            flood = await asyncio.to_thread(connect_often, cluster.voters[0].raft_address)
            assert (await rank.save(2)).state == COMMITTED
            assert await asyncio.to_thread(closed_by_other_side, flood), "idle strangers are sent away"
            assert (await rank.save(3)).state == COMMITTED
            assert await leader_of(client) == leader, "nobody lost the leadership over it"
            for node_id, process in cluster.processes.items():
                assert process.poll() is None, cluster.log(node_id)
                assert psutil.Process(process.pid).memory_info().rss - before[node_id] < 32 << 20
                assert "Traceback" not in cluster.log(node_id)
            assert not (tmp_path / "owned").exists()

    asyncio.run(scenario())


def test_a_voter_with_another_key_is_left_out(cluster, tmp_path):
    async def scenario():
        async with connected(cluster.config) as client:
            leader = await leader_of(client)
            victim = next(v.node_id for v in cluster.voters if v.node_id != leader)
            cluster.kill(victim)
            wrong = tmp_path / "wrong.key"
            wrong.write_bytes(os.urandom(32))
            wrong.chmod(0o600)
            good = cluster.config
            cluster.config = dataclasses.replace(good, raft_key_file=wrong)
            cluster.start(victim)
            cluster.config = good
            async with nodes(client, good, 4) as started:
                rank = Rank(client, started[0], 0, 1)
                await rank.open("c")
                for step in range(1, 4):
                    assert (await rank.save(step)).state == COMMITTED
                alone = next(v for v in cluster.voters if v.node_id == victim)
                only = dataclasses.replace(good, node_id=victim, voters=(alone,))
                async with connected(only) as asking:
                    view = await eventually(lambda: reach(asking))
                    assert not view.has_leader and not view.jobs

    async def reach(asking):
        try:
            return await asking.view(1)
        except FastCheckdError:
            return None

    asyncio.run(scenario())


def test_an_unregistered_node_is_fenced_by_the_leader(cluster):
    async def scenario():
        async with connected(cluster.config) as client:
            await leader_of(client)
            stranger = Node(cluster.config, "stranger")
            stranger.incarnation = 99
            stranger.start_heartbeats()
            await asyncio.wait_for(stranger.fenced.wait(), 10)
            await stranger.stop_heartbeats()
            assert stranger.ref == common_pb2.NodeRef(node_id="stranger", incarnation=99)

    asyncio.run(scenario())
