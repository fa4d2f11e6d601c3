"""The agent: small and never busy. Keeps the other processes running and the registry informed.

    start children → wait until the data process answers → register → heartbeat
                                                              ▲           │ fenced
                                                              └───────────┘ a new life

It touches no state of the trainers, so that nothing it does can take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from .config import Config, Voter
from .dialing import Dialer
from .errors import FastCheckdError
from .health.data_line import DataLine
from .health.heartbeats import HeartbeatSender
from .health.lease_clock import LeaseClock
from .registry.client import RegistryClient
from .registry.wire import voter_message
from .supervise import CHILD_CONFIG, CHILD_PARENT, Child
from .voting import Voting

logger = logging.getLogger(__name__)

#: How often the agent looks for other voters.
VOTERS_INTERVAL_S = 0.5
REGISTER_TIMEOUT_S = 5.0
REGISTER_PAUSE_S = 0.5
LEAVE_TIMEOUT_S = 1.0


class Agent:
    """Supervision and membership of one node."""

    def __init__(self, config: Config, registry: RegistryClient, dialer: Dialer) -> None:
        self._config = config
        self._dialer = dialer
        self._registry = registry
        self._incarnation = 0
        self._fenced = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.fatal: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._voters_changed = asyncio.Event()
        self.voting = Voting(
            config,
            lambda config, on_failure: _make_child("registry", config, on_failure),
            self._on_voters,
            self._on_fatal,
        )
        self._data_child = _make_child("data", config, self._on_fatal)
        self._data = DataLine(config, self._data_child, lambda: self._incarnation)

    @property
    def incarnation(self) -> int:
        """This node's life; 0 before it is registered."""
        return self._incarnation

    def _on_fatal(self, error: Exception) -> None:
        if not self.fatal.done():
            self.fatal.set_result(error)

    def _on_voters(self, voters: Sequence[Voter]) -> None:
        self._registry.use_voters(map(voter_message, voters))
        self._voters_changed.set()

    def start(self) -> None:
        """Start the children and the membership."""
        self.voting.start()
        self._data_child.start()
        self._tasks = [
            asyncio.create_task(self._data.run(), name="data line"),
            asyncio.create_task(self._follow_voters(), name="voters"),
            asyncio.create_task(self._membership(), name="membership"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the agent's %s task failed", task.get_name(), exc_info=error)
            self._on_fatal(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _follow_voters(self) -> None:
        """Go by whom the registry names, as the data process has noted it."""
        while True:
            await self.voting.look()
            await asyncio.sleep(VOTERS_INTERVAL_S)

    # --- membership ------------------------------------------------------------------------------

    async def _membership(self) -> None:
        """Live one life after the other."""
        await self._data.ready.wait()
        while True:
            await self._register()
            self._fenced.clear()
            while not self._fenced.is_set():
                self._voters_changed.clear()
                await self._beat()
            logger.warning(
                "the registry holds incarnation %d to be over; registering anew", self._incarnation
            )

    async def _beat(self) -> None:
        """Send signs of life, until this life is over or there are other voters to send them to."""
        voters = self.voting.config
        lease = LeaseClock([voter.node_id for voter in voters.effective_voters], voters.lease_s)
        self._data.live(lease)
        sender = HeartbeatSender(
            voters, self._heartbeat, self._fenced.set, lease, self._data.lease_moved, dialer=self._dialer
        )
        tasks = [
            asyncio.create_task(sender.run(), name="heartbeats"),
            asyncio.create_task(self._fenced.wait()),
            asyncio.create_task(self._voters_changed.wait()),
        ]
        try:
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _register(self) -> None:
        request = rpb.RegisterRequest(
            cluster_id=self._config.cluster_id,
            node_id=self._config.node_id,
            agent_address=self._config.agent_address,
            data_address=self._config.data_address,
            lane_address=self._config.lane_address,
            voter=self.voting.is_voter,
            ram_budget_bytes=self._config.ram_budget_bytes,
            life_id=secrets.token_hex(16),
            labels=self._config.labels,
        )
        complained = False
        while True:
            try:
                response = await self._registry.register(request, timeout_s=REGISTER_TIMEOUT_S)
            except FastCheckdError as error:
                if not complained:
                    logger.warning("cannot register yet: %s", error)
                complained = True
                await asyncio.sleep(REGISTER_PAUSE_S)
                continue
            self._incarnation = response.incarnation
            logger.info(
                "node %s is incarnation %d in epoch %d",
                self._config.node_id,
                response.incarnation,
                response.epoch,
            )
            return

    def _heartbeat(self) -> rpb.HeartbeatRequest:
        return rpb.HeartbeatRequest(
            node=pb.NodeRef(node_id=self._config.node_id, incarnation=self._incarnation),
            ram_used_bytes=self._data.ram_used_bytes,
            data=self._data.health,
        )

    async def stop(self) -> None:
        """Leave the cluster, then stop the children, the registry last."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._incarnation:
            request = rpb.LeaveRequest(
                node=pb.NodeRef(node_id=self._config.node_id, incarnation=self._incarnation)
            )
            with contextlib.suppress(FastCheckdError):  # the detector will find out
                await self._registry.leave(request, timeout_s=LEAVE_TIMEOUT_S)
        await self._data_child.stop(self._config.shutdown_grace_s)
        await self.voting.stop()


def _make_child(name: str, config: Config, on_fatal: Callable[[Exception], None]) -> Child:
    environment = {
        **os.environ,
        CHILD_CONFIG: config.to_json(),
        CHILD_PARENT: str(os.getpid()),
    }
    return Child(name, [sys.executable, "-m", "fastcheckd", "child", name], environment, on_fatal)
