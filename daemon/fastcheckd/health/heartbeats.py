"""Sends this node's signs of life to every voter, for as long as it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from fastcheck_proto.v1 import registry_pb2, registry_pb2_grpc

from ..config import Config, Voter
from ..rpc import CHANNEL_OPTIONS

logger = logging.getLogger(__name__)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 1.0
#: A living voter answers once a second at least.
ANSWER_S_MAX = 5.0


class HeartbeatSender:
    """One stream to each voter.

    Args:
        snapshot: what to say now; a request without an incarnation (not registered yet) is not sent.
        on_fenced: called in the loop when the leader says that the life in `snapshot` is over; once per life.
    """

    def __init__(
        self,
        config: Config,
        snapshot: Callable[[], registry_pb2.HeartbeatRequest],
        on_fenced: Callable[[], None],
    ) -> None:
        self._config = config
        self._snapshot = snapshot
        self._on_fenced = on_fenced
        self._fenced_incarnation = 0

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            for voter in self._config.effective_voters:
                group.create_task(self._to(voter))

    async def _to(self, voter: Voter) -> None:
        backoff_s = BACKOFF_S_MIN
        async with grpc.aio.insecure_channel(voter.registry_address, options=CHANNEL_OPTIONS) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            while True:
                incarnation = self._snapshot().node.incarnation
                if not incarnation:
                    await asyncio.sleep(self._config.heartbeat_interval_s)
                    continue
                # One stream, one life: no late answer about the last life can end the next one.
                call = stub.Heartbeat(self._beats(incarnation))
                try:
                    while True:
                        # Not wait_for: in Python 3.11 it can swallow the cancellation of this task.
                        async with asyncio.timeout(ANSWER_S_MAX):
                            answer = await call.read()
                        if not isinstance(answer, registry_pb2.HeartbeatResponse):
                            break
                        backoff_s = BACKOFF_S_MIN
                        if answer.fenced and answer.leader == voter.node_id:
                            self._fenced(incarnation)
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    logger.debug("heartbeats to voter %s interrupted: %r", voter.node_id, error)
                finally:
                    call.cancel()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _beats(self, incarnation: int) -> AsyncIterator[registry_pb2.HeartbeatRequest]:
        while (request := self._snapshot()).node.incarnation == incarnation:
            yield request
            await asyncio.sleep(self._config.heartbeat_interval_s)

    def _fenced(self, incarnation: int) -> None:
        if self._fenced_incarnation != incarnation == self._snapshot().node.incarnation:
            self._fenced_incarnation = incarnation
            self._on_fenced()
