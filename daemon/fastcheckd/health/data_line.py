"""The agent's line to its data process: who it is now, how it is, and the node's lease, over the Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import node_pb2_grpc as npb_grpc
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..rpc import CHANNEL_OPTIONS
from .lease_clock import LeaseClock
from .vitals import RESTART_AFTER, ProcessVitals

logger = logging.getLogger(__name__)

#: How often the agent tells the data process who it is and hears how it is.
ASSUME_INTERVAL_S = 0.5
ASSUME_TIMEOUT_S = 2.0
HOLD_PAUSE_S = 0.1


class DataLine:
    """Two conversations with the data process, for ever.

    Args:
        pid: process id of the data process; None while there is none.
        kill: ends the one with this id, for its supervisor to start it anew, when it hangs for too long.
        incarnation: this node's life now; 0: not registered yet.
    """

    def __init__(
        self,
        config: Config,
        pid: Callable[[], int | None],
        kill: Callable[[int], None],
        incarnation: Callable[[], int],
    ) -> None:
        self._config = config
        self._pid = pid
        self._kill = kill
        self._incarnation = incarnation
        self._timeout_s = min(ASSUME_TIMEOUT_S, config.data_hung_after_s / 2)
        self._vitals = ProcessVitals(
            hung_after_s=config.data_hung_after_s, step_s=self._timeout_s + ASSUME_INTERVAL_S
        )
        self._lease: LeaseClock | None = None
        self._reborn = asyncio.Event()
        self._lease_moved = asyncio.Event()
        #: By the loop's clock: when it last answered.
        self.answered_at = asyncio.get_running_loop().time()
        #: Set when the data process has answered for the first time.
        self.ready = asyncio.Event()
        self.ram_used_bytes = 0
        #: Why the registry does not call this life UP, as the data process last heard; empty: it does.
        self.not_up = "the data process has not answered yet"

    @property
    def health(self) -> rpb.DataHealth.ValueType:
        """How the data process is."""
        return self._vitals.health(self._pid())

    def live(self, lease: LeaseClock) -> None:
        """A new life has begun: tell the data process at once, and from now on what `lease` says."""
        self._lease = lease
        self._reborn.set()
        self._lease_moved.set()

    def lease_moved(self) -> None:
        """The lease may have been renewed."""
        self._lease_moved.set()

    async def run(self) -> None:
        """Speak until cancelled."""
        async with (
            grpc.aio.insecure_channel(
                f"unix://{self._config.data_socket}", options=CHANNEL_OPTIONS
            ) as channel,
            asyncio.TaskGroup() as group,
        ):
            stub = npb_grpc.DataControlServiceStub(channel)
            group.create_task(self._assume(stub))
            group.create_task(self._hold(stub))

    async def _assume(self, stub: npb_grpc.DataControlServiceAsyncStub) -> None:
        loop = asyncio.get_running_loop()
        was_ok = False
        while True:
            pid = self._pid()
            self._vitals.look(pid, loop.time())
            try:
                answer: npb.AssumeResponse = await stub.Assume(
                    npb.AssumeRequest(incarnation=self._incarnation()), timeout=self._timeout_s
                )
            except grpc.aio.AioRpcError as error:
                self._vitals.look(self._pid(), loop.time())
                if was_ok:
                    logger.warning("the data process does not answer: %s", error.code().name)
                was_ok = False
                self._end_it_if_hung()
            else:
                was_ok = True
                if self._pid() == pid:
                    self._vitals.answered()
                    self.answered_at = loop.time()
                    self.ready.set()
                self.ram_used_bytes = answer.ram_used_bytes
                self.not_up = answer.not_up
            pause_s = ASSUME_INTERVAL_S if was_ok else ASSUME_INTERVAL_S / 5
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._reborn.wait()
            self._reborn.clear()

    def _end_it_if_hung(self) -> None:
        if self._vitals.must_restart and (pid := self._pid()) is not None:
            logger.error(
                "the data process (pid %s) has made no progress for %g s: ending it, to start it anew",
                pid,
                RESTART_AFTER * self._config.data_hung_after_s,
            )
            self._kill(pid)

    async def _hold(self, stub: npb_grpc.DataControlServiceAsyncStub) -> None:
        while True:
            try:
                await stub.Hold(self._holds())
            except grpc.aio.AioRpcError as error:
                logger.debug("the data process takes no lease now: %s", error.code().name)
            await asyncio.sleep(ASSUME_INTERVAL_S / 5)

    async def _holds(self) -> AsyncIterator[npb.HoldRequest]:
        """The lease whenever it has changed, a few times a second at most."""
        loop = asyncio.get_running_loop()
        told: tuple[int, float | None, bool] | None = None
        while True:
            if self._lease is not None:
                now = self._incarnation(), self._lease.deadline(), self._lease.has_quorum(loop.time())
                if now != told:
                    told = now
                    yield npb.HoldRequest(
                        incarnation=now[0],
                        deadline_monotonic_ns=int((now[1] or 0.0) * 1e9),
                        has_quorum=now[2],
                    )
            await asyncio.sleep(HOLD_PAUSE_S)
            self._lease_moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASSUME_INTERVAL_S):
                    await self._lease_moved.wait()
