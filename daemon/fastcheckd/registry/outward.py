"""What a voter asks of others: nodes, voters, holders. One class, so that the simulation can take its place.

And stubs of voters by their address, for whoever calls them: gRPC's here, the simulation brings its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import common_pb2, node_pb2, node_pb2_grpc, peer_pb2, peer_pb2_grpc, registry_pb2_grpc
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Voter
from ..dialer import Channels, Dialer
from ..health.detector import Life
from ..health.probe import ProbeResult, from_wire, probe
from ..rpc import ONE_CALL_OPTIONS, from_rpc_error
from .raft.membership import voter_message

#: What a call takes beside the probe that it asks for.
CALL_SLACK_S = 0.15
#: A new voter makes a folder and starts a process.
BECOME_TIMEOUT_S = 10.0


class Outward:
    """Questions to the outside; each ends within its timeout, give or take `CALL_SLACK_S`. The simulation has its own.

    A channel lasts for one question: they are rare, and the other side may be dying.

    Args:
        dialer: makes the channels; by default plaintext ones.
    """

    def __init__(self, dialer: Dialer | None = None) -> None:
        self._dialer = dialer or Dialer()

    async def probe(self, agent_address: str, life: Life, timeout_s: float) -> ProbeResult:
        """Ask a node who it is."""
        return await probe(agent_address, life, timeout_s, self._dialer)

    async def corroborate(
        self, voter: Voter, request: rpb.CorroborateRequest, timeout_s: float
    ) -> rpb.CorroborateResponse | None:
        """Ask another voter what it knows of a node; None: it did not answer."""
        try:
            way = self._channel(voter.node_id, voter.registry_address)
            async with asyncio.timeout(timeout_s + CALL_SLACK_S), way as channel:
                response: rpb.CorroborateResponse = await registry_pb2_grpc.RegistryServiceStub(
                    channel
                ).Corroborate(request)
                return response
        except (grpc.aio.AioRpcError, TimeoutError):
            return None

    async def knows_schema(self, voter: Voter, timeout_s: float) -> int | None:
        """Ask another voter for the newest schema of the state that it can apply; None: it did not answer."""
        try:
            way = self._channel(voter.node_id, voter.registry_address)
            async with asyncio.timeout(timeout_s), way as channel:
                response = await registry_pb2_grpc.RegistryServiceStub(channel).GetView(rpb.GetViewRequest())
        except (grpc.aio.AioRpcError, TimeoutError):
            return None
        return int(response.knows_schema)

    async def probe_through(
        self, asker_id: str, asker_address: str, target_address: str, life: Life, timeout_s: float
    ) -> ProbeResult | None:
        """Have the agent at `asker_address` ask a node who it is; None: that agent could not be asked."""
        request = node_pb2.ProbeForRequest(
            node=common_pb2.NodeRef(node_id=life[0], incarnation=life[1]),
            agent_address=target_address,
            timeout_s=timeout_s,
        )
        try:
            way = self._channel(asker_id, asker_address)
            async with asyncio.timeout(timeout_s + CALL_SLACK_S), way as channel:
                response = await node_pb2_grpc.NodeServiceStub(channel).ProbeFor(request)
        except (grpc.aio.AioRpcError, TimeoutError):
            return None
        return from_wire(response.finding)

    async def replicate(
        self, node_id: str, data_address: str, request: peer_pb2.ReplicateRequest, timeout_s: float
    ) -> peer_pb2.ReplicateResponse:
        """Have a data process make itself a copy.

        Raises:
            FastCheckdError: it could not.
        """
        async with self._channel(node_id, data_address) as channel:
            try:
                response: peer_pb2.ReplicateResponse = await peer_pb2_grpc.PeerServiceStub(channel).Replicate(
                    request, timeout=timeout_s
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the data process at {data_address}") from None
        return response

    async def list_replicas(
        self, node_id: str, data_address: str, timeout_s: float
    ) -> list[peer_pb2.Replica]:
        """What a data process holds of all jobs.

        Raises:
            FastCheckdError: it did not answer.
        """
        async with self._channel(node_id, data_address) as channel:
            try:
                response: peer_pb2.ListReplicasResponse = await peer_pb2_grpc.PeerServiceStub(
                    channel
                ).ListReplicas(peer_pb2.ListReplicasRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the data process at {data_address}") from None
        return list(response.replicas)

    async def become_voter(
        self,
        node_id: str,
        agent_address: str,
        cluster_id: str,
        voters: Sequence[Voter],
        version: int,
        named: Sequence[Voter],
    ) -> None:
        """Ask a node's agent to become one of these voters.

        Args:
            version: of the state that this follows from.
            named: the voters that the registry names in that state.

        Raises:
            FastCheckdError: it refuses, or cannot be reached.
        """
        request = node_pb2.BecomeVoterRequest(
            cluster_id=cluster_id,
            voters=map(voter_message, voters),
            version=version,
            named=map(voter_message, named),
        )
        async with self._dialer.channel(node_id, agent_address) as channel:
            try:
                await node_pb2_grpc.NodeServiceStub(channel).BecomeVoter(request, timeout=BECOME_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the agent at {agent_address}") from None

    def _channel(self, node_id: str, address: str) -> grpc.aio.Channel:
        return self._dialer.channel(node_id, address, ONE_CALL_OPTIONS)


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
