"""A gRPC port of the daemon against those who are too many, too slow, too large, or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from tests import http2
from tests.certificates import Authority
from tests.sockets import ends

from fastcheck_proto.v1 import node_pb2, node_pb2_grpc
from fastcheckd import rpc
from fastcheckd.config import Config
from fastcheckd.dialer import Dialer
from fastcheckd.log import COMPLAINTS_MAX
from fastcheckd.rpc import CONNECTIONS_MAX, connections_max, server_options
from fastcheckd.services.admission import Admission

CHECK = "/grpc.health.v1.Health/Check"
HOLD = "/fastcheck.v1.DataControlService/Hold"
REQUEST_BYTES_MAX = 4096


class Holding(node_pb2_grpc.DataControlServiceServicer):
    async def Hold(self, request_iterator: Any, context: Any) -> node_pb2.HoldResponse:
        async for _ in request_iterator:
            pass
        return node_pb2.HoldResponse()


@contextlib.asynccontextmanager
async def serving(dialer: Dialer) -> AsyncIterator[int]:
    server = grpc.aio.server(options=server_options(REQUEST_BYTES_MAX), interceptors=[Admission("c")])
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    node_pb2_grpc.add_DataControlServiceServicer_to_server(Holding(), server)
    port = dialer.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def against_a_port(attack: Callable[[int], None], dialer: Dialer | None = None) -> None:
    """Runs the attack in a thread, and asks whether the port of node `n` still answers."""
    dialer = dialer or Dialer()

    async def story() -> None:
        async with serving(dialer) as port:
            await asyncio.to_thread(attack, port)
            async with dialer.channel("n", f"127.0.0.1:{port}") as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True
                )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(story())


def dial(port: int, words: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.sendall(words)
    return sock


def test_a_port_takes_so_many_connections_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CONNECTIONS_MAX", 4)

    def attack(port: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                assert stack.enter_context(dial(port, http2.GREETING)).recv(9), "it is greeted"
            for _ in range(20):
                with dial(port, http2.GREETING) as one_more:
                    assert ends(one_more)

    against_a_port(attack)


@pytest.mark.parametrize("tls", [False, True])
def test_who_says_nothing_or_drips_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool
) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_S_MAX", 0.5)
    settings = Authority(tmp_path).settings("c", "n") if tls else {}
    words = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20) if tls else http2.GREETING[:-1]

    def attack(port: int) -> None:
        with dial(port) as silent:
            assert ends(silent)
        with dial(port) as dripping:
            dripping.settimeout(0.1)
            assert any(gone(dripping, byte) for byte in drops())

    def drops() -> Iterator[bytes]:
        yield from (words[at : at + 1] for at in range(len(words)))
        yield from [b""] * 200

    def gone(sock: socket.socket, byte: bytes) -> bool:
        """Whether it is closed; without a settings frame nothing that the server says ends the handshake."""
        try:
            sock.sendall(byte)
            return sock.recv(1 << 16) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    against_a_port(attack, Dialer.of(Config(cluster_id="c", node_id="n", **settings)))


@pytest.mark.parametrize("announced", [REQUEST_BYTES_MAX + 1, 2**31 - 1, 2**32 - 1])
def test_a_message_that_announces_too_much_is_refused_before_it_comes(announced: int) -> None:
    def attack(port: int) -> None:
        with dial(port, http2.GREETING + http2.call(CHECK)) as sock:
            sock.sendall(http2.message(b"x" * 10, announced=announced))
            assert http2.is_answered(sock), "it was waited for"

    against_a_port(attack)


def test_a_large_message_is_refused_and_a_small_one_is_not() -> None:
    def attack(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as refused:
                health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service="x" * REQUEST_BYTES_MAX), timeout=30
                )
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    against_a_port(attack)


#: A field without its value, and text that is no UTF-8.
NONSENSE = [b"\x0a", b"\xff" * 40, b"\x0a\x02\xff\xfe"]


def test_bytes_that_are_no_message_are_the_callers_mistake(caplog: pytest.LogCaptureFixture) -> None:
    def attack(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            once, stream = channel.unary_unary(CHECK), channel.stream_unary(HOLD)
            good = node_pb2.HoldRequest(incarnation=1).SerializeToString()
            for nonsense in NONSENSE * 5:
                with pytest.raises(grpc.RpcError) as refused:
                    once(nonsense, timeout=30)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                bad = b"\x08" if nonsense == NONSENSE[2] else nonsense  # a HoldRequest has no text
                with pytest.raises(grpc.RpcError) as refused:
                    stream(iter([good, bad]), timeout=30)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            stream(iter([good] * 3), timeout=30)

    against_a_port(attack)
    assert len([r for r in caplog.records if "is no request of it" in r.getMessage()]) <= COMPLAINTS_MAX
    assert not [r for r in caplog.records if r.exc_info]


def test_a_call_that_nobody_may_make_or_that_does_not_exist_is_refused() -> None:
    def attack(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for path in ("/fastcheck.v1.AdminService/Status", "/no/such", "/", "/../../etc/passwd"):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(path)(b"", timeout=30)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    against_a_port(attack)


@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [(1024, 256), (20_000, 5000), (1 << 20, CONNECTIONS_MAX), (resource.RLIM_INFINITY, CONNECTIONS_MAX)],
)
def test_ports_leave_most_descriptors_to_others(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, expected: int
) -> None:
    monkeypatch.setattr(rpc.resource, "getrlimit", lambda _: (64, descriptors))
    assert connections_max() == expected
