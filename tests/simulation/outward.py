"""What a voter asks of others, over the simulated wire: `registry.outward.Outward`."""

from __future__ import annotations

import grpc
import grpc.aio
from tests.simulation.network import Network

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import node_pb2 as npb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config import Voter
from fastcheckd.health.detector import Life
from fastcheckd.health.probe import ProbeResult, from_wire
from fastcheckd.registry.outward import CALL_SLACK_S
from fastcheckd.rpc import from_rpc_error


class NetworkOutward:
    """Questions from one machine."""

    def __init__(self, network: Network, machine: str) -> None:
        self._network = network
        self._machine = machine

    async def probe(self, agent_address: str, life: Life, timeout_s: float) -> ProbeResult:
        try:
            answer = await self._network.call(
                self._machine, agent_address, "Probe", npb.ProbeRequest(), timeout_s
            )
        except grpc.aio.AioRpcError as error:
            # The real one tells a refused connection from one that was lost later.
            refused = error.details() == "connection refused"
            return ProbeResult.REFUSED if refused else ProbeResult.SILENT
        same = (answer.node_id, answer.incarnation) == life
        return ProbeResult.ANSWERED if same else ProbeResult.REFUSED

    async def corroborate(
        self, voter: Voter, request: rpb.CorroborateRequest, timeout_s: float
    ) -> rpb.CorroborateResponse | None:
        try:
            response: rpb.CorroborateResponse = await self._network.call(
                self._machine, voter.registry_address, "Corroborate", request, timeout_s + CALL_SLACK_S
            )
        except grpc.aio.AioRpcError:
            return None
        return response

    async def knows_schema(self, voter: Voter, timeout_s: float) -> int | None:
        try:
            response = await self._network.call(
                self._machine, voter.registry_address, "GetView", rpb.GetViewRequest(), timeout_s
            )
        except grpc.aio.AioRpcError:
            return None
        return int(response.knows_schema)

    async def probe_through(
        self, asker_id: str, asker_address: str, target_address: str, life: Life, timeout_s: float
    ) -> ProbeResult | None:
        request = npb.ProbeForRequest(
            node=pb.NodeRef(node_id=life[0], incarnation=life[1]),
            agent_address=target_address,
            timeout_s=timeout_s,
        )
        try:
            response = await self._network.call(
                self._machine, asker_address, "ProbeFor", request, timeout_s + CALL_SLACK_S
            )
        except grpc.aio.AioRpcError:
            return None
        return from_wire(response.finding)

    async def replicate(
        self, node_id: str, data_address: str, request: peer_pb2.ReplicateRequest, timeout_s: float
    ) -> peer_pb2.ReplicateResponse:
        try:
            response: peer_pb2.ReplicateResponse = await self._network.call(
                self._machine, data_address, "Replicate", request, timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"the data process at {data_address}") from None
        return response

    async def list_replicas(
        self, node_id: str, data_address: str, timeout_s: float
    ) -> list[peer_pb2.Replica]:
        try:
            response: peer_pb2.ListReplicasResponse = await self._network.call(
                self._machine, data_address, "ListReplicas", peer_pb2.ListReplicasRequest(), timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"the data process at {data_address}") from None
        return list(response.replicas)
