"""Calls to the data processes of other nodes: offers, openings, questions. The bytes of shards take the lane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, TypeVar

import grpc

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

from ..dialer import Channels, Dialer
from ..errors import CorruptError, FastCheckdError, PeerError
from ..rpc import from_rpc_error
from .frames import TICKET_BYTES

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
_REPORT_TIMEOUT_S = 5.0

Q = TypeVar("Q")
R = TypeVar("R")
Q_contra = TypeVar("Q_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class _Method(Protocol[Q_contra, R_co]):
    def __call__(self, request: Q_contra, /, *, timeout: float) -> Awaitable[R_co]: ...


class PeerClient:
    """A channel to each node that was lately asked. Used on one event loop.

    Args:
        timeout_s: how long a node may leave us without an answer.
        dialer: makes the channels; by default plaintext ones.
    """

    def __init__(self, timeout_s: float, dialer: Dialer | None = None) -> None:
        self._timeout_s = timeout_s
        self._channels = Channels(dialer or Dialer())
        self._background: set[asyncio.Task[None]] = set()

    async def replicate(
        self, holder: pb.Holder, request: peer_pb2.ReplicateRequest, timeout_s: float
    ) -> peer_pb2.ReplicateResponse:
        """Have a node pull a copy of a shard from the sources that the request names; returns when it is safe there.

        Raises:
            CorruptError: what it acknowledges is not the shard.
            PeerError: it cannot be reached, did not get the shard, or does not answer in time.
            FencedError, NoLeaseError, OverBudgetError, StoreFullError, InvalidRequestError: its answer.
        """
        stub = self._stub(holder.node.node_id, holder.data_address)
        answer = await self._ask(stub.Replicate, request, name_of(holder), timeout_s)
        if answer.digest != request.digest:
            raise CorruptError(f"{name_of(holder)} acknowledged another digest than that of the shard")
        return answer

    async def open(
        self, source: pb.Holder, request: peer_pb2.OpenRequest, timeout_s: float | None = None
    ) -> peer_pb2.OpenResponse:
        """Open a replica on a node for reading.

        Raises:
            NotHeldError: it does not have this shard with this digest.
            PeerError: it cannot be reached, does not answer in time, or refused.
        """
        stub = self._stub(source.node.node_id, source.data_address)
        answer = await self._ask(stub.Open, request, name_of(source), timeout_s or self._timeout_s)
        if len(answer.tickets) != request.streams or any(len(t) != TICKET_BYTES for t in answer.tickets):
            raise PeerError(
                f"{name_of(source)} gave {len(answer.tickets)} lane tickets, {request.streams} are needed"
            )
        return answer

    def report_corrupt(self, source: pb.Holder, key: pb.ShardKey, digest: bytes) -> None:
        """Tell a node, in the background, that its copy is bad: it checks it and drops it if so."""
        self._later(self._report_corrupt(source, key, digest))

    async def _report_corrupt(self, source: pb.Holder, key: pb.ShardKey, digest: bytes) -> None:
        request = peer_pb2.ReportCorruptRequest(key=key, digest=digest)
        stub = self._stub(source.node.node_id, source.data_address)
        try:
            answer = await self._ask(stub.ReportCorrupt, request, name_of(source), _REPORT_TIMEOUT_S)
            logger.info(
                "%s checked its copy of shard %s: dropped=%s", name_of(source), shown(key), answer.dropped
            )
        except FastCheckdError as error:
            logger.warning("could not report a bad copy: %s", error)

    async def list_replicas(
        self, node_id: str, data_address: str, job: str, step: int | None, timeout_s: float
    ) -> list[peer_pb2.Replica]:
        """What a node holds of a job (empty: of all), of one step or of all.

        Raises:
            PeerError: it does not answer in time.
        """
        request = peer_pb2.ListReplicasRequest(job=job, step=step)
        stub = self._stub(node_id, data_address)
        answer = await self._ask(stub.ListReplicas, request, _name(node_id, data_address), timeout_s)
        return list(answer.replicas)

    async def verify_replicas(
        self, node_id: str, data_address: str, job: str, step: int | None, timeout_s: float
    ) -> peer_pb2.VerifyReplicasResponse:
        """Have a node check all that it holds of a job, or of one step, now.

        Raises:
            PeerError: it does not answer in time.
        """
        request = peer_pb2.VerifyReplicasRequest(job=job, step=step)
        stub = self._stub(node_id, data_address)
        return await self._ask(stub.VerifyReplicas, request, _name(node_id, data_address), timeout_s)

    async def get_stats(self, node_id: str, data_address: str, timeout_s: float) -> peer_pb2.GetStatsResponse:
        """Counters and memory of a node's data process; PeerError when it does not answer in time."""
        stub = self._stub(node_id, data_address)
        request = peer_pb2.GetStatsRequest()
        return await self._ask(stub.GetStats, request, _name(node_id, data_address), timeout_s)

    async def close(self) -> None:
        """Let last words go out, then close all channels."""
        if self._background:
            await asyncio.wait(self._background, timeout=_LAST_WORDS_S)
        for task in self._background:
            task.cancel()
        await self._channels.close()

    async def _ask(self, method: _Method[Q, R], request: Q, whom: str, timeout_s: float) -> R:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, whom) from None

    def _stub(self, node_id: str, address: str) -> peer_pb2_grpc.PeerServiceAsyncStub:
        channel = self._channels.to(node_id, address)
        stub: peer_pb2_grpc.PeerServiceAsyncStub = peer_pb2_grpc.PeerServiceStub(channel)
        return stub

    def _later(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def name_of(holder: pb.Holder) -> str:
    """A node in messages."""
    return f"node {holder.node.node_id} ({holder.data_address})"


def shown(key: pb.ShardKey) -> str:
    """A shard in messages."""
    return f"{key.job} step {key.step} rank {key.rank} shard {key.shard}"


def _name(node_id: str, address: str) -> str:
    return f"node {node_id} at {address}"
