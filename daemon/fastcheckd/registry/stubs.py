"""Stubs of voters by their address: gRPC's here, the simulation brings its own.

Whoever calls voters takes a `Stubs` and nothing else of the network, so that a whole cluster can run in one
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastcheck_proto.v1 import registry_pb2_grpc

from ..dialer import Channels, Dialer

#: From a voter's registry address to what has the methods of a `RegistryServiceStub`: each takes the request,
#: `timeout` and `metadata`, and raises grpc.aio.AioRpcError. (The generated class fits, but is not typed for aio.)
Stubs = Callable[[str], Any]


class GrpcStubs:
    """A `Stubs` with one channel per voter, opened when it is first needed; closed together at the end.

    Args:
        dialer: makes the channels; by default plaintext ones.
        node_at: which voter is at an address; the channel leads to no other.
    """

    def __init__(
        self, dialer: Dialer | None = None, node_at: Callable[[str], str] = lambda address: ""
    ) -> None:
        self._channels = Channels(dialer or Dialer())
        self._node_at = node_at
        self._closed = False

    def __call__(self, address: str) -> Any:
        """The stub of the voter at an address."""
        assert not self._closed, "no calls after close"
        return registry_pb2_grpc.RegistryServiceStub(self._channels.to(self._node_at(address), address))

    async def close(self) -> None:
        """Close all channels."""
        self._closed = True
        await self._channels.close()
