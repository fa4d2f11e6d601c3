"""The part of the registry's gRPC face that deletes: steps that nobody wants or that are given up, and ranks that are
done.

The leader's alone. It checks and translates; `registry.deletion` decides.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import registry_log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..registry.deletion import plan_deletion
from ..registry.leader import Leader
from ..registry.raft.consensus import Consensus
from ..registry.records import check
from ..registry.reports import Reports
from ..registry.stubs import Stubs
from .leader_calls import LeaderCalls, checking, decides

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Command = registry_log_pb2.RegistryCommand

RUNNING_SHOWN_MAX = 64


class RegistryDeletion(LeaderCalls):
    """A part of `services.registry.RegistryService`."""

    def __init__(
        self, config: Config, raft: Consensus, leader: Leader, reports: Reports, stubs: Stubs
    ) -> None:
        super().__init__(config, raft, leader, stubs)
        self._reports = reports

    @decides
    async def CloseRank(self, request: rpb.CloseRankRequest, context: Context) -> rpb.CloseRankResponse:
        """The process of a session is done."""
        await self._propose(Command(close_rank=request))
        return rpb.CloseRankResponse()

    @decides
    async def Supersede(self, request: rpb.SupersedeRequest, context: Context) -> rpb.SupersedeResponse:
        """Rule out steps that a rank has given up."""
        result = await self._propose(Command(supersede=request))
        self._reports.recheck()
        return rpb.SupersedeResponse(kept_steps=result.kept)

    @decides
    async def DeleteSteps(self, request: rpb.DeleteStepsRequest, context: Context) -> rpb.DeleteStepsResponse:
        """Keep a step, or all of a job, no more; or say what would come of it, current as of this call."""
        step = request.step if request.HasField("step") else None
        command = Command(delete=request)
        with checking():
            check(command)
        if request.dry_run:
            await self._leader.confirm()
        plan = self._raft.read(lambda state: plan_deletion(state, request.job, step))
        refusal = "" if request.even_if_running else plan.objection
        answer = rpb.DeleteStepsResponse(
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
        return rpb.DeleteStepsResponse(
            deleted_steps=result.deleted,
            kept_steps=result.kept,
            ends_sessions=result.ends_sessions,
            running_ranks=answer.running_ranks,
        )
