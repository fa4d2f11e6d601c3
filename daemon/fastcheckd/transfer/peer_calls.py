"""Calls to the data processes of other nodes that move no shards.

Apart from `peer_client`, so that who only asks need not load the codec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, TypeVar

import grpc

from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

from ..dialer import Channels, Dialer
from ..rpc import from_rpc_error

_LAST_WORDS_S = 2.0

Q = TypeVar("Q")
R = TypeVar("R")
Q_contra = TypeVar("Q_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class _Method(Protocol[Q_contra, R_co]):
    def __call__(self, request: Q_contra, /, *, timeout: float) -> Awaitable[R_co]: ...


class PeerCalls:
    """A channel to each node that was lately asked. Used on one event loop.

    Args:
        timeout_s: how long a node may leave us without an answer.
        dialer: makes the channels; by default plaintext ones.
    """

    def __init__(self, timeout_s: float, dialer: Dialer | None = None) -> None:
        self._timeout_s = timeout_s
        self._channels = Channels(dialer or Dialer())
        self._background: set[asyncio.Task[None]] = set()

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


def _name(node_id: str, address: str) -> str:
    return f"node {node_id} at {address}"
