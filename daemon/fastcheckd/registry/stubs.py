"""Stubs of voters by their address: gRPC's here, the simulation brings its own.

Whoever calls voters takes a `Stubs` and nothing else of the network, so that a whole cluster can run in one
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import registry_pb2_grpc

from ..rpc import CHANNEL_OPTIONS

#: From a voter's registry address to what has the methods of a `RegistryServiceStub`: each takes the request,
#: `timeout` and `metadata`, and raises grpc.aio.AioRpcError. (The generated class fits, but is not typed for aio.)
Stubs = Callable[[str], Any]


class GrpcStubs:
    """A `Stubs` with one channel per voter, opened when it is first needed; closed together at the end."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def __call__(self, address: str) -> Any:
        """The stub of the voter at an address."""
        assert not self._closed, "no calls after close"
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return registry_pb2_grpc.RegistryServiceStub(self._channels[address])

    async def close(self) -> None:
        """Close all channels."""
        self._closed = True
        while self._channels:
            await self._channels.popitem()[1].close()
