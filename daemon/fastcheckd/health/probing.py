"""Asks a silent node directly whether it lives. One question, one deadline; the detector concludes."""

from __future__ import annotations

import asyncio
from enum import Enum

import grpc.aio

from fastcheck_proto.v1 import node_pb2, node_pb2_grpc

from ..config import split_address
from ..rpc import CHANNEL_OPTIONS
from .detector import Life


class ProbeResult(Enum):
    """What a probe found at a node's address."""

    ANSWERED = "answered"
    #: Nobody listens there, or another life does: the one asked for is over.
    REFUSED = "refused"
    #: No answer in time: dead, cut off, or busy.
    SILENT = "silent"


async def probe(agent_address: str, life: Life, timeout_s: float) -> ProbeResult:
    """Ask a node's agent who it is."""
    try:
        host, port = split_address(agent_address)
        async with asyncio.timeout(timeout_s):
            # A bare connection first: gRPC does not say whether a connection was refused or lost.
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            async with grpc.aio.insecure_channel(agent_address, options=CHANNEL_OPTIONS) as channel:
                answer = await node_pb2_grpc.NodeServiceStub(channel).Probe(node_pb2.ProbeRequest())
    except ConnectionRefusedError:
        return ProbeResult.REFUSED
    except (OSError, TimeoutError, ValueError, grpc.aio.AioRpcError):
        return ProbeResult.SILENT
    return ProbeResult.ANSWERED if (answer.node_id, answer.incarnation) == life else ProbeResult.REFUSED
