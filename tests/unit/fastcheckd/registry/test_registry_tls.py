"""Voters that prove who they are with certificates, and everyone who cannot."""

import asyncio
import contextlib
import dataclasses
import os
import pickle
import socket
import ssl
import struct
import threading
import time
import zlib

import pytest
from tests.certificates import Authority
from tests.eventually import eventually
from tests.sockets import ends, free_address
from tests.unit.fastcheckd.registry.small_cluster import large

from fastcheckd.certificates import Certificates
from fastcheckd.config import Config, Voter, split_address
from fastcheckd.errors import ConfigError
from fastcheckd.registry.commands import noop
from fastcheckd.registry.raft import transport
from fastcheckd.registry.raft.adapter import Raft
from fastcheckd.registry.raft.tls import Tls, named_node, node_uri


class Voters:
    """Three voters of cluster `test` in this process, v0 to v2, each with a certificate of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.authority = Authority(folder / "tls")
        self.voters = tuple(
            Voter(node_id=f"v{i}", registry_address=free_address(), raft_address=free_address())
            for i in range(3)
        )
        self.running = {}

    def config(self, i, **values):
        settings = {"cluster_id": "test", "node_id": f"v{i}", "voters": self.voters}
        settings |= {"state_dir": self.folder / f"v{i}"} | self.authority.settings("test", f"v{i}")
        return Config(**(settings | values))

    def start(self, i, **values):
        raft = self.running[i] = Raft(self.config(i, **values), lambda: None)
        raft.start()
        return raft

    def stop(self, i):
        self.running.pop(i).close()

    @property
    def leader(self):
        return next((raft for raft in self.running.values() if raft.is_leader), None)

    async def commit(self):
        await eventually(lambda: self.leader)
        while not (await self.leader.propose(noop(), timeout_s=10)).ok:
            pass


@pytest.fixture
def voters(tmp_path):
    return Voters(tmp_path)


@contextlib.asynccontextmanager
async def three(voters):
    try:
        for i in range(3):
            voters.start(i)
        await voters.commit()
        yield voters
    finally:
        for i in list(voters.running):
            voters.stop(i)


async def be_patient(voters):
    """A voter that gets no core for a while is from now on no reason for an election: a new term is a doing."""
    for raft in voters.running.values():
        conf = raft._engine.conf
        conf.raftMinTimeout, conf.raftMaxTimeout, conf.leaderFallbackTimeout = 900.0, 901.0, 900.0

    def waits_long(raft):
        return raft.is_leader or raft._engine._SyncObj__raftElectionDeadline > time.monotonic() + 600

    await eventually(lambda: voters.leader and all(map(waits_long, voters.running.values())))


# Good times


def test_three_voters_elect_commit_and_survive_their_leader(voters):
    async def scenario():
        async with three(voters):
            big = large(5 << 20)
            assert (await voters.leader.propose(big, timeout_s=20)).ok
            first = next(i for i, raft in voters.running.items() if raft.is_leader)
            voters.stop(first)
            await voters.commit()
            voters.start(first)
            await eventually(lambda: voters.running[first].leader is not None)
            # With the one that came back there is still a majority when another goes.
            second = next(i for i, raft in voters.running.items() if raft.is_leader)
            voters.stop(second)
            await voters.commit()

    asyncio.run(scenario())


def test_a_connection_that_is_found_dead_and_opened_again_says_nothing_before_its_handshake(voters, caplog):
    async def scenario():
        async with three(voters):
            await be_patient(voters)
            transports = [raft._engine._SyncObj__transport for raft in voters.running.values()]
            dialled = [
                t._connections[node] for t in transports for node in list(t._nodes) if t._shouldConnect(node)
            ]
            for connection in dialled * 2:
                await eventually(lambda connection=connection: connection.authenticated)
                opened_at = connection.opened_at

                def opened_again(connection=connection, before=opened_at):
                    if connection.opened_at == before:  # as if it had heard nothing for a minute
                        connection._TcpConnection__lastReadTime -= 60
                    return connection.opened_at != before

                await eventually(opened_again)
            await eventually(lambda: all(connection.authenticated for connection in dialled))
            await voters.commit()
        assert "WRONG_VERSION_NUMBER" not in caplog.text, "something was sent in the clear"

    asyncio.run(scenario())


# The certificate itself


def socket_pair_under_tls(accepting, connecting):
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    pair = accepting.protect(ends[0], accepting=True), connecting.protect(ends[1], accepting=False)
    done = [False, False]
    while not all(done):
        done = [end.handshake() for end in pair]
    return pair


def test_a_certificate_is_read_again_when_its_files_change(voters, caplog):
    tls = Tls(voters.config(0))
    other = Tls(voters.config(1))

    def serial():
        ends = socket_pair_under_tls(tls, other)
        certificate = ends[1].certificate
        for end in ends:
            end.close()
        return certificate["serialNumber"]

    first = serial()
    assert serial() == first
    _, key_file = voters.authority.node("test", "v0")
    second = serial()
    assert second != first
    key_file.write_bytes(b"half of a rotation")
    assert serial() == second and "the changed TLS files are not used" in caplog.text
    voters.authority.node("test", "v0", days=-0.1)
    assert serial() == second and "expired" in caplog.text
    voters.authority.node("test", "v0")
    assert serial() not in {first, second}


def test_the_end_of_the_certificate_is_known_and_moves_when_it_is_renewed(voters):
    certificates = Certificates(voters.config(0))
    voters.authority.node("test", "v0", days=2)
    assert certificates.ends_at_s() == pytest.approx(time.time() + 2 * 86400, abs=300)
    voters.authority.node("test", "v0", days=30)
    assert certificates.ends_at_s() == pytest.approx(time.time() + 30 * 86400, abs=300)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda c, a: c["tls_key_file"].chmod(0o640), "tls_key_file.*others may read .*chmod 600"),
        (lambda c, a: c["tls_cert_file"].unlink(), "tls_cert_file.*cannot read"),
        (lambda c, a: c["tls_ca_file"].write_text("x"), "tls_ca_file.*no PEM certificate"),
        (lambda c, a: c["tls_key_file"].write_text("x"), "tls_key_file.*is not the key"),
        (lambda c, a: a.node("test", "v0", days=-0.1), "tls_cert_file.*expired"),
        (lambda c, a: a.node("test", "v0", start_days=0.5), "tls_cert_file.*not yet valid"),
        (lambda c, a: a.issue("v0"), "must name this node.*spiffe://test/fastcheck/node/v0"),
        (lambda c, a: a.issue("v0", node_uri("test", "v1")), "must name this node"),
        (lambda c, a: a.issue("v0", node_uri("else", "v0")), "must name this node"),
        (lambda c, a: a.issue("v0", node_uri("test", "v0"), node_uri("test", "v1")), "and no other"),
    ],
)
def test_files_that_cannot_work_are_named_at_the_start(voters, broken, message):
    config = voters.config(0)
    keys = ("tls_cert_file", "tls_key_file", "tls_ca_file")
    broken({key: getattr(config, key) for key in keys}, voters.authority)
    with pytest.raises(ConfigError, match=message):
        Raft(config, lambda: None)._folder.protection()


def test_another_authoritys_certificate_is_named_at_the_start(voters, tmp_path):
    files = Authority(tmp_path / "other").settings("test", "v0") | {"tls_ca_file": voters.authority.ca_file}
    with pytest.raises(ConfigError, match="does not pass.*signed by the authority"):
        Tls(dataclasses.replace(voters.config(0), **files))


def test_only_one_name_of_this_cluster_counts():
    def names(*uris):
        return {"subjectAltName": [*(("URI", uri) for uri in uris), ("DNS", "v0")]}

    assert named_node(names(node_uri("test", "v0")), "test") == "v0"
    for uris in [
        (),
        (node_uri("test", ""),),
        (node_uri("tes", "v0"),),
        (node_uri("test", "a"), "spiffe://x/y"),
    ]:
        assert named_node(names(*uris), "test") is None
    assert named_node(None, "test") is None


def test_much_data_both_ways_through_small_sockets(voters):
    """Bytes wait in every place that there is, and none is lost or forgotten."""
    a, b = socket_pair_under_tls(Tls(voters.config(0)), Tls(voters.config(1)))
    data = {a: os.urandom(5 << 20), b: os.urandom(5 << 20)}
    left, got = dict(data), {a: b"", b: b""}
    deadline = time.monotonic() + 60
    while len(got[a]) + len(got[b]) < 10 << 20:
        assert time.monotonic() < deadline
        for end in (a, b):
            with contextlib.suppress(BlockingIOError):
                if left[end]:
                    left[end] = left[end][end.send(left[end]) :]
                end.flush()
            with contextlib.suppress(BlockingIOError):
                got[end] += end.recv(10_000)
    assert got == {a: data[b], b: data[a]}
    assert not (a.wants_write or a.pending or b.wants_write or b.pending)


# Who is let in


class Attack:
    """A pickle that makes a folder where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def frame(value):
    data = zlib.compress(pickle.dumps(value))
    return struct.pack("i", len(data)) + data


