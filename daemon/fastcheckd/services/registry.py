"""The registry's gRPC face. Checks and translates; `leading`, `reporting` and the state machine decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from fastcheck_proto.conventions import (
    ERROR_METADATA_KEY,
    LEADER_METADATA_KEY,
    RANK_MAX,
    STEP_MAX,
    check_name,
)
from fastcheck_proto.v1 import common_pb2, registry_pb2, registry_pb2_grpc

from ..config import Config
from ..errors import InvalidRequestError, from_code
from ..health.detector import FailureDetector
from ..registry import records, wire
from ..registry.commits import find_step
from ..registry.engine import Engine
from ..registry.leading import Leader
from ..registry.records import Json, is_lossy
from ..registry.reporting import Reports
from ..registry.view import job_view
from ..rpc import answers
from .registry_signs import RegistrySigns

Context = grpc.aio.ServicerContext[Any, Any]

REPORT_WAIT_S_MAX = 10.0
CHUNK_BYTES_MAX = 16 << 20


@contextmanager
def _checking() -> Iterator[None]:
    """What the checks of names and records raise is the caller's mistake."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


class RegistryService(RegistrySigns, registry_pb2_grpc.RegistryServiceServicer):
    """One voter's answers.

    Args:
        config, raft, leader, reports, detector: the parts that `registry_server` wires.
    """

    def __init__(
        self, config: Config, raft: Engine, leader: Leader, reports: Reports, detector: FailureDetector
    ) -> None:
        super().__init__(config, raft, leader, detector)
        self._reports = reports

    # Deciding calls: the leader's alone

    async def _need_leader(self, context: Context) -> None:
        if self._leader.ready:
            return
        leader = self._raft.leader
        trailing = [(ERROR_METADATA_KEY, common_pb2.ErrorCode.Name(common_pb2.ERROR_CODE_NO_QUORUM))]
        message = f"voter {self._config.node_id} is not the leader, and knows none now; try again"
        if leader is not None and leader.node_id != self._config.node_id:
            trailing.append((LEADER_METADATA_KEY, leader.registry_address))
            message = f"voter {self._config.node_id} is not the leader; ask {leader.registry_address}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message, tuple(trailing))

    async def _propose(self, command: Json) -> Json:
        """Commit a command; a refusal becomes the error it stands for."""
        result = await self._raft.propose(command)
        if not result["ok"]:
            raise from_code(wire.error_code(result["code"]), result["message"])
        return result

    @answers
    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> registry_pb2.RegisterResponse:
        """A node starts a new life."""
        if request.cluster_id != self._config.cluster_id:
            raise InvalidRequestError(
                f"node {request.node_id!r} belongs to the cluster {request.cluster_id!r}, this registry to "
                f"{self._config.cluster_id!r}: check the config keys 'cluster_id' and 'voters' of that node"
            )
        node = {
            "node_id": request.node_id,
            "agent_address": request.agent_address,
            "data_address": request.data_address,
            "lane_address": request.lane_address,
            "voter": request.voter,
            "ram_budget_bytes": request.ram_budget_bytes,
        }
        with _checking():
            records.node_fields(node)
            records.text({"life_id": request.life_id}, "life_id", records.TOKEN_BYTES_MAX)
        await self._need_leader(context)
        result = await self._propose({"type": "register", "node": node, "life_id": request.life_id})
        self._detector.heard((request.node_id, result["incarnation"]), self._now(), data_ready=True)
        return registry_pb2.RegisterResponse(incarnation=result["incarnation"], epoch=result["epoch"])

    @answers
    async def Leave(self, request: registry_pb2.LeaveRequest, context: Context) -> registry_pb2.LeaveResponse:
        """A node leaves in good order."""
        with _checking():
            node = records.node_ref(wire.node_ref(request.node), "the node")
        await self._need_leader(context)
        await self._propose({"type": "set_state", "node": node, "state": "DOWN"})
        return registry_pb2.LeaveResponse()

    @answers
    async def OpenRank(
        self, request: registry_pb2.OpenRankRequest, context: Context
    ) -> registry_pb2.OpenRankResponse:
        """A process takes a rank's place."""
        with _checking():
            _check_rank_of(request.job, request.rank, request.world_size)
            records.text({"client_id": request.client_id}, "client_id", records.TOKEN_BYTES_MAX)
            node = records.node_ref(wire.node_ref(request.node), "the node")
        await self._need_leader(context)
        result = await self._propose(
            {
                "type": "open_rank",
                "job": request.job,
                "rank": request.rank,
                "world_size": request.world_size,
                "client": request.client_id,
                "node": node,
            }
        )
        self._reports.opened(request.job, request.rank, result["session"])
        return registry_pb2.OpenRankResponse(session=result["session"])

    @answers
    async def Place(self, request: registry_pb2.PlaceRequest, context: Context) -> registry_pb2.PlaceResponse:
        """Name the holders of a rank's shards."""
        with _checking():
            _check_rank_of(request.job, request.rank, request.world_size)
            _check_step(request.step)
            owner = records.node_ref(wire.node_ref(request.owner), "the owner")
            if request.state_bytes > STEP_MAX or not 1 <= request.chunk_bytes <= CHUNK_BYTES_MAX:
                raise ValueError(
                    f"chunk_bytes must be from 1 to {CHUNK_BYTES_MAX}, state_bytes at most {STEP_MAX}"
                )
        await self._need_leader(context)
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
        response = registry_pb2.PlaceResponse(epoch=placement.epoch, generation=placement.generation)
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

    @answers
    async def Report(
        self, request: registry_pb2.ReportRequest, context: Context
    ) -> registry_pb2.ReportResponse:
        """A rank is replicated; wait for its step."""
        with _checking():
            _check_rank_of(request.job, request.record.rank, request.world_size)
            _check_step(request.step)
            if sorted(shard.shard for shard in request.record.shards) != list(
                range(len(request.record.shards))
            ):
                raise ValueError("the shards of a record must be numbered from 0, each once")
            record = records.rank_record(wire.rank_record(request.record))
        await self._need_leader(context)
        # NaN fails every comparison: it waits not at all.
        wait_s = min(request.wait_s, REPORT_WAIT_S_MAX) if request.wait_s > 0 else 0.0
        return await self._reports.report(request.job, request.step, request.world_size, record, wait_s)

    @answers
    async def Lookup(
        self, request: registry_pb2.LookupRequest, context: Context
    ) -> registry_pb2.LookupResponse:
        """The newest or the asked-for committed step, current as of this call."""
        with _checking():
            check_name("job", request.job)
        await self._need_leader(context)
        await self._leader.confirm()

        def find(state: Json) -> registry_pb2.LookupResponse:
            job = state["jobs"].get(request.job)
            steps = [] if job is None else job["steps"]
            response = registry_pb2.LookupResponse(kept_steps=[kept["step"] for kept in steps])
            wanted = request.step if request.HasField("step") else (steps[-1]["step"] if steps else None)
            kept = None if job is None or wanted is None else find_step(job, wanted)
            if kept is not None:
                rank = request.rank if request.HasField("rank") else None
                response.record.CopyFrom(wire.step_message(request.job, kept, rank))
            return response

        return self._raft.read(find)

    @answers
    async def ListJobSteps(
        self, request: registry_pb2.ListJobStepsRequest, context: Context
    ) -> registry_pb2.ListJobStepsResponse:
        """Committed steps and those under way."""
        with _checking():
            check_name("job", request.job)
        await self._need_leader(context)

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
                    )
                )
        return registry_pb2.ListJobStepsResponse(steps=steps)

    # Calls that every voter answers

    @answers
    async def ListJobs(
        self, request: registry_pb2.ListJobsRequest, context: Context
    ) -> registry_pb2.ListJobsResponse:
        """All jobs, as applied here."""
        jobs = self._raft.read(lambda s: [job_view(name, job) for name, job in sorted(s["jobs"].items())])
        return registry_pb2.ListJobsResponse(jobs=jobs)


def _check_rank_of(job: str, rank: int, world_size: int) -> None:
    check_name("job", job)
    if not 1 <= world_size <= RANK_MAX or rank >= world_size:
        raise ValueError(f"rank {rank} and world size {world_size} do not fit, or are beyond {RANK_MAX}")


def _check_step(step: int) -> None:
    if step > STEP_MAX:
        raise ValueError(f"step {step} is beyond {STEP_MAX}")
