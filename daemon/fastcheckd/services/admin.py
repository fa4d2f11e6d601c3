"""AdminService on the agent: what an operator may ask of any node.

It asks the registry first, then all nodes side by side with one deadline, and answers with what came
back before the caller gives up: a dead node costs its part of the answer and never the answer. What the
replies mean is decided in `admin_reports.py` and `health_codes.py`; what changes the cluster goes through
`admin_changes.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from fastcheck_proto.v1 import admin_pb2, peer_pb2, registry_pb2

from ..config import Config
from ..errors import FastCheckdError, NoQuorumError, StepGoneError
from ..registry.client import RegistryClient
from ..rpc import answers
from ..transfer.client import PeerClient
from ..view import LastView
from . import admin_reports as reports
from . import health_codes as health
from .admin_changes import AdminChanges, AdminTimeouts, Context, checked_job
from .health_of_jobs import ASKED_MAX, stuck_jobs

logger = logging.getLogger(__name__)

#: For all that `Status` asks: whoever calls for it wants it within 2 s, and a command needs some of them to start.
STATUS_S = 1.2


class AdminService(AdminChanges):
    """Answers for the whole cluster from one node."""

    def __init__(self, config: Config, registry: RegistryClient, peers: PeerClient) -> None:
        super().__init__(config, registry, peers)
        self._last_view = LastView(config)

    @answers
    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusResponse:
        """One answer to "is it well, and if not, why". Without a registry it says just that."""
        patience = AdminTimeouts(context, STATUS_S)
        try:
            view = await self._registry.view(patience.question_s())
        except FastCheckdError as error:
            logger.warning("status without a registry: %s", error)
            return self._status(self._empty_view(), reports.Answers(), has_quorum=False)
        within_s = patience.question_s()
        (stats, late), redundancy, (newest, held, has_quorum) = await asyncio.gather(
            self._stats_and_late(view, patience),
            self._redundancy(view, within_s),
            self._copies(view, patience),
        )
        answers = reports.Answers(
            stats=stats, replicas=held, newest_steps=newest, late=late, redundancy=redundancy
        )
        return self._status(view, answers, has_quorum=view.has_leader and has_quorum)

    @answers
    async def Nodes(self, request: admin_pb2.NodesRequest, context: Context) -> admin_pb2.NodesResponse:
        """All members, with the counters of those that answered."""
        patience = AdminTimeouts(context)
        view = await self._registry.view(patience.question_s())
        stats = await self._stats(view, patience.question_s())
        return admin_pb2.NodesResponse(nodes=reports.node_reports(view, stats))

    @answers
    async def Jobs(self, request: admin_pb2.JobsRequest, context: Context) -> admin_pb2.JobsResponse:
        """All jobs and the steps kept of each."""
        within_s = AdminTimeouts(context).question_s()
        listed = await self._registry.list_jobs(registry_pb2.ListJobsRequest(), within_s)
        # The registry remembers a job of which all was deleted; nobody else needs to.
        shown = [
            job
            for job in listed.jobs
            if job.kept_steps or job.running_ranks or not job.HasField("running_ranks")
        ]
        return admin_pb2.JobsResponse(jobs=shown)

    @answers
    async def Checkpoints(
        self, request: admin_pb2.CheckpointsRequest, context: Context
    ) -> admin_pb2.CheckpointsResponse:
        """A job's steps that can be loaded or are under way, provisional ones too: those only the nodes know."""
        job = checked_job(request.job)
        patience = AdminTimeouts(context)
        steps: Sequence[registry_pb2.StepSummary] | None = None
        try:
            ask = registry_pb2.ListJobStepsRequest(job=job)
            steps = (await self._registry.list_job_steps(ask, patience.question_s())).steps
        except NoQuorumError as error:
            logger.info("listing what the nodes hold of job %s: %s", job, error)
        view = await self._any_view(patience)
        held = await self._held(view, patience.question_s(), job)
        return admin_pb2.CheckpointsResponse(
            steps=reports.with_provisional(job, view, steps, held),
            without_registry=steps is None,
            unreachable=reports.unanswered(view, held),
        )

    async def _any_view(self, patience: AdminTimeouts) -> registry_pb2.ClusterView:
        """Whom to ask: any voter's view, or the last one that this node has kept."""
        try:
            return await self._registry.view(patience.question_s())
        except NoQuorumError:
            kept = await asyncio.to_thread(self._last_view.read)
            if kept is None:
                raise
            return kept

    @answers
    async def Replicas(
        self, request: admin_pb2.ReplicasRequest, context: Context
    ) -> admin_pb2.ReplicasResponse:
        """Who really holds what of a job's kept steps, or of one of them."""
        job = checked_job(request.job)
        patience = AdminTimeouts(context)
        view = await self._registry.view(patience.question_s())
        if request.HasField("step"):
            records = [await self._record(job, request.step, patience)]
        else:
            kept = (await self._lookup(job, None, patience.question_s())).kept_steps
            records = await self._records(job, kept, patience)
        one = records[0].step if len(records) == 1 else None
        held = await self._held(view, patience.question_s(), job, one)
        return admin_pb2.ReplicasResponse(
            replicas=[report for record in records for report in reports.replica_reports(record, held)],
            unreachable=reports.unanswered(view, held),
        )

    @answers
    async def Inspect(self, request: admin_pb2.InspectRequest, context: Context) -> admin_pb2.InspectResponse:
        """One committed step: its record, where its shards lie, and the memory that its job's ranks have now."""
        patience = AdminTimeouts(context)
        view = await self._registry.view(patience.question_s())
        record = await self._record(checked_job(request.job), request.step, patience)
        within_s = patience.question_s()
        held, stats = await asyncio.gather(
            self._held(view, within_s, record.job, record.step), self._stats(view, within_s)
        )
        return admin_pb2.InspectResponse(
            record=record,
            replicas=reports.replica_reports(record, held),
            unreachable=reports.unanswered(view, held),
            memory=reports.memory_of(record.job, stats),
        )

    def _status(
        self,
        view: registry_pb2.ClusterView,
        answered: reports.Answers,
        *,
        has_quorum: bool,
    ) -> admin_pb2.StatusResponse:
        codes = health.health_codes(
            view,
            answered,
            self._config,
            has_quorum=has_quorum,
            now_ms=time.time_ns() // 1_000_000,
        )
        return admin_pb2.StatusResponse(
            health=health.worst(codes),
            codes=codes,
            epoch=view.epoch,
            leader=view.leader if has_quorum else "",
            nodes_up=sum(node.state == registry_pb2.NODE_STATE_UP for node in view.nodes),
            nodes_total=len(view.nodes),
            cluster_id=view.cluster_id,
            voters=view.voters,
            redundancy=answered.redundancy if has_quorum else None,
            survival=reports.survival(view, answered.newest_steps),
        )

    async def _redundancy(
        self, view: registry_pb2.ClusterView, within_s: float
    ) -> registry_pb2.GetRedundancyResponse | None:
        """What the leader says about the copies; None without one."""
        if not view.has_leader:
            return None
        try:
            return await self._registry.get_redundancy(registry_pb2.GetRedundancyRequest(), within_s)
        except FastCheckdError as error:
            logger.info("how redundant the steps are is not known: %s", error)
            return None

    def _empty_view(self) -> registry_pb2.ClusterView:
        voters = [voter.node_id for voter in self._config.effective_voters]
        return registry_pb2.ClusterView(cluster_id=self._config.cluster_id, voters=voters)

    async def _copies(
        self, view: registry_pb2.ClusterView, patience: AdminTimeouts
    ) -> tuple[list[registry_pb2.StepRecord], dict[str, list[peer_pb2.Replica]], bool]:
        """Newest steps, what the nodes hold, and whether the registry could answer.

        In that order: a step that is committed after the nodes were asked would look as if nobody had it.
        """
        newest, has_quorum = await self._newest_steps(view, patience.question_s())
        held = await self._held(view, patience.question_s()) if view.jobs else {}
        return await self._still_short(newest, held, patience), held, has_quorum

    async def _newest_steps(
        self, view: registry_pb2.ClusterView, within_s: float
    ) -> tuple[list[registry_pb2.StepRecord], bool]:
        """Newest committed step of each job, and whether the registry could answer for them."""
        if not view.has_leader:  # nobody to wait for
            return [], False
        names = [job.job for job in view.jobs if job.kept_steps]
        found = await asyncio.gather(
            *(self._lookup(name, None, within_s) for name in names), return_exceptions=True
        )
        records, has_quorum = [], True
        for name, response in zip(names, found, strict=True):
            if isinstance(response, registry_pb2.LookupResponse):
                records.extend([response.record] if response.HasField("record") else [])
            elif isinstance(response, FastCheckdError):
                logger.info("newest step of job %s is not known: %s", name, response)
                has_quorum = has_quorum and not isinstance(response, NoQuorumError)
            else:
                raise response
        return records, has_quorum

    async def _still_short(
        self,
        newest: Sequence[registry_pb2.StepRecord],
        held: Mapping[str, Sequence[peer_pb2.Replica]],
        patience: AdminTimeouts,
    ) -> list[registry_pb2.StepRecord]:
        """Leave out steps that look short because newer ones replaced them while the nodes were asked."""
        keep = []
        for record in newest:
            if reports.short_shards(reports.replica_reports(record, held)):
                try:
                    kept_steps = list(
                        (await self._lookup(record.job, None, patience.question_s())).kept_steps
                    )
                except FastCheckdError as error:
                    logger.info("cannot tell whether job %s moved on: %s", record.job, error)
                    kept_steps = [record.step]
                if record.step not in kept_steps:
                    continue
            keep.append(record)
        return keep

    async def _lookup(self, job: str, step: int | None, within_s: float) -> registry_pb2.LookupResponse:
        return await self._registry.lookup(registry_pb2.LookupRequest(job=job, step=step), within_s)

    async def _records(
        self, job: str, steps: Iterable[int], patience: AdminTimeouts
    ) -> list[registry_pb2.StepRecord]:
        """Records of steps that were just listed, without those that newer ones have replaced since."""
        within_s = patience.question_s()
        found = await asyncio.gather(
            *(self._lookup(job, step, within_s) for step in steps), return_exceptions=True
        )
        for error in (r for r in found if isinstance(r, BaseException)):
            if not isinstance(error, StepGoneError):
                raise error
        return [r.record for r in found if not isinstance(r, BaseException) and r.HasField("record")]

    async def _record(self, job: str, step: int, patience: AdminTimeouts) -> registry_pb2.StepRecord:
        found = await self._lookup(job, step, patience.question_s())
        if not found.HasField("record"):
            kept = ", ".join(map(str, found.kept_steps)) or "none"
            raise StepGoneError(f"step {step} of job {job} is not kept; kept steps: {kept}")
        return found.record

    async def _stats_and_late(
        self, view: registry_pb2.ClusterView, patience: AdminTimeouts
    ) -> tuple[dict[str, peer_pb2.GetStatsResponse], dict[str, Sequence[registry_pb2.LateRank]]]:
        """What the nodes say of themselves, and whom the jobs wait for that get nowhere by that."""
        stats = await self._stats(view, patience.question_s())
        stuck = stuck_jobs(reports.Answers(stats=stats))[:ASKED_MAX] if view.has_leader else []
        within_s = patience.question_s()

        async def ask(job: str) -> Sequence[registry_pb2.LateRank]:
            try:
                asked = registry_pb2.ListJobStepsRequest(job=job)
                return (await self._registry.list_job_steps(asked, within_s)).late
            except FastCheckdError as error:
                logger.info("whom job %s waits for is not known: %s", job, error)
                return ()

        found = await asyncio.gather(*map(ask, stuck))
        return stats, dict(zip(stuck, found, strict=True))

    async def _stats(
        self, view: registry_pb2.ClusterView, within_s: float
    ) -> dict[str, peer_pb2.GetStatsResponse]:
        return await self._ask(
            view, lambda node_id, at: self._peers.get_stats(node_id, at, within_s), within_s
        )

    async def _held(
        self, view: registry_pb2.ClusterView, within_s: float, job: str = "", step: int | None = None
    ) -> dict[str, list[peer_pb2.Replica]]:
        return await self._ask(
            view, lambda node_id, at: self._peers.list_replicas(node_id, at, job, step, within_s), within_s
        )
