"""Asks a silent node directly whether it lives. One question, one deadline; the detector concludes."""

from __future__ import annotations

import asyncio

import grpc.aio

from fastcheck_proto.v1 import node_pb2, node_pb2_grpc

from ..config import split_address
from ..dialer import Dialer
from ..rpc import ONE_CALL_OPTIONS
from .detector import Finding, Life

#: What a probe found at a node's address.
ProbeResult = Finding

#: Longest that anybody may have us wait for a probe.
PROBE_S_MAX = 2.0

_TO_WIRE = {
    Finding.ANSWERED: node_pb2.PROBE_FINDING_ANSWERED,
    Finding.REFUSED: node_pb2.PROBE_FINDING_REFUSED,
    Finding.SILENT: node_pb2.PROBE_FINDING_SILENT,
}
_FROM_WIRE: dict[int, Finding] = {code: finding for finding, code in _TO_WIRE.items()}


async def probe(
    agent_address: str, life: Life, timeout_s: float, dialer: Dialer | None = None
) -> ProbeResult:
    """Ask a node's agent who it is; over plaintext if nothing else is said."""
    try:
        host, port = split_address(agent_address)
        async with asyncio.timeout(timeout_s):
            # A bare connection first: gRPC does not say whether a connection was refused or lost.
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            way = (dialer or Dialer()).channel(life[0], agent_address, ONE_CALL_OPTIONS)
            async with way as channel:
                answer = await node_pb2_grpc.NodeServiceStub(channel).Probe(node_pb2.ProbeRequest())
    except ConnectionRefusedError:
        return ProbeResult.REFUSED
    except (OSError, TimeoutError, ValueError, grpc.aio.AioRpcError):
        return ProbeResult.SILENT
    if (answer.node_id, answer.incarnation) == life:
        return ProbeResult.ANSWERED
    if answer.node_id == life[0] and 0 < answer.incarnation < life[1]:
        # It lives and has not heard of its new life yet: no proof that the new one is over.
        return ProbeResult.SILENT
    return ProbeResult.REFUSED


def to_wire(finding: ProbeResult | None) -> node_pb2.ProbeFinding.ValueType:
    """The wire's word; None, could not ask, is UNSPECIFIED."""
    return node_pb2.PROBE_FINDING_UNSPECIFIED if finding is None else _TO_WIRE[finding]


def from_wire(code: int) -> ProbeResult | None:
    """Inverse of `to_wire`; anything unknown is None."""
    return _FROM_WIRE.get(code)


def bounded_timeout_s(asked_s: float) -> float:
    """A caller's timeout as far as we go along with it; NaN and nonsense become the shortest."""
    return min(asked_s, PROBE_S_MAX) if asked_s > 0 else 0.01
