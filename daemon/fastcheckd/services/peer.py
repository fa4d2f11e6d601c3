"""PeerService on the data process: what other nodes' data processes may ask of this one.

It translates: offers go to the receiver, openings become tickets for the lane, the rest is looked up in the store.
Calls that touch files or hash go to a thread, so the event loop stays quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

from fastcheck_proto.conventions import STEP_MAX
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2, peer_pb2_grpc

from ..certificates import Certificates
from ..counters import Counters
from ..errors import FastCheckdError, InvalidRequestError, NotHeldError, PeerError
from ..maintenance.maintenance import Maintenance
from ..rpc import answers
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..transfer.checks import check_key, check_open
from ..transfer.client import shown
from ..transfer.encoder_cache import EncoderCache
from ..transfer.receiver import Receiver
from ..transfer.tickets import Grant, TicketOffice

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
#: Jobs that an answer tells of.
JOBS_MAX = 32
_KINDS = (pb.REPLICA_KIND_COPY, pb.REPLICA_KIND_OWNER)


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """The face that other nodes see."""

    def __init__(
        self,
        *,
        cluster_id: str,
        receiver: Receiver,
        store: ReplicaStore,
        encoders: EncoderCache,
        tickets: TicketOffice,
        counters: Counters,
        maintenance: Maintenance | None = None,
        lane_report: Callable[[], peer_pb2.LaneReport] | None = None,
        certificates: Certificates | None = None,
        saves: Callable[[], list[peer_pb2.JobSaves]] = list,
    ) -> None:
        self._cluster_id = cluster_id
        self._receiver = receiver
        self._store = store
        self._encoders = encoders
        self._tickets = tickets
        self._counters = counters
        self._maintenance = maintenance
        self._lane_report = lane_report
        self._certificates = certificates
        self._saves = saves
        #: One check of a reported replica at a time: reports must not take all cores.
        self._checking = asyncio.Semaphore(1)

    @answers
    async def Replicate(
        self, request: peer_pb2.ReplicateRequest, context: Context
    ) -> peer_pb2.ReplicateResponse:
        """Pull a copy of a shard."""
        return await self._receiver.replicate(request)

    @answers
    async def Open(self, request: peer_pb2.OpenRequest, context: Context) -> peer_pb2.OpenResponse:
        """Open a replica for reading; whichever kind has the digest that is wanted."""
        check_open(request, self._cluster_id)
        replica = self._wanted(request)
        response = peer_pb2.OpenResponse(manifest=replica.manifest)
        if not request.streams:
            return response
        base = self._base(request, replica)
        if base is not None:
            response.base_step = base.key.step
        replicates = request.purpose == peer_pb2.PURPOSE_REPLICATE
        grant = Grant(
            opened=partial(self._encoders.opened, replica, base, replicates=replicates),
            purpose=request.purpose,
            reader=request.reader,
            accept_encoded=request.accept_encoded,
            lean=request.lean,
        )
        try:
            response.tickets.extend(self._tickets.issue(grant) for _ in range(request.streams))
        except FastCheckdError:
            self._tickets.revoke(grant)
            raise
        return response

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
    async def VerifyReplicas(
        self, request: peer_pb2.VerifyReplicasRequest, context: Context
    ) -> peer_pb2.VerifyReplicasResponse:
        """Check replicas now; bad ones are dropped."""
        if request.HasField("step") and request.step > STEP_MAX:
            raise InvalidRequestError(f"step {request.step} is more than {STEP_MAX}")
        if self._maintenance is None:  # a holder in a test
            raise PeerError("this node does not check its replicas: ask another one")
        return await self._maintenance.verify(request.job, request.step if request.HasField("step") else None)

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

    def _found(self, key: pb.ShardKey) -> list[Replica]:
        found = (self._store.find(key, kind) for kind in _KINDS)
        return [held for held in found if held is not None]

    def _wanted(self, request: peer_pb2.OpenRequest) -> Replica:
        """The replica to be read, of whichever kind, one with raw chunks before others; NotHeldError."""
        found = [r for r in self._found(request.key) if r.manifest.digest == request.digest]
        if not found:
            raise NotHeldError(f"this node has no {shown(request.key)} with that digest: ask another holder")
        return next((replica for replica in found if replica.is_whole), found[0])

    def _base(self, request: peer_pb2.OpenRequest, replica: Replica) -> Replica | None:
        """The first of the reader's steps that is here as well, with its chunks as they are, cut alike."""
        key = pb.ShardKey()
        key.CopyFrom(request.key)
        for base in request.bases:
            key.step = base.step
            for found in self._found(key):
                same = found.manifest.digest == base.digest and found.chunks == replica.chunks
                if same and found.is_whole and base.step < request.key.step:
                    return found
        return None
