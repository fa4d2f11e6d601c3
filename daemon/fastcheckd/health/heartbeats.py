"""Sends this node's signs of life to every voter, for as long as it runs, and takes the answers in.

Ten a second to each voter: this is the busiest code of an idle node. One task per voter writes and minds the
clock, one reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from fastcheck_proto.v1 import registry_pb2, registry_pb2_grpc

from ..config import Config, Voter
from ..dialer import Dialer
from ..durations import AGENT, Durations
from .lease_clock import LeaseClock

logger = logging.getLogger(__name__)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 1.0
#: A living voter answers a few times within a lease. One that does not for so long gets a new stream.
ANSWER_S_MAX = 3.0


class HeartbeatSender:
    """One stream to each voter.

    Args:
        snapshot: what to say now; a request without an incarnation (not registered yet) is not sent.
        on_fenced: called in the loop when the leader says that the life in `snapshot` is over; once per life.
        lease: told of what is sent and answered.
        on_answer: called in the loop after each answer.
        durations: told how far apart each voter's answers are.
        dialer: makes the channels; by default with the config's certificate.
    """

    def __init__(
        self,
        config: Config,
        snapshot: Callable[[], registry_pb2.HeartbeatRequest],
        on_fenced: Callable[[], None],
        lease: LeaseClock | None = None,
        on_answer: Callable[[], None] = lambda: None,
        durations: Durations | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        self._config = config
        self._dialer = dialer or Dialer.of(config)
        self._snapshot = snapshot
        self._on_fenced = on_fenced
        voters = [voter.node_id for voter in config.effective_voters]
        self._lease = lease or LeaseClock(voters, config.lease_s)
        self._on_answer = on_answer
        self._durations = durations or Durations(AGENT)
        #: By voter; a stream that had to be made anew is a gap like any other.
        self._answered_at: dict[str, float] = {}
        self._fenced_incarnation = 0
        #: One count for all streams: a late answer from an earlier stream names no heartbeat of a later one.
        self._seq = 0

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            for voter in self._config.effective_voters:
                group.create_task(self._to(voter))

    async def _to(self, voter: Voter) -> None:
        while True:
            generation = self._dialer.generation
            async with self._dialer.channel(voter.node_id, voter.registry_address) as channel:
                await self._over(registry_pb2_grpc.RegistryServiceStub(channel), voter, generation)

    async def _over(
        self, stub: registry_pb2_grpc.RegistryServiceAsyncStub, voter: Voter, generation: int
    ) -> None:
        """Stream after stream, until one would have to begin under another certificate."""
        backoff_s = BACKOFF_S_MIN
        while self._dialer.generation == generation:
            if self._snapshot().node.incarnation:
                if await _Stream(self, voter, stub).run():
                    backoff_s = BACKOFF_S_MIN
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
            else:
                await asyncio.sleep(self._config.heartbeat_interval_s)

    def _answered(self, voter: str, lease_seq: int, now: float) -> None:
        if (before := self._answered_at.get(voter)) is not None:
            self._durations.add("heartbeat_gap", now - before)
        self._answered_at[voter] = now
        self._lease.answered(voter, lease_seq, now)
        self._on_answer()

    def _fenced(self, incarnation: int) -> None:
        if self._fenced_incarnation != incarnation == self._snapshot().node.incarnation:
            self._fenced_incarnation = incarnation
            self._on_fenced()


class _Stream:
    """One stream to one voter about one life: no late answer about the last life can end the next one."""

    def __init__(
        self, sender: HeartbeatSender, voter: Voter, stub: registry_pb2_grpc.RegistryServiceAsyncStub
    ) -> None:
        self._sender = sender
        self._voter = voter
        self._incarnation = sender._snapshot().node.incarnation
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._loop.time()
        self._call = stub.Heartbeat(self._beats())

    async def run(self) -> bool:
        """Read answers until the stream ends; returns whether there were any."""
        sender, answered = self._sender, False
        try:
            while isinstance(answer := await self._call.read(), registry_pb2.HeartbeatResponse):
                answered = True
                self._answered_at = self._loop.time()
                sender._answered(self._voter.node_id, answer.lease_seq, self._answered_at)
                if answer.fenced and answer.leader == self._voter.node_id:
                    sender._fenced(self._incarnation)
        except grpc.aio.AioRpcError as error:
            logger.debug("heartbeats to voter %s interrupted: %r", self._voter.node_id, error)
        except asyncio.CancelledError:
            # The call was cancelled for its silence, or we are.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            logger.debug("voter %s has not answered for %g s", self._voter.node_id, ANSWER_S_MAX)
        finally:
            self._call.cancel()
        return answered

    async def _beats(self) -> AsyncIterator[registry_pb2.HeartbeatRequest]:
        sender = self._sender
        interval_s = sender._config.heartbeat_interval_s
        while (request := sender._snapshot()).node.incarnation == self._incarnation:
            now = self._loop.time()
            if now - self._answered_at > ANSWER_S_MAX:
                self._call.cancel()
                return
            sender._seq += 1
            request.seq = sender._seq
            sender._lease.sent(self._voter.node_id, request.seq, now)
            yield request
            await asyncio.sleep(interval_s)
