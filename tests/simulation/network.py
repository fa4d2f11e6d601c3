"""The wire: messages between processes of machines, delayed, lost, repeated and cut off as `Weather` says.

A call to a dead process on a living machine is refused at once, one that is lost or not answered runs into its
caller's deadline. A handler whose caller gave up is cancelled when the news of that gets through, and runs on
when it does not: then a call has effects that nobody heard of.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from tests.simulation.virtual_time import PROCESS, Process, VirtualLoop


class Weather:
    """What the links are like now; a link is a pair of machine names, from and to."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.cut: set[tuple[str, str]] = set()
        self.lossy: dict[tuple[str, str], float] = {}
        self.slow: dict[tuple[str, str], float] = {}
        self.repeats = 0.0

    def delay_s(self, source: str, target: str) -> float | None:
        """How long a message takes; None: it never arrives."""
        if source == target:
            return 0.0001
        link = (source, target)
        if link in self.cut:
            return None
        if self.lossy and self._rng.random() < self.lossy.get(link, 0.0):
            return None
        delay_s = 0.0003 + 0.0007 * self._rng.random()
        if self.slow and link in self.slow:
            delay_s += self.slow[link] * self._rng.random()
        return delay_s

    def clear(self) -> None:
        self.cut.clear()
        self.lossy.clear()
        self.slow.clear()
        self.repeats = 0.0


class Servant:
    """A process that listens at an address, and what answers there."""

    def __init__(self, machine: str, process: Process, target: Any) -> None:
        self.machine = machine
        self.process = process
        self.target = target
        #: Calls that its death ends.
        self.open: dict[int, Callable[[], None]] = {}


class Context:
    """What a servicer sees of a call."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], due: float | None = None) -> None:
        self._metadata = metadata
        self._due = due
        self.status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        self.status = (code, details, tuple(trailing))
        raise grpc.aio.AbortError()

    def time_remaining(self) -> float | None:
        """By the server's clock, which may run faster or slower than the caller's."""
        return None if self._due is None else max(0.0, self._due - asyncio.get_running_loop().time())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def set_trailing_metadata(self, trailing: Any) -> None:
        pass


def failure(code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Network:
    """All machines' links and listeners."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = Weather(rng)
        self.servants: dict[str, Servant] = {}
        self.up: set[str] = set()
        self._calls = 0
        self.in_flight = 0

    def listen(self, address: str, servant: Servant) -> None:
        self.servants[address] = servant

    def gone(self, servant: Servant, address: str, machine_lives: bool) -> None:
        """A process has died: its machine resets its connections, unless that died as well."""
        if self.servants.get(address) is servant:
            del self.servants[address]
        if machine_lives:
            for reset in list(servant.open.values()):
                reset()
        servant.open.clear()

    def post(
        self, source: str, target: str, process: Process, function: Callable[..., object], *args: object
    ) -> None:
        """A message that needs no answer, for `process` on machine `target`."""
        weather = self.weather
        if target not in self.up:
            return
        delay_s = weather.delay_s(source, target)
        if delay_s is None:
            return
        self.loop.at(self.loop.now + delay_s, function, args, process.context)

    async def call(
        self,
        source: str,
        address: str,
        method: str,
        request: Any,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """One question and its answer; raises AioRpcError."""
        caller = PROCESS.get()
        assert caller is not None, "calls are made by processes"
        loop, weather = self.loop, self.weather
        target = address.rpartition(":")[0]
        answer: asyncio.Future[Any] = loop.create_future()
        handling: list[tuple[Servant, int, asyncio.Task[Any]]] = []

        def settle(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def back(result: Any) -> None:
            delay_s = weather.delay_s(target, source)
            if delay_s is not None and source in self.up:
                loop.at(loop.now + delay_s, settle, (result,), caller.context)

        def expire() -> None:
            settle(failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

        def reset() -> None:
            back(failure(grpc.StatusCode.UNAVAILABLE, "connection reset"))

        def arrive() -> None:
            if target not in self.up:
                return
            servant = self.servants.get(address)
            if servant is None:
                back(failure(grpc.StatusCode.UNAVAILABLE, "connection refused"))
                return
            self._calls += 1
            number = self._calls
            servant.open[number] = reset
            task = servant.process.start(
                self._serve(servant, number, method, request, metadata, timeout_s, back)
            )
            handling.append((servant, number, task))

        delay_s = weather.delay_s(source, target)
        if delay_s is not None:
            loop.at(loop.now + delay_s, arrive, (), None)
            if weather.repeats and self.rng.random() < weather.repeats:
                loop.at(loop.now + delay_s + 2 * self.rng.random(), arrive, (), None)
        # Not `asyncio.timeout`, which costs more than all else here.
        deadline = loop.call_later(timeout_s, expire)
        self.in_flight += 1
        try:
            result = await answer
        finally:
            deadline.cancel()
            self.in_flight -= 1
            for servant, number, task in handling:
                if not task.done():
                    servant.open.pop(number, None)
                    self.post(source, target, servant.process, task.cancel)
        if isinstance(result, grpc.aio.AioRpcError):
            raise result
        return result

    async def _serve(
        self,
        servant: Servant,
        number: int,
        method: str,
        request: Any,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
        back: Callable[[Any], None],
    ) -> None:
        context = Context(metadata, self.loop.time() + timeout_s)
        try:
            result = await getattr(servant.target, method)(request, context)
        except grpc.aio.AbortError:
            assert context.status is not None
            code, details, trailing = context.status
            result = failure(code, details, trailing)
        finally:
            servant.open.pop(number, None)
        back(result)
