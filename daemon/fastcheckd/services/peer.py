"""PeerService on the data process: what other nodes' data processes may ask of this one.

It translates: puts go to the put desk, gets become tickets for the lane, the rest is looked up in the
store. Calls that touch files or hash go to a thread, so the event loop stays quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

from ..certificates import Certificates
from ..counters import Counters
from ..errors import FastCheckdError, InvalidRequestError, NoLeaseError, NotHeldError
from ..health.lease import LeaseHolder
from ..maintenance.maintenance import Maintenance
from ..rpc import answers
from ..store.ram_store import HeldShard, RamStore
from ..transfer.frames import STREAMS_MAX
from ..transfer.put_checks import check_cluster, check_key
from ..transfer.put_desk import PutDesk
from ..transfer.tickets import GetGrant, TicketOffice
from .peer_maintenance import PeerMaintenance

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
#: Jobs that an answer tells of.
JOBS_MAX = 32
_KINDS = (pb.REPLICA_KIND_COPY, pb.REPLICA_KIND_OWNER)


class PeerService(PeerMaintenance, peer_pb2_grpc.PeerServiceServicer):
    """The face that other nodes see."""

    def __init__(
        self,
        *,
        cluster_id: str,
        desk: PutDesk,
        store: RamStore,
        tickets: TicketOffice,
        counters: Counters,
        lease: LeaseHolder,
        maintenance: Maintenance | None = None,
        lane_report: Callable[[], peer_pb2.LaneReport] | None = None,
        certificates: Certificates | None = None,
        saves: Callable[[], list[peer_pb2.JobSaves]] = list,
    ) -> None:
        self._cluster_id = cluster_id
        self._lease = lease
        self._desk = desk
        self._store = store
        self._tickets = tickets
        self._counters = counters
        self._maintenance = maintenance
        self._lane_report = lane_report
        self._certificates = certificates
        self._saves = saves
        #: One check of a reported replica at a time: reports must not take all cores.
        self._checking = asyncio.Semaphore(1)

    @answers
    async def BeginPut(
        self, request: peer_pb2.BeginPutRequest, context: Context
    ) -> peer_pb2.BeginPutResponse:
        """Reserve memory for a copy."""
        if not request.manifest.provisional:
            await self._await_lease()
        beginning = asyncio.get_running_loop().run_in_executor(None, self._desk.begin, request)
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The caller is gone and will never learn the id: its reservation would lie until it expires.
            beginning.add_done_callback(self._abort_orphan)
            raise

    @answers
    async def FinishPut(
        self, request: peer_pb2.FinishPutRequest, context: Context
    ) -> peer_pb2.FinishPutResponse:
        """Check, make visible, acknowledge."""
        if self._desk.needs_lease(request.transfer_id):
            await self._await_lease()
        return await asyncio.to_thread(self._desk.finish, request)

    @answers
    async def AbortPut(
        self, request: peer_pb2.AbortPutRequest, context: Context
    ) -> peer_pb2.AbortPutResponse:
        """Give a reservation back."""
        await asyncio.to_thread(self._desk.abort, request.transfer_id)
        return peer_pb2.AbortPutResponse()

    @answers
    async def BeginGet(
        self, request: peer_pb2.BeginGetRequest, context: Context
    ) -> peer_pb2.BeginGetResponse:
        """Open a replica for reading; whichever kind has the digest that is wanted."""
        check_cluster(request.cluster_id, self._cluster_id)
        check_key(request.key)
        if request.streams > STREAMS_MAX:
            raise InvalidRequestError(f"streams {request.streams} is more than {STREAMS_MAX}")
        held = self._wanted(request)
        if not held.is_full and request.streams:
            held = await asyncio.to_thread(self._store.full, held)
        grant = GetGrant(
            manifest=held.manifest,
            streams=request.streams,
            opened=lambda: self._opened(request),
            background=request.background,
            accept_encoded=request.accept_encoded,
        )
        try:
            tickets = [self._tickets.issue(grant) for _ in range(request.streams)]
        except FastCheckdError:
            self._tickets.revoke(grant)
            raise
        return peer_pb2.BeginGetResponse(manifest=held.manifest, tickets=tickets)

    @answers
    async def ListReplicas(
        self, request: peer_pb2.ListReplicasRequest, context: Context
    ) -> peer_pb2.ListReplicasResponse:
        """What is held, as the store has it."""
        step = request.step if request.HasField("step") else None
        return peer_pb2.ListReplicasResponse(
            replicas=[
                peer_pb2.Replica(
                    key=held.key,
                    kind=held.kind,
                    owner=held.manifest.owner,
                    bytes=held.manifest.bytes,
                    digest=held.manifest.digest,
                    verified_at_ms=held.verified_at_ms,
                    codecs=held.manifest.codecs,
                    lossy=held.manifest.lossy,
                    stored_bytes=held.stored_bytes,
                    provisional=held.manifest.provisional,
                    world_size=held.manifest.world_size,
                    shard_count=held.manifest.shard_count,
                    session=held.manifest.session,
                    state_bytes=held.manifest.state_bytes,
                    offset=held.manifest.offset,
                    save_id=held.manifest.save_id,
                    generation=held.manifest.generation,
                    shared=held.manifest.shared if held.manifest.HasField("shared") else None,
                )
                for held in self._store.held(request.job, step)
            ]
        )

    @answers
    async def ReportCorrupt(
        self, request: peer_pb2.ReportCorruptRequest, context: Context
    ) -> peer_pb2.ReportCorruptResponse:
        """Believe nobody: hash the replicas again and drop what is bad."""
        check_key(request.key)
        dropped = False
        async with self._checking:
            for held in self._found(request.key):
                if held.manifest.digest != request.digest:
                    continue
                with contextlib.suppress(NotHeldError):  # dropped by someone else meanwhile
                    good = await asyncio.to_thread(self._store.verify, held)
                    dropped = dropped or not good
        return peer_pb2.ReportCorruptResponse(dropped=dropped)

    @answers
    async def GetStats(
        self, request: peer_pb2.GetStatsRequest, context: Context
    ) -> peer_pb2.GetStatsResponse:
        """Counters and memory."""
        usage = self._store.usage()
        return peer_pb2.GetStatsResponse(
            ram_used_bytes=usage.used_bytes - usage.free_bytes,  # free ones go when needed
            ram_budget_bytes=usage.budget_bytes,
            counters=self._counters.snapshot(),
            scrub_age_ms=None if self._maintenance is None else self._maintenance.scrub_age_ms(),
            lane=None if self._lane_report is None else self._lane_report(),
            certificate=self._certificate(),
            jobs=self._jobs(),
            job_budget_bytes=self._store.job_budget_bytes,
            saves=self._saves(),
        )

    def _jobs(self) -> list[peer_pb2.JobMemory]:
        most = heapq.nlargest(JOBS_MAX, self._store.job_bytes().items(), key=lambda item: item[1])
        return [peer_pb2.JobMemory(job=job, ram_used_bytes=used) for job, used in most]

    def _certificate(self) -> peer_pb2.CertificateReport | None:
        if self._certificates is None:
            return None
        self._certificates.refresh()
        newest = self._certificates.newest
        return peer_pb2.CertificateReport(
            seconds_left=newest.seconds_left, lifetime_seconds=newest.lifetime_s
        )

    async def _await_lease(self) -> None:
        """Give a lease that is on its way a moment, in no thread. Whether there is one then, the desk decides."""
        with contextlib.suppress(NoLeaseError):
            await self._lease.until_held()

    def _found(self, key: pb.ShardKey) -> list[HeldShard]:
        found = (self._store.find(key, kind) for kind in _KINDS)
        return [held for held in found if held is not None]

    def _wanted(self, request: peer_pb2.BeginGetRequest) -> HeldShard:
        """The replica to be read, of whichever kind; NotHeldError."""
        for held in self._found(request.key):
            if held.manifest.digest == request.digest:
                return held
        raise NotHeldError(f"this node has no {_shown(request.key)} with that digest: ask another holder")

    @contextlib.contextmanager
    def _opened(self, request: peer_pb2.BeginGetRequest) -> Iterator[memoryview]:
        """The replica's bytes while they stay put; NotHeldError when it is gone.

        Slow when a newer step was put since BeginGet.
        """
        with self._store.reading(self._wanted(request)) as held, held.view as view:
            yield view

    def _abort_orphan(self, beginning: asyncio.Future[peer_pb2.BeginPutResponse]) -> None:
        if beginning.cancelled() or beginning.exception() is not None:
            return  # nothing was reserved, and the refusal is counted
        asyncio.get_running_loop().run_in_executor(None, self._desk.abort, beginning.result().transfer_id)


def _shown(key: pb.ShardKey) -> str:
    return f"{key.job} step {key.step} rank {key.rank} shard {key.shard}"
