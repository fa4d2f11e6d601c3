"""NodeService on the agent: who this node is, whether it or another one lives, that it is to become a voter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import node_pb2_grpc as npb_grpc

from .. import __version__
from ..config import Config, Voter
from ..dialer import Dialer
from ..errors import InvalidRequestError
from ..health.probe import bounded_timeout_s, probe, to_wire
from ..registry.raft.membership import voter_of
from ..rpc import answers

Context = grpc.aio.ServicerContext[Any, Any]

#: Probes for others at once; beyond it this node says that it could not ask.
PROBES_MAX = 16
ADDRESS_CHARS_MAX = 300


class NodeService(npb_grpc.NodeServiceServicer):
    """Says who this node is and where its data process listens."""

    def __init__(
        self,
        config: Config,
        incarnation: Callable[[], int],
        become_voter: Callable[[str, list[Voter], int, list[Voter]], Awaitable[None]],
        dialer: Dialer | None = None,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._probes = 0
        self._dialer = dialer
        self._become_voter = become_voter

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
            timeout_s = bounded_timeout_s(request.timeout_s)
            finding = await probe(request.agent_address, life, timeout_s, self._dialer)
        finally:
            self._probes -= 1
        return npb.ProbeForResponse(finding=to_wire(finding))

    @answers
    async def BecomeVoter(self, request: npb.BecomeVoterRequest, context: Context) -> npb.BecomeVoterResponse:
        """Start a registry process that waits to be added by the other voters."""
        voters, named = (list(map(voter_of, records)) for records in (request.voters, request.named))
        await self._become_voter(request.cluster_id, voters, request.version, named)
        return npb.BecomeVoterResponse()
