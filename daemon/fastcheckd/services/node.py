"""NodeService, the agent's front door, and DataControlService, the agent's line to its data process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import node_pb2_grpc as npb_grpc

from .. import __version__
from ..config import Config
from ..errors import InvalidRequestError
from ..health.lease import LeaseHolder
from ..health.probing import bounded_timeout_s, probe, to_wire
from ..identity import Identity
from ..rpc import answers
from ..store.ram_store import RamStore

Context = grpc.aio.ServicerContext[Any, Any]

#: Probes for others at once; beyond it this node says that it could not ask.
PROBES_MAX = 16
ADDRESS_CHARS_MAX = 300


class NodeService(npb_grpc.NodeServiceServicer):
    """Says who this node is and where its data process listens."""

    def __init__(self, config: Config, incarnation: Callable[[], int]) -> None:
        self._config = config
        self._incarnation = incarnation
        self._probes = 0

    @answers
    async def Describe(self, request: npb.DescribeRequest, context: Context) -> npb.DescribeResponse:
        """Who and where."""
        return npb.DescribeResponse(
            cluster_id=self._config.cluster_id,
            node_id=self._config.node_id,
            incarnation=self._incarnation(),
            version=__version__,
            data_socket=str(self._config.data_socket),
            data_address=self._config.data_address,
            agent_address=self._config.agent_address,
        )

    @answers
    async def Probe(self, request: npb.ProbeRequest, context: Context) -> npb.ProbeResponse:
        """A sign of life."""
        return npb.ProbeResponse(node_id=self._config.node_id, incarnation=self._incarnation())

    @answers
    async def ProbeFor(self, request: npb.ProbeForRequest, context: Context) -> npb.ProbeForResponse:
        """Ask another node's agent, for a leader that does not hear it."""
        if len(request.agent_address) > ADDRESS_CHARS_MAX:
            raise InvalidRequestError("agent_address is not an address")
        if self._probes >= PROBES_MAX:
            return npb.ProbeForResponse(finding=npb.PROBE_FINDING_UNSPECIFIED)
        self._probes += 1
        try:
            life = (request.node.node_id, request.node.incarnation)
            finding = await probe(request.agent_address, life, bounded_timeout_s(request.timeout_s))
        finally:
            self._probes -= 1
        return npb.ProbeForResponse(finding=to_wire(finding))


class DataControlService(npb_grpc.DataControlServiceServicer):
    """Takes the node's incarnation and its lease from the agent; answers with signs of progress."""

    def __init__(
        self, identity: Identity, lease: LeaseHolder, store: RamStore, on_assume: Callable[[], None]
    ) -> None:
        self._identity = identity
        self._lease = lease
        self._store = store
        self._on_assume = on_assume
        self._answers = 0

    @answers
    async def Assume(self, request: npb.AssumeRequest, context: Context) -> npb.AssumeResponse:
        """Be this incarnation from now on."""
        if self._identity.assume(request.incarnation):
            self._on_assume()
        self._answers += 1
        usage = self._store.usage()
        return npb.AssumeResponse(
            progress=self._answers,
            ram_used_bytes=usage.used_bytes - usage.free_bytes,  # free ones go when needed
            ram_budget_bytes=usage.budget_bytes,
        )

    @answers
    async def Hold(
        self, request_iterator: AsyncIterator[npb.HoldRequest], context: Context
    ) -> npb.HoldResponse:
        """The node's lease, as often as it is renewed."""
        async for request in request_iterator:
            self._lease.renew(
                request.incarnation, request.deadline_monotonic_ns, has_quorum=request.has_quorum
            )
        return npb.HoldResponse()
