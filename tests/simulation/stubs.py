"""Calls by name, as generated stubs have them, and the answers that come one after the other: views."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from tests.simulation.network import Context, Network, Servant, failure
from tests.simulation.virtual_time import PROCESS

#: Messages that a server may be ahead of its client.
AHEAD_MAX = 4
RESEND_S = 0.3


class Stub:
    """Calls by name, as a generated stub has them; the one that streams views too."""

    def __init__(self, network: Network, machine: str, address: str) -> None:
        self._network = network
        self._machine = machine
        self._address = address

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(
            request: Any, timeout: float = 60.0, metadata: tuple[tuple[str, str], ...] = (), **_: Any
        ) -> Any:
            if method == "WatchView":
                return Stream(self._network, self._machine, self._address, method, request)
            return self._network.call(
                self._machine, self._address, method, request, timeout, tuple(metadata or ())
            )

        return call


class Stream:
    """A stream of answers. In order, as a connection is: what is lost on the way is sent again until it arrives."""

    def __init__(self, network: Network, machine: str, address: str, method: str, request: Any) -> None:
        caller = PROCESS.get()
        assert caller is not None
        self._network = network
        self._caller = caller
        self._source = machine
        self._target = address.rpartition(":")[0]
        self._address = address
        self._method = method
        self._request = request
        self._arrived: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._sending: deque[Any] = deque()
        self._moving = False
        self._closed = False
        self._servant: Servant | None = None
        self._number = 0
        self._task: asyncio.Task[Any] | None = None
        network.loop.call_soon(self._connect, context=caller.context)

    def _connect(self) -> None:
        delay_s = self._network.weather.delay_s(self._source, self._target)
        if delay_s is not None:
            self._network.loop.at(self._network.loop.now + delay_s, self._accept, (), None)

    def _accept(self) -> None:
        network = self._network
        if self._target not in network.up or self._closed:
            return
        servant = network.servants.get(self._address)
        if servant is None:
            self._put(failure(grpc.StatusCode.UNAVAILABLE, "connection refused"))
            return
        network._calls += 1
        self._number, self._servant = network._calls, servant
        servant.open[self._number] = lambda: self._put(failure(grpc.StatusCode.UNAVAILABLE, "reset"))
        self._task = servant.process.start(self._serve(servant))

    async def _serve(self, servant: Servant) -> None:
        context = Context(())
        try:
            async for item in getattr(servant.target, self._method)(self._request, context):
                self._put(item)
                while len(self._sending) > AHEAD_MAX:
                    await asyncio.sleep(RESEND_S)
        except grpc.aio.AbortError:
            self._put(failure(*(context.status or (grpc.StatusCode.UNKNOWN, "", ()))))
        finally:
            servant.open.pop(self._number, None)

    def _put(self, item: Any) -> None:
        self._sending.append(item)
        if not self._moving:
            self._moving = True
            self._move()

    def _move(self) -> None:
        """Send what is next; called again until all has arrived."""
        network = self._network
        if self._closed or self._source not in network.up:
            return
        if not self._sending:
            self._moving = False
            return
        delay_s = network.weather.delay_s(self._target, self._source)
        if delay_s is None:
            network.loop.at(network.loop.now + RESEND_S, self._move, (), None)
        else:
            network.loop.at(
                network.loop.now + delay_s, self._arrive, (self._sending.popleft(),), self._caller.context
            )
            network.loop.at(network.loop.now + delay_s, self._move, (), None)

    def _arrive(self, item: Any) -> None:
        self._arrived.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> Any:
        """The next answer; raises AioRpcError."""
        while not self._arrived:
            self._reader = self._network.loop.create_future()
            await self._reader
        item = self._arrived.popleft()
        if isinstance(item, grpc.aio.AioRpcError):
            raise item
        return item

    def cancel(self) -> None:
        """The caller is not interested any more; the server hears of it if it can."""
        if not self._closed:
            self._closed = True
            if self._task is not None and self._servant is not None:
                self._servant.open.pop(self._number, None)
                self._network.post(self._source, self._target, self._servant.process, self._task.cancel)
