"""Floods of frames, handshakes and silent connections at every port of a cluster under TLS: others' commits go on.

Bob has a trainer's certificate; strangers have none. Each test times the commits of Alice's job, on the node that is
attacked, before, during and after. The attackers use the same machine, so what they cost meanwhile is an upper bound.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from tests import http2
from tests.cluster.harness import TimedJob, leader, node_states, until

from fastcheck import Checkpointer
from fastcheck.certs import LocalAuthority
from fastcheck.local import LocalCluster
from fastcheck.security import SERVER_NAME, VARIABLES

pytestmark = pytest.mark.alone

VICTIM = "node-0"
MIB = 1 << 20
#: The median commit while an attack lasts, and the longest, on the machine that the attackers use too.
DURING_S, LONGEST_S = 1.0, 15.0
#: Afterwards it is as before: so many times as long, and 10 ms.
AFTER = 1.5
RSS_MAX = 192 * MIB
LINES_MAX = 60
ATTACK_S = 2.5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("floods") / "cluster") as made:
        made.up(3, ram_budget="96MiB", tls=True)
        yield made


@pytest.fixture(scope="module")
def certificates(cluster: LocalCluster) -> dict[str, Path]:
    authority = LocalAuthority(cluster.dir / "tls")
    return {name: authority.trainer(name) for name in ("alice", "bob")}


@pytest.fixture(autouse=True)
def alices_certificate(
    cluster: LocalCluster, certificates: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert = certificates["alice"]
    paths = (cert, cert.with_suffix(".key"), cluster.dir / "tls" / "ca.pem")
    for variable, path in zip(VARIABLES, paths, strict=True):
        monkeypatch.setenv(variable, str(path))
    monkeypatch.setenv(SERVER_NAME, "")


def ports_of(cluster: LocalCluster, node: str = VICTIM) -> dict[str, int]:
    config = yaml.safe_load((cluster.dir / node / "config.yaml").read_text())
    voter = next(v for v in config["voters"] if v["node_id"] == node)
    ports = {name: int(voter[f"{name}_address"].rpartition(":")[2]) for name in ("registry", "raft")}
    return ports | {name: config[f"{name}_port"] for name in ("agent", "data", "lane")}


def trainer(cluster: LocalCluster, job: str, node: str = VICTIM) -> Checkpointer:
    return Checkpointer(job, rank=0, world_size=1, address=f"127.0.0.1:{ports_of(cluster, node)['agent']}")


@contextlib.contextmanager
def beside(cluster: LocalCluster, job: str) -> Iterator[list[float]]:
    """What is done inside harms nobody; gives the durations of Alice's commits meanwhile."""
    processes = [psutil.Process(pid) for pid in cluster.pids(VICTIM)]

    def private() -> list[int]:
        return [p.memory_info().rss - p.memory_info().shared for p in processes]

    with trainer(cluster, job) as ckpt:
        alice, during, over = TimedJob(ckpt), list[float](), threading.Event()
        before_s, memory = alice.median_s(), private()
        leads = leader(cluster, "node-1")
        said = len(cluster.log_file(VICTIM).read_text().splitlines())
        failed: list[Exception] = []

        def commit() -> None:
            try:
                while not over.is_set():
                    during.append(alice.commit_s())
            except Exception as error:  # noqa: BLE001  what her thread meets the test tells
                failed.append(error)

        committing = threading.Thread(target=commit)
        committing.start()
        try:
            yield during
        finally:
            over.set()
            committing.join()
        assert not failed, failed
        grown = max(now - was for now, was in zip(private(), memory, strict=True))
        after_s = alice.median_at_most_s(AFTER * before_s + 0.01)
    told = f"before {before_s:.3f}, during {sorted(during)}, after {after_s:.3f} s, {grown >> 20} MiB more"
    assert statistics.median(during) < DURING_S and max(during) < LONGEST_S, told
    assert after_s <= AFTER * before_s + 0.01, told
    assert grown < RSS_MAX, told
    assert all(process.is_running() for process in processes), "a process ended"
    assert leader(cluster, "node-1") == leads, "the leader lost its office"
    log = cluster.log_file(VICTIM).read_text()
    assert "Traceback" not in log
    new = log.splitlines()[said:]
    assert len(new) < LINES_MAX, "\n".join(new)


@contextlib.contextmanager
def tls_to(port: int, context: ssl.SSLContext, timeout_s: float) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port), timeout_s) as plain,
        context.wrap_socket(plain) as sock,
    ):
        yield sock


def call(stream: int) -> bytes:
    return http2.call("/fastcheck.v1.TrainerService/ListSteps", stream)


def opened(first: bytes, then: bytes) -> Callable[[int], bytes]:
    return lambda turn: then if turn else first


