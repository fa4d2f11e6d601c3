"""A small HTTP server for questions that have short answers: GET and HEAD, one request per connection.

Whoever reaches the port may be anybody, so everything is bounded: connections, the bytes and the time of a request,
the time of an answer. When all connections are taken, the one that has kept us waiting longest for its request makes
room, or else the oldest that speaks gRPC, which may ask nothing for minutes: no crowd of either keeps a probe out.

gRPC's health service can be had on the same port. HTTP/2 begins with what reads like a request of HTTP/1, on
purpose (RFC 9113, 3.4): `PRI * HTTP/2.0`. Such a connection is handed, byte by byte, to a gRPC server that has
nothing but that service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from ..config import split_address
from ..errors import ConfigError
from ..log import Complaints

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
HEAD_BYTES_MAX = 8192
REQUEST_S_MAX = 5.0
#: An answer, the reader's time for it included. Handlers end long before by their own deadlines.
ANSWER_S_MAX = 10.0
#: A gRPC connection is kept for one probe after the other, or a watch; then the client connects anew.
GRPC_S_MAX = 600.0
_PIECE_BYTES = 16384
_HTTP2_HEAD = b"PRI * HTTP/2.0\r\n\r\n"


@dataclass(frozen=True)
class Response:
    """What is answered."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Handler = Callable[[], Awaitable[Response]]


class HttpEdge:
    """One listener.

    Args:
        routes: path → what answers it.
        grpc_socket: Unix socket of a gRPC server for clients that speak HTTP/2; None: they are refused.
    """

    def __init__(self, routes: Mapping[str, Handler], grpc_socket: Path | None = None) -> None:
        self._routes = dict(routes)
        self._grpc_socket = grpc_socket
        self._server: asyncio.Server | None = None
        self._complaints = Complaints(logger, f"HTTP, {', '.join(self._routes)}")
        #: All connections, the oldest first.
        self._connections: dict[asyncio.Task[None], None] = {}
        #: Those of which the request has not come yet.
        self._waiting: dict[asyncio.Task[None], None] = {}
        #: Those that were handed to the gRPC server.
        self._handed_over: dict[asyncio.Task[None], None] = {}

    async def start(self, address: str, key: str) -> None:
        """Listen on host:port; ConfigError, which names the `key` to change, where that cannot be."""
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise ConfigError(
                f"config key '{key}': cannot listen on {address}: {error.strerror or error}"
            ) from None

    async def stop(self) -> None:
        """Close the listener and all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= CONNECTIONS_MAX:
            self._complaints.add("all %d connections at this port are taken", CONNECTIONS_MAX)
            gives_way = next(iter(self._waiting or self._handed_over), None)
            if gives_way is None:
                writer.transport.abort()
                return
            gives_way.cancel()
            # Its task has not ended yet; it is not to be asked again.
            self._waiting.pop(gives_way, None)
            self._handed_over.pop(gives_way, None)
        self._connections[task] = self._waiting[task] = None
        try:
            await self._serve(task, reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # Slow, gone, or in the way: none of it is worth a line, and a task of its own has nobody to tell.
            writer.transport.abort()
        finally:
            self._connections.pop(task, None)
            self._waiting.pop(task, None)
            self._handed_over.pop(task, None)

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(REQUEST_S_MAX):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                head = b""
        self._waiting.pop(task, None)
        if head == _HTTP2_HEAD and self._grpc_socket is not None:
            self._handed_over[task] = None
            await self._hand_over(self._grpc_socket, head, reader, writer)
            return
        async with asyncio.timeout(ANSWER_S_MAX):
            response, with_body = await self._answer(head)
            writer.write(_encode(response, with_body=with_body))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _answer(self, head: bytes) -> tuple[Response, bool]:
        """The response, and whether its body is wanted."""
        if not head:
            return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), True
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _refusal(HTTPStatus.BAD_REQUEST), True
        method, target, _ = words
        if method not in {"GET", "HEAD"}:
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED), True
        handler = self._routes.get(target.partition("?")[0])
        if handler is None:
            known = ", ".join(self._routes)
            return Response(HTTPStatus.NOT_FOUND, f"there is: {known}\n".encode()), method == "GET"
        try:
            return await handler(), method == "GET"
        except Exception:
            logger.exception("answering %s failed", target[:100])
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR), method == "GET"

    @staticmethod
    async def _hand_over(
        socket: Path, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Join the connection with one to the gRPC server until either end closes it, or its time is up."""
        grpc_reader, grpc_writer = await asyncio.open_unix_connection(str(socket))
        try:
            grpc_writer.write(head)
            async with asyncio.timeout(GRPC_S_MAX):
                ways = {
                    asyncio.create_task(_pump(reader, grpc_writer)),
                    asyncio.create_task(_pump(grpc_reader, writer)),
                }
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        finally:
            grpc_writer.close()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


def _refusal(status: HTTPStatus) -> Response:
    return Response(status, f"{status.phrase}\n".encode())


def _encode(response: Response, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")
