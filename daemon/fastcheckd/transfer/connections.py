"""Threads of an executor, taken together for the connections of one transfer.

A transfer's tickets live 30 seconds, so it may not begin before it has threads: first they are
taken, then the peer is asked, then they go to work. If the executor has fewer to spare than wanted,
the transfer runs over fewer connections. One connection that fails, or a cancelled caller, ends all;
nobody returns before every thread has let go of the shard's memory. Nothing here knows about shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future

from ..config import split_address
from ..errors import FrameError, PeerError
from .channel import Channel
from .lane_meter import LaneMeter
from .lane_tls import LaneTls
from .sockets import bind_source, describe, resolve, set_timeout, tune

#: A thread that is free starts at once; one that is not is not waited for.
_GATHER_S = 0.02
#: A thread without orders goes home after this long, whatever became of its caller.
_ORDERS_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S_MAX = 5.0

Work = Callable[[], None]


class Connections:
    """The threads of one transfer. Made by `connections`."""

    def __init__(self) -> None:
        self._futures: list[Future[None]] = []
        self._orders: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._over = False
        self._done = 0
        self._first_error: BaseException | None = None

    @property
    def size(self) -> int:
        """Threads at hand, at least 1 unless none were wanted."""
        return len(self._futures)

    async def run(self, work: Sequence[Work]) -> None:
        """Let each thread do one piece of work; raises the first error of any, when all have ended."""
        assert len(work) == self.size, "one piece of work per thread"
        for piece in work:
            self._orders.put(piece)
        await self._all_gone()
        if self._first_error is not None:
            raise self._first_error
        if self._done != len(work):
            raise PeerError("the transfer's threads waited too long for their orders")

    @contextlib.contextmanager
    def channel(
        self,
        address: str,
        whom: str,
        timeout_s: float,
        congestion: str,
        *,
        source: str = "",
        meter: LaneMeter | None = None,
        tls: LaneTls | None = None,
        node_id: str = "",
    ) -> Iterator[Channel]:
        """In one of the threads: a connection to host:port that ends when the transfer does.

        It comes from this machine's address (or name) `source`; empty: from whatever the system takes. Its bytes
        count in `meter`. With `tls`, the other end has to be `node_id`.

        Raises:
            PeerError: it cannot be reached, fails, or breaks the protocol; or the transfer has ended.
        """
        try:
            host, port = split_address(address)
            family, place = resolve(host, port, source)
        except (ValueError, OSError) as error:
            seen = f", seen from {source}" if source else ""
            raise PeerError(f"{whom} has no usable lane address {address!r}{seen}: {error}") from None
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            channel = Channel(sock, whom, timeout_s)
            with self._lock:
                if self._over:
                    raise PeerError(f"the transfer with {whom} was ended")
                self._channels.add(channel)
            try:
                try:
                    tune(sock, congestion)
                    if source:
                        bind_source(sock, source)
                    sock.settimeout(min(timeout_s, _CONNECT_TIMEOUT_S_MAX))
                    sock.connect(place)
                    set_timeout(sock, timeout_s)
                except OSError as error:
                    raise PeerError(
                        f"cannot connect to the lane of {whom} at {address}"
                        f"{f' from {source}' if source else ''}: {describe(error)}"
                    ) from None
                if meter is not None:
                    meter.add(channel)
                if tls is not None:
                    channel.connect_tls(tls, node_id, min(timeout_s, _CONNECT_TIMEOUT_S_MAX))
                yield channel
            except FrameError as error:
                raise PeerError(f"{whom} broke the lane's protocol: {error}", reason=error.code) from None
            finally:
                if meter is not None:
                    meter.remove(channel)
                with self._lock:
                    self._channels.discard(channel)
                channel.close()

    def end(self) -> None:
        """End all connections, and let no new one begin."""
        with self._lock:
            self._over = True
            for channel in self._channels:
                channel.end()

    async def _take(self, executor: Executor, wanted: int) -> None:
        if wanted == 0:
            return
        loop = asyncio.get_running_loop()
        one, everyone = asyncio.Event(), asyncio.Event()
        present = 0

        def arrive() -> None:
            nonlocal present
            present += 1
            one.set()
            if present == wanted:
                everyone.set()

        try:
            for _ in range(wanted):
                self._futures.append(executor.submit(self._stand_by, loop, arrive))
        except RuntimeError as error:
            raise PeerError(f"this node is shutting down: {error}") from None
        await one.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                await everyone.wait()
        self._futures = [future for future in self._futures if not future.cancel()]

    async def _give_back(self) -> None:
        for future in self._futures:
            future.cancel()
            self._orders.put(None)
        self.end()
        try:
            await self._all_gone()
        finally:
            # Its traceback holds the threads' frames, and so the shard's memory.
            self._first_error = None

    def _stand_by(self, loop: asyncio.AbstractEventLoop, arrive: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(arrive)
        try:
            work = self._orders.get(timeout=_ORDERS_TIMEOUT_S)
        except queue.Empty:
            return
        if work is None:
            return
        try:
            work()
            with self._lock:
                self._done += 1
        except BaseException as error:  # noqa: BLE001  raised again by `run`, in the caller's task
            with self._lock:
                self._first_error = self._first_error or error
            self.end()

    async def _all_gone(self) -> None:
        """Wait until no thread is at work any more. A cancellation ends the work, not the wait."""
        left: set[asyncio.Future[None]] = {asyncio.wrap_future(future) for future in self._futures}
        cancelled: asyncio.CancelledError | None = None
        while left:
            try:
                _, left = await asyncio.wait(left)
            except asyncio.CancelledError as error:
                cancelled = error
                self.end()
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del cancelled  # or exception and frame keep each other, and what the frames hold, alive


@contextlib.asynccontextmanager
async def connections(executor: Executor, wanted: int) -> AsyncIterator[Connections]:
    """At least one thread of the executor (none if none is wanted), up to `wanted`; waits for the first."""
    opened = Connections()
    try:
        await opened._take(executor, wanted)
        yield opened
    finally:
        await opened._give_back()


class LoopProgress:
    """Reports of many threads as few calls on the event loop, where the listener's state is safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Callable[[int], None]) -> None:
        self._loop = loop
        self._listener = listener
        self._lock = threading.Lock()
        self._waiting_bytes = 0

    def __call__(self, count: int) -> None:
        """Bytes moved; from any thread."""
        with self._lock:
            scheduled = self._waiting_bytes > 0
            self._waiting_bytes += count
        if not scheduled:
            self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        with self._lock:
            count, self._waiting_bytes = self._waiting_bytes, 0
        self._listener(count)
