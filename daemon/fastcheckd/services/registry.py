"""The registry's gRPC face. Checks and translates; `leading`, `reporting` and the state machine decide."""

from __future__ import annotations

from typing import Any

import grpc.aio

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX, check_name
from fastcheck_proto.v1 import common_pb2, registry_pb2, registry_pb2_grpc

from ..config import Config, split_address
from ..errors import InvalidRequestError
from ..health.detector import FailureDetector
from ..registry import commands, records, shared_state, wire
from ..registry.commits import find_step
from ..registry.leader import Leader
from ..registry.nodes import LEFT
from ..registry.owners import IDENTITY_BYTES_MAX, LOCAL, owner_of
from ..registry.raft.consensus import Consensus
from ..registry.records import Json, is_lossy
from ..registry.reports import Reports
from ..registry.sessions import current_session, is_vacant
from ..registry.stubs import Stubs
from ..registry.view import job_views, late_ranks
from ..rpc import answers
from .leader_calls import checking, decides
from .registry_deletion import RegistryDeletion
from .registry_maintenance import RegistryMaintenance
from .registry_signs import RegistrySigns

Context = grpc.aio.ServicerContext[Any, Any]

REPORT_WAIT_S_MAX = 10.0
CHUNK_BYTES_MAX = 16 << 20


