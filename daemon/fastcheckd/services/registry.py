"""The registry's gRPC face. Checks and translates; `leader`, `reports` and the state machine decide."""

from __future__ import annotations

import logging
from typing import Any

import grpc.aio

from fastcheck_proto.conventions import STEP_MAX, check_name
from fastcheck_proto.v1 import registry_log_pb2, registry_pb2, registry_pb2_grpc

from ..config import Config, split_address
from ..errors import InvalidRequestError
from ..health.detector import FailureDetector
from ..registry import commands, shared_state
from ..registry.commands import is_lossy
from ..registry.deletion import plan_deletion
from ..registry.leader import Leader
from ..registry.model import DOWN, State
from ..registry.nodes import LEFT
from ..registry.outward import Stubs
from ..registry.raft.consensus import Consensus
from ..registry.raft.membership import voter_message
from ..registry.reports import Reports
from ..registry.sessions import current_session, is_vacant
from ..registry.view import job_views, late_ranks
from ..rpc import answers
from .leader_calls import checking, decides
from .registry_maintenance import RegistryMaintenance
from .registry_signs import RegistrySigns

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Command = registry_log_pb2.RegistryCommand

REPORT_WAIT_S_MAX = 10.0
RUNNING_SHOWN_MAX = 64
CHUNK_BYTES_MAX = 16 << 20