def dial(address):
    return socket.create_connection(split_address(address), timeout=60)


def dial_tls(address, files=None, version=ssl.TLSVersion.TLSv1_3):
    """A TLS connection by somebody with these files; whether they are good shows when something is read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    if files:
        context.load_cert_chain(files["tls_cert_file"], files["tls_key_file"])
    return context.wrap_socket(dial(address))


def recorded(address, files, data):
    """Say something over TLS, and return the very bytes that it took."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(files["tls_cert_file"], files["tls_key_file"])
    incoming, outgoing, said = ssl.MemoryBIO(), ssl.MemoryBIO(), b""
    tls = context.wrap_bio(incoming, outgoing)
    with dial(address) as sock:
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                said += (piece := outgoing.read())
                sock.sendall(piece)
                incoming.write(sock.recv(65536))
            else:
                break
        tls.write(data)
        said += (piece := outgoing.read())
        sock.sendall(piece)
        sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            sock.recv(65536)
    return said


def attacks(voters, target, tmp_path):
    """(what, function that attacks and says whether it was thrown out)."""
    owned = tmp_path / "owned"
    insider = next(
        v for v in voters.voters if v.node_id != target.node_id and v.raft_address > target.raft_address
    )
    third = next(v for v in voters.voters if v not in {insider, target})
    address = target.raft_address
    own = voters.authority.settings("test", insider.node_id)
    vote = {"type": "request_vote", "term": 10**6, "last_log_index": 10**9, "last_log_term": 10**6}

    def say(data, files=None, **values):
        def attack():
            with contextlib.suppress(OSError), dial_tls(address, files, **values) as sock:
                try:
                    sock.sendall(data)
                except OSError:
                    return True
                return ends(sock, 10)
            return True  # not even the handshake went through

        return attack

    def say_plain(data):
        def attack():
            with dial(address) as sock:
                sock.sendall(data)
                return ends(sock, 10)

        return attack

    name = frame(insider.raft_address)
    yield "plain noise", say_plain(os.urandom(5000))
    yield "plain http", say_plain(b"GET / HTTP/1.0\r\n\r\n")
    yield "a plain pickle", say_plain(frame(Attack(owned)))
    yield "a plain length", say_plain(struct.pack("i", 2**31 - 1) + b"x" * 100_000)
    yield "an endless hello", say_plain((b"\x16\x03\x03\x40\x00\x01\x01\xff\xff" + bytes(16380)) * 8)
    yield "nobody's pickle", say(frame(Attack(owned)))
    yield "nobody's name", say(name + frame(vote))
    yield "older tls", say(name, own, version=ssl.TLSVersion.TLSv1_2)
    elsewhere = Authority(tmp_path / "elsewhere").settings("test", insider.node_id)
    yield "another authority", say(name + frame(vote), elsewhere)
    others = Authority(tmp_path / "more")
    others.__dict__.update(vars(voters.authority) | {"folder": tmp_path / "more"})  # the true one signs these
    issued = {
        "no name": others.issue("a"),
        "a voter's name in another cluster": others.issue("b", node_uri("else", insider.node_id)),
        "two names": others.issue("c", node_uri("test", insider.node_id), node_uri("test", third.node_id)),
        "a node that is no voter": others.node("test", "stranger"),
        "the target itself": others.node("test", target.node_id),
        "expired": others.node("test", insider.node_id, days=-0.01),
    }
    for what, (cert_file, key_file) in issued.items():
        files = {"tls_cert_file": cert_file, "tls_key_file": key_file}
        yield what, say(name + frame(vote), files)
        yield what + ", silent", say(b"", files)
        yield what + ", with a pickle", say(frame(Attack(owned)), files)
    yield "another voter's address", say(frame(third.raft_address) + frame(vote), own)
    yield "read-only", say(frame("readonly"), own)
    yield "a utility command", say(frame(["remove", third.raft_address]), own)
    yield "an insider's pickle for a name", say(frame(Attack(owned)), own)
    yield "an insider's pickle", say(name + frame(Attack(owned)), own)
    yield "an insider's length for a name", say(struct.pack("i", 5000) + bytes(5000), own)
    yield "an insider's length", say(name + struct.pack("i", 2**31 - 1) + bytes(100_000), own)
    yield "an insider's negative length", say(struct.pack("i", -1) + bytes(100), own)
    replayed = recorded(address, own, struct.pack("i", -1))
    yield "a replay", say_plain(replayed)