class RegistryService(
    RegistrySigns, RegistryMaintenance, RegistryDeletion, registry_pb2_grpc.RegistryServiceServicer
):
    """One voter's answers.

    Args:
        config, raft, leader, reports, detector, stubs: the parts that `registry_server` wires.
    """

    def __init__(
        self,
        config: Config,
        raft: Consensus,
        leader: Leader,
        reports: Reports,
        detector: FailureDetector,
        stubs: Stubs,
    ) -> None:
        RegistrySigns.__init__(self, config, raft, leader, detector)
        RegistryDeletion.__init__(self, config, raft, leader, reports, stubs)

    # LeaderCalls calls: the leader's alone

    @decides
    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> registry_pb2.RegisterResponse:
        """A node starts a new life."""
        if request.cluster_id != self._config.cluster_id:
            raise InvalidRequestError(
                f"node {request.node_id!r} belongs to the cluster {request.cluster_id!r}, this registry to "
                f"{self._config.cluster_id!r}: check the config keys 'cluster_id' and 'voters' of that node"
            )
        node = wire.node_fields(request)
        with checking():
            records.node_fields(node)
            records.text({"life_id": request.life_id}, "life_id", records.TOKEN_BYTES_MAX)
        result = await self._propose(commands.register(node, request.life_id, at_ms=self._leader.wall_ms()))
        self._detector.heard((request.node_id, result["incarnation"]), self._now())
        return registry_pb2.RegisterResponse(incarnation=result["incarnation"], epoch=result["epoch"])

    @decides
    async def Leave(self, request: registry_pb2.LeaveRequest, context: Context) -> registry_pb2.LeaveResponse:
        """A node leaves in good order."""
        with checking():
            node = records.node_ref(wire.node_ref(request.node), "the node")
        await self._propose(commands.set_state(node, "DOWN", LEFT, at_ms=self._leader.wall_ms()))
        return registry_pb2.LeaveResponse()

    @decides
    async def OpenRank(
        self, request: registry_pb2.OpenRankRequest, context: Context
    ) -> registry_pb2.OpenRankResponse:
        """A process takes a rank's place."""
        with checking():
            _check_rank_of(request.job, request.rank, request.world_size)
            records.text({"client_id": request.client_id}, "client_id", records.TOKEN_BYTES_MAX)
            records.text({"identity": request.identity or LOCAL}, "identity", IDENTITY_BYTES_MAX)
            node = records.node_ref(wire.node_ref(request.node), "the node")
        if not request.HasField("replaces"):
            return self._raft.read(lambda state: _whose(state, request))
        result = await self._propose(
            commands.open_rank(
                request.job,
                request.rank,
                request.world_size,
                client=request.client_id,
                node=node,
                replaces=request.replaces,
                identity=request.identity or LOCAL,
                loads=request.loads,
                renews=request.renews,
            )
        )
        if result["session"]:
            self._reports.opened(request.job, request.rank, result["session"])
            return registry_pb2.OpenRankResponse(session=result["session"], current=result["current"])
        return self._raft.read(lambda state: _whose(state, request))

    @decides
    async def Place(self, request: registry_pb2.PlaceRequest, context: Context) -> registry_pb2.PlaceResponse:
        """Name the holders of a rank's shards."""
        with checking():
            _check_rank_of(request.job, request.rank, request.world_size)
            _check_step(request.step)
            owner = records.node_ref(wire.node_ref(request.owner), "the owner")
            if request.state_bytes > STEP_MAX or not 1 <= request.chunk_bytes <= CHUNK_BYTES_MAX:
                raise ValueError(
                    f"chunk_bytes must be from 1 to {CHUNK_BYTES_MAX}, state_bytes at most {STEP_MAX}"
                )
        placement = self._leader.place(
            job=request.job,
            step=request.step,
            rank=request.rank,
            world_size=request.world_size,
            session=request.session,
            owner=owner,
            state_bytes=request.state_bytes,
            chunk_bytes=request.chunk_bytes,
            avoid=request.avoid,
            oldest_step=min(request.oldest_step, request.step),
        )
        response = registry_pb2.PlaceResponse(
            epoch=placement.epoch,
            domains_short=placement.domains_short,
            generation=placement.generation,
            newest_load=placement.newest_load,
            newest_load_age_s=placement.newest_load_age_s,
        )
        for shard in placement.shards:
            holders = [
                common_pb2.Holder(
                    node=common_pb2.NodeRef(
                        node_id=node_id, incarnation=placement.nodes[node_id]["incarnation"]
                    ),
                    data_address=placement.nodes[node_id]["data_address"],
                    lane_address=placement.nodes[node_id]["lane_address"],
                )
                for node_id in shard.holders
            ]
            response.shards.add(
                shard=shard.shard, offset=shard.offset, bytes=shard.size_bytes, holders=holders
            )
        return response

    @decides
    async def Report(
        self, request: registry_pb2.ReportRequest, context: Context
    ) -> registry_pb2.ReportResponse:
        """A rank is replicated; wait for its step."""
        with checking():
            _check_rank_of(request.job, request.record.rank, request.world_size)
            _check_step(request.step)
            if sorted(shard.shard for shard in request.record.shards) != list(
                range(len(request.record.shards))
            ):
                raise ValueError("the shards of a record must be numbered from 0, each once")
            record = records.rank_record(wire.rank_record(request.record))
            if request.record.HasField("begun_after"):
                record["begun_after"] = request.record.begun_after
            digests = {each.part: each.digest for each in request.shared_digests}
            shared_state.check_digests(digests)
        # NaN fails every comparison: it waits not at all.
        wait_s = min(request.wait_s, REPORT_WAIT_S_MAX) if request.wait_s > 0 else 0.0
        return await self._reports.report(
            request.job, request.step, request.world_size, record, wait_s, digests
        )

    @decides
    async def Lookup(
        self, request: registry_pb2.LookupRequest, context: Context
    ) -> registry_pb2.LookupResponse:
        """The newest or the asked-for committed step, current as of this call."""
        with checking():
            check_name("job", request.job)
        await self._leader.confirm()

        def find(state: Json) -> registry_pb2.LookupResponse:
            job = state["jobs"].get(request.job)
            steps = [] if job is None else job["steps"]
            response = registry_pb2.LookupResponse(
                kept_steps=[kept["step"] for kept in steps], owner="" if job is None else owner_of(job)
            )
            wanted = request.step if request.HasField("step") else (steps[-1]["step"] if steps else None)
            kept = None if job is None or wanted is None else find_step(job, wanted)
            if kept is not None:
                rank = request.rank if request.HasField("rank") else None
                response.record.CopyFrom(wire.step_message(request.job, kept, rank))
            return response

        return self._raft.read(find)

    @decides
    async def ListJobSteps(
        self, request: registry_pb2.ListJobStepsRequest, context: Context
    ) -> registry_pb2.ListJobStepsResponse:
        """Committed steps and those under way."""
        with checking():
            check_name("job", request.job)

        def committed(state: Json) -> list[registry_pb2.StepSummary]:
            job = state["jobs"].get(request.job)
            return [
                registry_pb2.StepSummary(
                    step=kept["step"],
                    state=registry_pb2.STEP_STATE_COMMITTED,
                    ranks=len(kept["ranks"]),
                    world_size=kept["world_size"],
                    bytes=sum(record["state_bytes"] for record in kept["ranks"]),
                    copies=kept["copies"],
                    lossy=is_lossy(kept["ranks"]),
                    replicated=shared_state.is_replicated(kept["ranks"]),
                )
                for kept in ([] if job is None else job["steps"])
            ]

        steps = self._raft.read(committed)
        newest = steps[-1].step if steps else -1
        for under_way in self._reports.collector.under_way(request.job, self._now()):
            if under_way.step > newest:
                sizes = under_way.placed_bytes | {
                    r: rec["state_bytes"] for r, rec in under_way.reports.items()
                }
                steps.append(
                    registry_pb2.StepSummary(
                        step=under_way.step,
                        state=registry_pb2.STEP_STATE_REPLICATING,
                        ranks=len(under_way.reports),
                        world_size=under_way.world_size,
                        bytes=sum(sizes.values()),
                        lossy=is_lossy(under_way.reports.values()),
                        replicated=shared_state.is_replicated(list(under_way.reports.values())),
                    )
                )
        late = self._reports.collector.late(request.job, self._now())
        return registry_pb2.ListJobStepsResponse(
            steps=steps, late=self._raft.read(lambda state: late_ranks(state, request.job, late))
        )

    @decides
    async def SetDraining(
        self, request: registry_pb2.SetDrainingRequest, context: Context
    ) -> registry_pb2.SetDrainingResponse:
        """A node gets nothing new and its copies are made elsewhere, or that ends."""
        with checking():
            check_name("node", request.node_id)
        at_ms = self._leader.wall_ms()
        await self._propose(commands.set_draining(request.node_id, request.draining, at_ms=at_ms))
        return registry_pb2.SetDrainingResponse()

    @decides
    async def Forget(
        self, request: registry_pb2.ForgetRequest, context: Context
    ) -> registry_pb2.ForgetResponse:
        """Take a DOWN node off the list."""
        with checking():
            check_name("node", request.node_id)
        await self._propose(commands.forget(request.node_id, at_ms=self._leader.wall_ms()))
        return registry_pb2.ForgetResponse()

    @decides
    async def History(
        self, request: registry_pb2.HistoryRequest, context: Context
    ) -> registry_pb2.HistoryResponse:
        """Changes of nodes' states, the newest last, current as of this call."""
        with checking():
            if request.node_id:
                check_name("node", request.node_id)
        await self._leader.confirm()
        entries = self._raft.read(lambda state: list(state["history"]))
        wanted = [entry for entry in entries if request.node_id in ("", entry[2])]
        newest = wanted[-request.limit :] if request.limit else wanted
        return registry_pb2.HistoryResponse(transitions=map(wire.transition_message, newest))

    @decides
    async def ReplaceVoter(
        self, request: registry_pb2.ReplaceVoterRequest, context: Context
    ) -> registry_pb2.ReplaceVoterResponse:
        """Replace a voter that is gone for good by another node."""
        with checking():
            check_name("old node", request.old_node_id)
            check_name("new node", request.new_node_id)
            for address in (request.registry_address, request.raft_address):
                if address:
                    split_address(address)
        voters = await self._leader.replace_voter(request)
        return registry_pb2.ReplaceVoterResponse(voters=map(wire.voter_message, voters))

    @decides
    async def AddVoters(
        self, request: registry_pb2.AddVotersRequest, context: Context
    ) -> registry_pb2.AddVotersResponse:
        """Have more nodes vote."""
        with checking():
            if not 1 <= len(request.voters) <= records.VOTERS_MAX:
                raise ValueError(f"name 1 to {records.VOTERS_MAX} nodes")
            for voter in request.voters:
                check_name("node", voter.node_id)
                for address in (voter.registry_address, voter.raft_address):
                    if address:
                        split_address(address)
        voters = await self._leader.add_voters(request)
        return registry_pb2.AddVotersResponse(voters=map(wire.voter_message, voters))

    # Calls that every voter answers

    @answers
    async def ListJobs(
        self, request: registry_pb2.ListJobsRequest, context: Context
    ) -> registry_pb2.ListJobsResponse:
        """All jobs, as applied here."""
        return registry_pb2.ListJobsResponse(jobs=self._raft.read(job_views))


def _whose(state: Json, request: registry_pb2.OpenRankRequest) -> registry_pb2.OpenRankResponse:
    """Who has a rank's place: what whoever wants it has to name."""
    job, rank = request.job, request.rank
    return registry_pb2.OpenRankResponse(
        current=current_session(state, job, rank),
        vacant=is_vacant(state, job, rank, request.client_id),
    )


def _check_rank_of(job: str, rank: int, world_size: int) -> None:
    check_name("job", job)
    if not 1 <= world_size <= RANK_MAX or rank >= world_size:
        raise ValueError(f"rank {rank} and world size {world_size} do not fit, or are beyond {RANK_MAX}")


def _check_step(step: int) -> None:
    if step > STEP_MAX:
        raise ValueError(f"step {step} is beyond {STEP_MAX}")
