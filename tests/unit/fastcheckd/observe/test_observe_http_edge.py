"""The HTTP edge against clients that are wrong, slow or too many, over real sockets."""

import asyncio
import contextlib
from http import HTTPStatus

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from tests import http2
from tests.sockets import free_port

from fastcheckd.errors import ConfigError
from fastcheckd.observe import http_edge
from fastcheckd.observe.http_edge import CONNECTIONS_MAX, HEAD_BYTES_MAX, HttpEdge, Response


async def hello():
    return Response(HTTPStatus.OK, b"hello\n")


async def broken():
    raise ValueError("a defect")


@contextlib.asynccontextmanager
async def serving(grpc_socket=None):
    edge = HttpEdge({"/hello": hello, "/broken": broken}, grpc_socket)
    await edge.start(f"127.0.0.1:{free_port()}", "metrics_address")
    try:
        yield edge, edge._server.sockets[0].getsockname()[1]
    finally:
        await edge.stop()


async def ask(port, request):
    """All that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def asked(request, grpc_socket=None):
    async def run():
        async with serving(grpc_socket) as (_, port):
            return await ask(port, request)

    return asyncio.run(run())


def test_get_and_head():
    answer = asked(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\nhello\n")
    assert b"Content-Length: 6\r\n" in answer and b"Connection: close\r\n" in answer
    assert asked(b"GET /hello?verbose=1 HTTP/1.0\r\n\r\n").endswith(b"hello\n")
    head = asked(b"HEAD /hello HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 6\r\n" in head and head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /hello HTTP/1.1\r\n\r\n", 405),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500),
        (b"\r\n\r\n", 400),
        (b"GET /hello\r\n\r\n", 400),
        (b"GET  /hello  HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\xff\xff\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),  # without a gRPC server behind it
        (b"GET /hello HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
    ],
)
def test_a_wrong_request_gets_its_status(request_, status):
    assert asked(request_).startswith(b"HTTP/1.1 %d " % status)


def test_an_endless_head_is_cut_off():
    assert asked(b"x" * 10 * HEAD_BYTES_MAX)[:12] in {b"HTTP/1.1 431", b""}


def test_a_request_that_does_not_come_ends_the_connection(monkeypatch):
    monkeypatch.setattr(http_edge, "REQUEST_S_MAX", 0.05)
    assert asked(b"GET /hello HT") == b""


def test_a_crowd_that_says_nothing_does_not_keep_a_probe_out(monkeypatch):
    monkeypatch.setattr(http_edge, "REQUEST_S_MAX", 600.0)  # so that nobody leaves for another reason

    async def run():
        async with serving() as (edge, port), contextlib.AsyncExitStack() as stack:
            silent = []
            for _ in range(CONNECTIONS_MAX):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                silent.append(reader)
            answer = await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")
            assert answer.endswith(b"hello\n")
            async with asyncio.timeout(10):  # the one that was silent for longest made room
                with contextlib.suppress(ConnectionResetError):
                    assert await silent[0].read() == b""
            assert len(edge._connections) == CONNECTIONS_MAX - 1
            assert not any(reader.at_eof() for reader in silent[1:])

    asyncio.run(run())


def test_a_crowd_that_speaks_grpc_does_not_keep_a_probe_out(tmp_path):
    async def run():
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
        server.add_insecure_port(f"unix://{tmp_path}/health.sock")
        await server.start()
        async with serving(tmp_path / "health.sock") as (edge, port), contextlib.AsyncExitStack() as stack:
            crowd = []
            for _ in range(CONNECTIONS_MAX):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(http2.GREETING)
                crowd.append(reader)
            async with asyncio.timeout(30):
                while len(edge._handed_over) < CONNECTIONS_MAX:
                    await asyncio.sleep(0.01)
            for _ in range(3):
                assert (await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")).endswith(b"hello\n")
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionResetError):
                    await crowd[0].read()
            assert not crowd[-1].at_eof()
        await server.stop(0)

    asyncio.run(run())


def test_when_all_are_being_answered_one_more_is_turned_away():
    async def run():
        may_answer = asyncio.Event()

        async def slow():
            await may_answer.wait()
            return await hello()

        async with serving() as (edge, port):
            edge._routes["/slow"] = slow
            asking = [
                asyncio.create_task(ask(port, b"GET /slow HTTP/1.1\r\n\r\n")) for _ in range(CONNECTIONS_MAX)
            ]
            async with asyncio.timeout(10):
                while len(edge._connections) < CONNECTIONS_MAX or edge._waiting:
                    await asyncio.sleep(0.01)
            assert await ask(port, b"GET /hello HTTP/1.1\r\n\r\n") == b""
            may_answer.set()
            assert all(answer.endswith(b"hello\n") for answer in await asyncio.gather(*asking))

    asyncio.run(run())


def test_grpc_health_comes_through_the_same_port_and_nothing_else(tmp_path):
    async def run():
        server = grpc.aio.server()
        health = health_aio.HealthServicer()
        await health.set("ready", health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        server.add_insecure_port(f"unix://{tmp_path / 'h.sock'}")
        await server.start()
        try:
            async with (
                serving(tmp_path / "h.sock") as (_, port),
                grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            ):
                stub = health_pb2_grpc.HealthStub(channel)
                live = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
                ready = await stub.Check(health_pb2.HealthCheckRequest(service="ready"), timeout=60)
                assert live.status == health_pb2.HealthCheckResponse.SERVING
                assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/fastcheck.v1.AdminService/Status")(b"", timeout=60)
                assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
                assert (await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")).endswith(b"hello\n")
        finally:
            await server.stop(None)

    asyncio.run(run())


def test_a_grpc_connection_ends_with_its_client_or_when_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(http_edge, "GRPC_S_MAX", 0.2)

    async def run():
        server = grpc.aio.server()
        server.add_insecure_port(f"unix://{tmp_path / 'h.sock'}")
        await server.start()
        try:
            async with serving(tmp_path / "h.sock") as (edge, port):
                for stays in (True, False):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                    assert await reader.readexactly(9)  # the server's first frame
                    if not stays:
                        writer.close()
                    async with asyncio.timeout(10):
                        await asyncio.wait(list(edge._connections))
                    assert not edge._connections
                    writer.close()
        finally:
            await server.stop(None)

    asyncio.run(run())


def test_an_address_that_is_taken_is_named():
    async def run():
        async with serving() as (_, port):
            with pytest.raises(ConfigError, match="health_address"):
                await HttpEdge({}).start(f"127.0.0.1:{port}", "health_address")

    asyncio.run(run())