class RegistryService(RegistrySigns, RegistryMaintenance, registry_pb2_grpc.RegistryServiceServicer):
    """One voter's answers.

    Args:
        config, raft, leader, reports, detector, stubs: the parts that `process.registry` wires.
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
        super().__init__(config, raft, leader, stubs, detector)
        self._reports = reports

    # The leader's alone

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
        result = await self._propose(Command(register=request))
        self._detector.heard((request.node_id, result.incarnation), self._now())
        return registry_pb2.RegisterResponse(incarnation=result.incarnation, epoch=result.epoch)

    @decides
    async def Leave(self, request: registry_pb2.LeaveRequest, context: Context) -> registry_pb2.LeaveResponse:
        """A node leaves in good order."""
        await self._propose(commands.set_state(request.node, DOWN, LEFT))
        return registry_pb2.LeaveResponse()

    @decides
    async def OpenRank(
        self, request: registry_pb2.OpenRankRequest, context: Context
    ) -> registry_pb2.OpenRankResponse:
        """A process takes a rank's place."""
        command = Command(open_rank=request)
        with checking():
            commands.check(command)
        if request.HasField("replaces"):
            result = await self._propose(command)
            if result.session:
                self._reports.opened(request.job, request.rank, result.session)
                return registry_pb2.OpenRankResponse(session=result.session, current=result.current)
        return self._raft.read(lambda state: _whose(state, request))

    @decides
    async def Place(self, request: registry_pb2.PlaceRequest, context: Context) -> registry_pb2.PlaceResponse:
        """Name the holders of a rank's shards."""
        with checking():
            commands.check_rank(request.job, request.rank, request.world_size)
            commands.check_step(request.step)
            commands.check_ref(request.owner)
            if request.state_bytes > STEP_MAX or not 1 <= request.chunk_bytes <= CHUNK_BYTES_MAX:
                raise ValueError(
                    f"chunk_bytes must be from 1 to {CHUNK_BYTES_MAX}, state_bytes at most {STEP_MAX}"
                )
        return self._leader.place(request)

    @decides
    async def Report(
        self, request: registry_pb2.ReportRequest, context: Context
    ) -> registry_pb2.ReportResponse:
        """A rank is replicated; wait for its step."""
        with checking():
            commands.check_rank(request.job, request.record.rank, request.world_size)
            commands.check_step(request.step)
            commands.check_rank_record(request.record)
            digests = {each.part: each.digest for each in request.shared_digests}
            shared_state.check_digests(digests)
        # NaN fails every comparison: it waits not at all.
        wait_s = min(request.wait_s, REPORT_WAIT_S_MAX) if request.wait_s > 0 else 0.0
        return await self._reports.report(
            request.job, request.step, request.world_size, request.record, wait_s, digests
        )

    @decides
    async def Lookup(
        self, request: registry_pb2.LookupRequest, context: Context
    ) -> registry_pb2.LookupResponse:
        """The newest or the asked-for committed step, current as of this call."""
        with checking():
            check_name("job", request.job)
        await self._leader.confirm()

        return self._raft.read(lambda state: _find(state, request))

    @decides
    async def ListJobSteps(
        self, request: registry_pb2.ListJobStepsRequest, context: Context
    ) -> registry_pb2.ListJobStepsResponse:
        """Committed steps and those under way."""
        with checking():
            check_name("job", request.job)

        def committed(state: State) -> list[registry_pb2.StepSummary]:
            return [
                registry_pb2.StepSummary(
                    step=kept.step,
                    state=registry_pb2.STEP_STATE_COMMITTED,
                    ranks=len(kept.ranks),
                    world_size=kept.world_size,
                    bytes=sum(record.state_bytes for record in kept.ranks),
                    copies=kept.copies,
                    lossy=is_lossy(kept.ranks),
                    replicated=shared_state.is_replicated(kept.ranks),
                )
                for kept in state.steps_of(request.job)
            ]

        steps = self._raft.read(committed)
        newest = steps[-1].step if steps else -1
        for under_way in self._reports.collector.under_way(request.job, self._now()):
            if under_way.step > newest:
                sizes = under_way.placed_bytes | {r: rec.state_bytes for r, rec in under_way.reports.items()}
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
        await self._propose(Command(set_draining=request))
        return registry_pb2.SetDrainingResponse()

    @decides
    async def Forget(
        self, request: registry_pb2.ForgetRequest, context: Context
    ) -> registry_pb2.ForgetResponse:
        """Take a DOWN node off the list."""
        await self._propose(Command(forget=request))
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
        entries = self._raft.read(lambda state: list(state.history))
        wanted = [entry for entry in entries if request.node_id in ("", entry.node.node_id)]
        return registry_pb2.HistoryResponse(transitions=wanted[-request.limit :] if request.limit else wanted)

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
        return registry_pb2.ReplaceVoterResponse(voters=map(voter_message, voters))

    @decides
    async def AddVoters(
        self, request: registry_pb2.AddVotersRequest, context: Context
    ) -> registry_pb2.AddVotersResponse:
        """Have more nodes vote."""
        with checking():
            if not 1 <= len(request.voters) <= commands.VOTERS_MAX:
                raise ValueError(f"name 1 to {commands.VOTERS_MAX} nodes")
            for voter in request.voters:
                check_name("node", voter.node_id)
                for address in (voter.registry_address, voter.raft_address):
                    if address:
                        split_address(address)
        voters = await self._leader.add_voters(request)
        return registry_pb2.AddVotersResponse(voters=map(voter_message, voters))

    @decides
    async def CloseRank(
        self, request: registry_pb2.CloseRankRequest, context: Context
    ) -> registry_pb2.CloseRankResponse:
        """The process of a session is done."""
        await self._propose(Command(close_rank=request))
        return registry_pb2.CloseRankResponse()

    @decides
    async def Supersede(
        self, request: registry_pb2.SupersedeRequest, context: Context
    ) -> registry_pb2.SupersedeResponse:
        """Rule out steps that a rank has given up."""
        result = await self._propose(Command(supersede=request))
        self._reports.recheck()
        return registry_pb2.SupersedeResponse(kept_steps=result.kept)

    @decides
    async def DeleteSteps(
        self, request: registry_pb2.DeleteStepsRequest, context: Context
    ) -> registry_pb2.DeleteStepsResponse:
        """Keep a step, or all of a job, no more; or say what would come of it, current as of this call."""
        step = request.step if request.HasField("step") else None
        command = Command(delete=request)
        with checking():
            commands.check(command)
        if request.dry_run:
            await self._leader.confirm()
        plan = self._raft.read(lambda state: plan_deletion(state, request.job, step))
        refusal = "" if request.even_if_running else plan.objection
        answer = registry_pb2.DeleteStepsResponse(
            deleted_steps=plan.deleted,
            kept_steps=plan.kept,
            ends_sessions=plan.ends_sessions,
            running_ranks=plan.running[:RUNNING_SHOWN_MAX],
            refusal=refusal,
        )
        if request.dry_run:
            return answer
        result = await self._propose(command)
        if result.ends_sessions:
            self._reports.ended(request.job)
        logger.info("registry: of job %s these steps were deleted: %s", request.job, list(result.deleted))
        return registry_pb2.DeleteStepsResponse(
            deleted_steps=result.deleted,
            kept_steps=result.kept,
            ends_sessions=result.ends_sessions,
            running_ranks=answer.running_ranks,
        )

    # Calls that every voter answers

    @answers
    async def ListJobs(
        self, request: registry_pb2.ListJobsRequest, context: Context
    ) -> registry_pb2.ListJobsResponse:
        """All jobs, as applied here."""
        return registry_pb2.ListJobsResponse(jobs=self._raft.read(job_views))


def _whose(state: State, request: registry_pb2.OpenRankRequest) -> registry_pb2.OpenRankResponse:
    """Who has a rank's place: what whoever wants it has to name."""
    job, rank = request.job, request.rank
    return registry_pb2.OpenRankResponse(
        current=current_session(state, job, rank),
        vacant=is_vacant(state, job, rank, request.client_id),
    )


def _find(state: State, request: registry_pb2.LookupRequest) -> registry_pb2.LookupResponse:
    job = state.jobs.get(request.job)
    if job is None:
        return registry_pb2.LookupResponse()
    response = registry_pb2.LookupResponse(kept_steps=job.kept, owner=job.owner)
    kept = job.find_step(request.step if request.HasField("step") else job.newest)
    if kept is None:
        return response
    if not request.HasField("rank") or shared_state.is_replicated(kept.ranks):
        response.record.CopyFrom(kept)
        return response
    response.record.job, response.record.step = kept.job, kept.step
    response.record.world_size, response.record.copies = kept.world_size, kept.copies
    response.record.ranks.extend(kept.ranks[request.rank : request.rank + 1])
    return response
