"""What a voter asks of the nodes: the registry's only way out of its own process.

A protocol, so that the simulation can put its own network in place of gRPC.
"""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

from ..rpc import CHANNEL_OPTIONS, from_rpc_error


class Outward(Protocol):
    """Questions and requests to nodes; each ends within its `timeout_s`."""

    async def fetch_replica(
        self, data_address: str, request: peer_pb2.FetchReplicaRequest, timeout_s: float
    ) -> peer_pb2.FetchReplicaResponse:
        """Have a node make a copy for itself.

        Raises:
            FastCheckdError: its answer, or PeerError when there is none.
        """

    async def list_replicas(self, data_address: str, timeout_s: float) -> list[peer_pb2.Replica]:
        """What a node holds, of all jobs; PeerError when it does not answer."""


class GrpcOutward:
    """The real way: a connection for each call, which are rare and to ever different nodes."""

    async def fetch_replica(
        self, data_address: str, request: peer_pb2.FetchReplicaRequest, timeout_s: float
    ) -> peer_pb2.FetchReplicaResponse:
        """See `Outward`."""
        async with grpc.aio.insecure_channel(data_address, options=CHANNEL_OPTIONS) as channel:
            try:
                answer: peer_pb2.FetchReplicaResponse = await peer_pb2_grpc.PeerServiceStub(
                    channel
                ).FetchReplica(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the node at {data_address}") from None
        return answer

    async def list_replicas(self, data_address: str, timeout_s: float) -> list[peer_pb2.Replica]:
        """See `Outward`."""
        async with grpc.aio.insecure_channel(data_address, options=CHANNEL_OPTIONS) as channel:
            try:
                answer: peer_pb2.ListReplicasResponse = await peer_pb2_grpc.PeerServiceStub(
                    channel
                ).ListReplicas(peer_pb2.ListReplicasRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the node at {data_address}") from None
        return list(answer.replicas)