#: What Bob says in each turn, as fast as the other side takes it.
FLOODS: dict[str, Callable[[int], bytes]] = {
    "calls that are reset at once": lambda turn: b"".join(
        call(stream) + http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", 8))
        for stream in range(400 * turn + 1, 400 * turn + 401, 2)
    ),
    "empty continuations": opened(
        http2.frame(http2.HEADERS, 0, 1, b""), http2.frame(http2.CONTINUATION, 0, 1, b"") * 5000
    ),
    "a head without an end": opened(
        http2.frame(http2.HEADERS, 0, 1, b""),
        http2.frame(http2.CONTINUATION, 0, 1, b"\0\x01a\x7e" + b"x" * 126) * 500,
    ),
    "pings": lambda _: http2.frame(http2.PING, 0, 0, bytes(8)) * 2000,
    "settings": lambda _: http2.frame(http2.SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) * 2000,
    "empty data": opened(call(1), http2.frame(http2.DATA, 0, 1, b"") * 5000),
    "window updates": lambda _: http2.frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 3000,
}  # fmt: skip


#: One of frames that gRPC counts, one of frames that it does not, one of calls; the others by `make test-long`.
IN_THE_GATE = {"calls that are reset at once", "empty continuations", "pings"}


@pytest.mark.parametrize(
    "flood", [pytest.param(name, marks=[] if name in IN_THE_GATE else pytest.mark.long) for name in FLOODS]
)
def test_a_flood_of_frames_with_a_trainers_certificate_stops_nobodys_commits(cluster, certificates, flood):
    cert = certificates["bob"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cluster.dir / "tls" / "ca.pem")
    context.load_cert_chain(cert, cert.with_suffix(".key"))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    over, sent = threading.Event(), [0]

    def attack(port: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), tls_to(port, context, 10) as sock:
                sock.sendall(http2.GREETING)
                converse(sock)

    def converse(sock: ssl.SSLSocket) -> None:
        turn = 0
        while not over.is_set():
            sock.settimeout(3)
            sock.sendall(words := FLOODS[flood](turn))
            turn, sent[0] = turn + 1, sent[0] + len(words)
            sock.settimeout(0.0005)
            with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
                while sock.recv(1 << 16):
                    pass
                return

    ports = ports_of(cluster)
    with beside(cluster, f"beside-{sorted(FLOODS).index(flood)}"):
        attackers = [
            threading.Thread(target=attack, args=(ports[name],)) for name in ("agent", "data", "registry")
        ]
        for each in attackers:
            each.start()
        over.wait(ATTACK_S)
        over.set()
        for each in attackers:
            each.join()
    assert sent[0] > MIB, "or nothing was attacked"


RATE_HZ = 25.0


def test_strangers_handshakes_at_a_fixed_rate_stop_nobodys_commits(cluster):
    """To the end, without a certificate, and only begun, at each port: 125 a second of either kind."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    over, shaken = threading.Event(), [0]
    begun = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)

    def attack(port: int) -> None:
        at = time.monotonic()
        with contextlib.ExitStack() as kept:
            while not over.wait(max(0.0, at - time.monotonic())):
                at += 1 / RATE_HZ
                with contextlib.suppress(OSError):
                    half = kept.enter_context(socket.create_connection(("127.0.0.1", port), 1))
                    half.sendall(begun)
                with contextlib.suppress(OSError), tls_to(port, context, 1) as sock:
                    shaken[0] += 1
                    sock.recv(1)

    with beside(cluster, "beside-handshakes"):
        attackers = [threading.Thread(target=attack, args=(port,)) for port in ports_of(cluster).values()]
        for each in attackers:
            each.start()
        over.wait(2 * ATTACK_S)
        over.set()
        for each in attackers:
            each.join()
    assert shaken[0] > 50, "or nothing was attacked"


def test_new_trainers_and_nodes_get_in_beside_five_thousand_silent_connections(cluster):
    """They are kept up: whoever is sent away comes back. At all ports of the victim, and of the node that restarts."""
    away = next(node for node in ("node-1", "node-2") if node != leader(cluster, VICTIM))
    asked = {"node-1": "node-2", "node-2": "node-1"}[away]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(5000, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    over, there = threading.Event(), [0]
    targets = [port for node in (VICTIM, away) for port in ports_of(cluster, node).values()]

    def crowd() -> None:
        socks: list[socket.socket] = []
        try:
            turn = 0
            while not over.is_set():
                socks = [sock for sock in socks if not is_gone(sock)]
                there[0] = len(socks)
                for _ in range(min(500, count - len(socks))):
                    turn += 1
                    sock = socket.socket()
                    sock.setblocking(False)
                    with contextlib.suppress(OSError):
                        sock.connect(("127.0.0.1", targets[turn % len(targets)]))
                    socks.append(sock)
                over.wait(0.05)
        finally:
            for sock in socks:
                sock.close()

    silent = threading.Thread(target=crowd)
    with beside(cluster, "beside-a-crowd"):
        silent.start()
        try:
            until(lambda: there[0] > 0.8 * count, "the crowd to be there")
            for number in range(3):
                with trainer(cluster, f"newcomer-{number}") as ckpt:
                    ckpt.save(1, {"x": torch.ones(1000)}).result(timeout=30)
            cluster.kill(away)
            until(lambda: node_states(cluster, asked)[away] == "DOWN", "the node to be missed")
            cluster.start(away)
            until(lambda: node_states(cluster, asked)[away] == "UP", "the node to come back", timeout_s=30)
            with trainer(cluster, "newcomer-there", away) as ckpt:
                ckpt.save(1, {"x": torch.ones(1000)}).result(timeout=30)
        finally:
            over.set()
            silent.join()


def is_gone(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
