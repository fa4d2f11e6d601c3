"""An event loop in virtual time, whose callbacks belong to processes that can be stopped and killed.

Time stands still while callbacks run and jumps to the next timer when none is ready: what takes 30 s takes
as long as the work in it. Order depends on nothing but the order of calls. Each callback runs in a context
that names its process (`PROCESS`); that is all it takes to freeze one in the middle of whatever it does, to
have one vanish without any `finally`, and to give each machine a clock of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any


class Clock:
    """A machine's monotonic clock: runs at `rate`, started at `offset`."""

    def __init__(self, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.rate = rate
        self.offset_s = offset_s

    def local(self, true_s: float) -> float:
        return self.offset_s + true_s * self.rate

    def true(self, local_s: float) -> float:
        return (local_s - self.offset_s) / self.rate


class Killed(BaseException):
    """A process was killed in the middle of what it did: nothing may catch this and go on.

    `just_now`: by the very operation that raises it; otherwise it is dead already, and code of it that still runs.
    """

    def __init__(self, just_now: bool) -> None:
        super().__init__()
        self.just_now = just_now


class Process:
    """Something that runs, stands still, or is gone for good."""

    def __init__(self, loop: VirtualLoop, name: str, clock: Clock, machine: str = "") -> None:
        self.name = name
        self.machine = machine
        #: What a registry process has beside; see `voter`.
        self.voter: Any = None
        self.clock = clock
        self.paused = False
        self.dead = False
        self.loop = loop
        self.backlog: list[Handle] = []
        #: Who is told of its death, by any key.
        self.mourners: dict[object, Callable[[], None]] = {}
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def now(self) -> float:
        """What this machine's clock shows."""
        clock = self.clock
        return clock.offset_s + self.loop.now * clock.rate

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as part of this process."""
        return self.loop.create_task(work, context=self.context.copy())

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function as part of this process, soon."""
        self.loop.call_soon(function, *args, context=self.context)

    def later(self, delay_s: float, function: Callable[..., object], *args: object) -> None:
        """Run a function as part of this process, after so long a time by the true clock."""
        self.loop.at(self.loop.now + delay_s, function, args, self.context)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Go on; what became due in the meantime happens now, in its order."""
        self.paused = False
        self.loop.ready_again(self.backlog)
        self.backlog = []

    def kill(self) -> None:
        """Nothing of it runs ever again, not even a `finally`."""
        self.dead = True
        self.backlog = []
        mourners, self.mourners = self.mourners, {}
        for told in mourners.values():
            told()


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)


class _Task(asyncio.Task[Any]):
    """Hashes by age, not by address: sets of tasks are walked in the same order in every run."""

    _ages = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._age = next(self._ages)  # first: being made, it is put into a set already
        super().__init__(*args, **kwargs)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._age


class StuckError(Exception):
    """Nothing will ever happen any more."""


class Handle:
    """A callback to come: as much of an `asyncio.Handle` as anybody here asks for. A seed makes ten thousand."""

    __slots__ = ("args", "callback", "context", "gone", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: Any, context: contextvars.Context, when_s: float = 0.0
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.when_s = when_s
        self.gone = False

    def cancel(self) -> None:
        self.gone = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self.when_s


def _nothing() -> None:
    pass


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `now` is the true time in seconds since its start."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()
        self._nobody = contextvars.Context()
        self._queue: deque[Handle] = deque()
        #: Every task ever made: the garbage collector must not close one of a killed process midway.
        self._all: list[asyncio.Task[Any]] = []
        _Task._ages = itertools.count()
        self.errors: list[str] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._failed)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Any = None) -> asyncio.Task[Any]:
        task = _Task(coro, loop=loop, context=context)
        self._all.append(task)
        return task

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def time(self) -> float:
        """What the calling process' machine shows."""
        process = PROCESS.get()
        return self.now if process is None else process.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(self, *_args: Any, **_kwargs: Any) -> asyncio.Handle:
        raise AssertionError("the simulation has one thread")

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        process = PROCESS.get()
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context, when)
        due = when if process is None else process.clock.true(when)
        # Never early, not even by a rounding: a timeout looks at its clock again.
        heapq.heappush(self._timers, (due + 1e-9, next(self._order), handle))
        return handle

    def at(
        self, when: float, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> None:
        """Call at a true time; without a context on behalf of nobody."""
        handle = Handle(callback, args, self._nobody if context is None else context)
        heapq.heappush(self._timers, (when, next(self._order), handle))

    def ready_again(self, handles: list[Handle]) -> None:
        self._queue.extend(handles)

    def _run_once(self) -> None:
        """All turns until somebody stops the loop: they are too many for one call each."""
        queue = self._queue
        while True:
            if not queue:
                self._advance()
            for _ in range(len(queue)):
                handle = queue.popleft()
                if handle.gone:
                    continue
                process = handle.context.get(PROCESS)
                if process is not None:
                    if process.dead:
                        continue
                    if process.paused:
                        process.backlog.append(handle)
                        continue
                self.callbacks += 1
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except Killed:
                    pass
                except BaseException as error:  # noqa: BLE001  as asyncio's own handles do
                    message = f"Exception in callback {handle.callback!r}"
                    self.call_exception_handler({"message": message, "exception": error})
            if self._stopping:
                return

    def _advance(self) -> None:
        """To the next timers."""
        queue, timers = self._queue, self._timers
        while timers and timers[0][2].gone:
            heapq.heappop(timers)
        if not timers:
            raise StuckError("no callback and no timer is left")
        self.now = now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= now:
            queue.append(heapq.heappop(timers)[2])

    def _write_to_self(self) -> None:
        raise AssertionError("the simulation has one thread")

    def stop(self) -> None:
        self._stopping = True
        self.call_soon(lambda: None, context=contextvars.Context())

    def close(self) -> None:
        """Forget everything; what still waits is closed without a word."""
        self._timers.clear()
        self._queue.clear()
        self._all.clear()
        super().close()
