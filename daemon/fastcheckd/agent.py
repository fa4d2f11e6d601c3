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

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from .config import Config
from .errors import FastCheckdError
from .health.data_line import DataLine
from .health.heartbeats import HeartbeatSender
from .health.lease_clock import LeaseClock
from .registry.client import RegistryClient
from .supervise import CHILD_CONFIG, CHILD_PARENT, Child

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0
REGISTER_PAUSE_S = 0.5
LEAVE_TIMEOUT_S = 1.0


class Agent:
    """Supervision and membership of one node."""

    def __init__(self, config: Config, registry: RegistryClient) -> None:
        self._config = config
        self._registry = registry
        self._incarnation = 0
        self._fenced = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.fatal: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        names = ["data"] if config.own_voter is None else ["registry", "data"]
        environment = {
            **os.environ,
            CHILD_CONFIG: config.to_json(),
            CHILD_PARENT: str(os.getpid()),
        }
        self._children = [
            Child(name, [sys.executable, "-m", "fastcheckd", "child", name], environment, self._on_fatal)
            for name in names
        ]
        self._data = DataLine(config, self._children[-1], lambda: self._incarnation)

    @property
    def incarnation(self) -> int:
        """This node's life; 0 before it is registered."""
        return self._incarnation

    def _on_fatal(self, error: Exception) -> None:
        if not self.fatal.done():
            self.fatal.set_result(error)

    def start(self) -> None:
        """Start the children and the membership."""
        for child in self._children:
            child.start()
        self._tasks = [
            asyncio.create_task(self._data.run(), name="data line"),
            asyncio.create_task(self._membership(), name="membership"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the agent's %s task failed", task.get_name(), exc_info=error)
            self._on_fatal(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    # --- membership ------------------------------------------------------------------------------

    async def _membership(self) -> None:
        """Live one life after the other."""
        await self._data.ready.wait()
        while True:
            await self._register()
            self._fenced.clear()
            lease = LeaseClock([v.node_id for v in self._config.effective_voters], self._config.lease_s)
            self._data.live(lease)
            sender = HeartbeatSender(
                self._config, self._heartbeat, self._fenced.set, lease, self._data.lease_moved
            )
            beating = asyncio.create_task(sender.run(), name="heartbeats")
            try:
                await self._fenced.wait()
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            logger.warning(
                "the registry holds incarnation %d to be over; registering anew", self._incarnation
            )

    async def _register(self) -> None:
        request = rpb.RegisterRequest(
            cluster_id=self._config.cluster_id,
            node_id=self._config.node_id,
            agent_address=self._config.agent_address,
            data_address=self._config.data_address,
            lane_address=self._config.lane_address,
            voter=self._config.own_voter is not None,
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
        for child in reversed(self._children):
            await child.stop(self._config.shutdown_grace_s)