def test_who_is_not_a_voter_is_closed_and_changes_nothing(voters, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(transport, "HANDSHAKE_S", 60)  # what is closed, is closed for a better reason

    async def scenario():
        async with three(voters):
            # The lowest address: all others connect to it, as an insider would.
            target = min(voters.voters, key=lambda v: v.raft_address)
            await be_patient(voters)
            leader, term = voters.leader, voters.leader.term
            count = 0
            for what, attack in attacks(voters, target, tmp_path):
                assert await asyncio.to_thread(attack), f"{what} was not closed"
                assert not (tmp_path / "owned").exists(), f"{what} ran code"
                assert leader.is_leader, f"{what} cost the leadership"
                assert {raft.term for raft in voters.running.values()} == {term}, f"{what} was listened to"
                count += 1
            assert count > 25
            transport = voters.running[int(target.node_id[1])]._engine._SyncObj__transport
            await eventually(lambda: not transport._unknownConnections)
            await voters.commit()
            assert voters.leader is leader and leader.term == term
        assert "Traceback" not in caplog.text

    asyncio.run(scenario())


def test_slow_and_many_handshakes_are_cut_off(voters, monkeypatch, caplog):
    monkeypatch.setattr(transport, "HANDSHAKE_S", 1.5)

    def trickle(address):
        """One byte of a hello at a time, for ever."""
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
        with dial(address) as sock:
            sock.settimeout(0.1)
            for at in range(len(hello)):
                try:
                    sock.sendall(hello[at : at + 1])
                    if not sock.recv(10):
                        return True
                except TimeoutError:
                    continue
                except OSError:
                    return True
        return False

    def flood(address):
        return [dial(address) for _ in range(150)]

    async def scenario():
        async with three(voters):
            leader, term = voters.leader, voters.leader.term
            address = leader._voter.raft_address
            assert await asyncio.to_thread(trickle, address)
            sockets = await asyncio.to_thread(flood, address)
            most = len(leader._engine._SyncObj__transport._unknownConnections)
            assert most <= transport.UNKNOWN_CONNECTIONS_MAX
            await voters.commit()
            for sock in sockets:
                with sock:
                    assert await asyncio.to_thread(ends, sock, 10), "idle strangers are sent away"
            await voters.commit()
            assert voters.leader is leader and leader.term == term

    asyncio.run(scenario())


def test_a_crowd_that_says_nothing_keeps_no_voter_out(voters, monkeypatch):
    monkeypatch.setattr(transport, "HANDSHAKE_S", 600)  # so that nobody leaves for another reason
    monkeypatch.setattr(transport, "UNKNOWN_CONNECTIONS_MAX", 8)

    async def scenario():
        async with three(voters):
            target, other, _ = sorted(range(3), key=lambda i: voters.voters[i].raft_address)
            transport = voters.running[target]._engine._SyncObj__transport
            voters.stop(other)
            with contextlib.ExitStack() as stack:
                address = voters.voters[target].raft_address
                crowd = [stack.enter_context(await asyncio.to_thread(dial, address)) for _ in range(8)]
                await eventually(lambda: len(transport._unknownConnections) == 8)
                voters.start(other)

                def is_back():
                    back = (c for n, c in transport._connections.items() if n.voter == voters.voters[other])
                    return any(conn.authenticated for conn in back)

                await eventually(is_back)
                assert await asyncio.to_thread(ends, crowd[0], 10), "the oldest made room"
                assert len(transport._unknownConnections) <= 8
                await voters.commit()

    asyncio.run(scenario())


def test_a_voter_that_shows_anothers_certificate_is_not_spoken_to(voters):
    """The connecting side looks as closely as the accepting one: somebody took over a voter's address."""

    async def scenario():
        async with three(voters):
            top = max(voters.voters, key=lambda v: v.raft_address)
            victim = next(v for v in voters.voters if v != top)
            voters.stop(int(victim.node_id[1]))
            heard = []
            done = threading.Event()

            def impostor():
                files = voters.authority.settings("test", "stranger")
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(files["tls_cert_file"], files["tls_key_file"])
                with socket.create_server(split_address(victim.raft_address)) as server:
                    server.settimeout(10)
                    while not done.is_set() and len(heard) < 3:
                        sock, _ = server.accept()
                        with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as tls:
                            heard.append(tls.recv(1000))
                            continue
                        heard.append(b"")

            await asyncio.to_thread(impostor)
            assert heard == [b"", b"", b""], "nothing is said to it, not even a name"
            await voters.commit()

    asyncio.run(scenario())


def test_a_seal_is_not_accepted_where_certificates_are_asked_for(voters, tmp_path):
    """A voter that was not changed over to TLS is left out, and does no harm."""

    async def scenario():
        key = tmp_path / "key"
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
        try:
            voters.start(0)
            voters.start(1)
            await voters.commit()
            term = voters.leader.term
            plain = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_file"))
            odd = voters.start(2, raft_key_file=key, **plain)
            for _ in range(3):
                await voters.commit()
            assert odd.leader is None and odd.read(lambda s: s.version) == 0
            assert voters.leader.term == term
        finally:
            for i in list(voters.running):
                voters.stop(i)

    asyncio.run(scenario())
