"""What the admin service needs of the registry and of the other nodes: the seam that its tests fill."""

from __future__ import annotations

from typing import Protocol

from fastcheck_proto.v1 import node_pb2, peer_pb2, registry_pb2


class AdminRegistry(Protocol):
    """What is needed of `registry.client.RegistryClient`."""

    async def view(self, timeout_s: float) -> registry_pb2.ClusterView:
        """The cluster's members and jobs."""

    async def lookup(
        self, request: registry_pb2.LookupRequest, timeout_s: float
    ) -> registry_pb2.LookupResponse:
        """A committed step."""

    async def list_job_steps(
        self, request: registry_pb2.ListJobStepsRequest, timeout_s: float
    ) -> registry_pb2.ListJobStepsResponse:
        """Steps of one job."""

    async def list_jobs(
        self, request: registry_pb2.ListJobsRequest, timeout_s: float
    ) -> registry_pb2.ListJobsResponse:
        """All jobs."""

    async def set_draining(
        self, request: registry_pb2.SetDrainingRequest, timeout_s: float
    ) -> registry_pb2.SetDrainingResponse:
        """Drain a node, or end that."""

    async def safe_to_stop(
        self, request: registry_pb2.SafeToStopRequest, timeout_s: float
    ) -> registry_pb2.SafeToStopResponse:
        """What stopping a node would cost."""

    async def forget(
        self, request: registry_pb2.ForgetRequest, timeout_s: float
    ) -> registry_pb2.ForgetResponse:
        """Take a DOWN node off the list."""

    async def history(
        self, request: registry_pb2.HistoryRequest, timeout_s: float
    ) -> registry_pb2.HistoryResponse:
        """Changes of nodes' states."""

    async def get_redundancy(
        self, request: registry_pb2.GetRedundancyRequest, timeout_s: float
    ) -> registry_pb2.GetRedundancyResponse:
        """How redundant the committed steps are."""

    async def delete_steps(
        self, request: registry_pb2.DeleteStepsRequest, timeout_s: float
    ) -> registry_pb2.DeleteStepsResponse:
        """Keep committed steps no more."""

    async def replace_voter(
        self, request: registry_pb2.ReplaceVoterRequest, timeout_s: float
    ) -> registry_pb2.ReplaceVoterResponse:
        """Put another node in a voter's place."""

    async def add_voters(
        self, request: registry_pb2.AddVotersRequest, timeout_s: float
    ) -> registry_pb2.AddVotersResponse:
        """Have more nodes vote."""

    async def views(self, timeout_s: float) -> dict[str, registry_pb2.ClusterView | None]:
        """Each voter's own view."""

    @property
    def voters(self) -> list[node_pb2.VoterRecord]:
        """The voters that are known here."""


class Peers(Protocol):
    """What is needed of `transfer.peer_calls.PeerCalls`."""

    async def list_replicas(
        self, node_id: str, data_address: str, job: str, step: int | None, timeout_s: float
    ) -> list[peer_pb2.Replica]:
        """What a node holds."""

    async def get_stats(self, node_id: str, data_address: str, timeout_s: float) -> peer_pb2.GetStatsResponse:
        """A node's memory and counters."""

    async def verify_replicas(
        self, node_id: str, data_address: str, job: str, step: int | None, timeout_s: float
    ) -> peer_pb2.VerifyReplicasResponse:
        """Have a node check what it holds."""
