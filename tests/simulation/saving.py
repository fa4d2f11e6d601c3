"""A save and a load as a data process does them, around the real client, choice of holders and restore plan.

The order is that of `save.replicator` and `restore.coordinator`: place, publish the own copy, offer it to every holder,
place again what failed, report until the registry has decided.
"""

from __future__ import annotations

import asyncio
import hashlib

import grpc.aio
from tests.simulation.data import PEER_TIMEOUT_S, Data, FetchRequest
from tests.simulation.truth import OWNER

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import (
    FastCheckdError,
    FencedError,
    IncarnationOverError,
    NoQuorumError,
    PeerError,
    PlacementError,
    SupersededError,
    from_code,
)
from fastcheckd.restore.plan import other_sources, plan_fetch
from fastcheckd.rpc import from_rpc_error
from fastcheckd.save.holders import pick_holders
from fastcheckd.save.placement_client import begun_after

CHUNKS = 6
REGISTRY_TIMEOUT_S = 3.0
REPORT_WAIT_S = 1.0
RETRY_PAUSE_S = 0.3
QUARANTINE_S = 3.0
ATTEMPTS_MAX = 30
#: A save that has not moved for so long is over.
PATIENCE_S = 20.0
#: A holder asks each source once, and transfers.
OFFER_TIMEOUT_S = 3 * PEER_TIMEOUT_S


def digest_of(job: str, step: int, rank: int, session: int, shard: int) -> bytes:
    """What a shard of this save hashes to: another process would have saved other bytes."""
    return hashlib.blake2b(f"{job}/{step}/{rank}/{session}/{shard}".encode(), digest_size=16).digest()


class Save:
    """One rank's step on its way."""

    def __init__(self, data: Data, job: str, step: int, rank: int, session: int, world_size: int) -> None:
        self.data = data
        self.job, self.step, self.rank = job, step, rank
        self.session, self.world_size = session, world_size
        self.outcome = "under way"
        self._state_bytes = CHUNKS * data.machine.config.chunk_bytes
        self._shards: list[rpb.ShardPlacement] = []
        self._digests: list[bytes] = []
        self._acknowledged: list[dict[str, pb.NodeRef]] = []
        self._resting: dict[str, float] = {}
        self._begun_at = self._moved_at = data.process.now
        self._begun_after = max(session + 1, data.view.next_session(job))
        data.truth.begun[(job, step, rank, session)] = self._begun_at

    def __str__(self) -> str:
        return f"{self.job}/{self.step} rank {self.rank} session {self.session} at {self.data.machine.name}"

    async def run(self) -> None:
        """To its end; `outcome` says which."""
        try:
            placement = await self._place()
            self._shards = list(placement.shards)
            numbers = range(len(self._shards))
            self._digests = [digest_of(self.job, self.step, self.rank, self.session, n) for n in numbers]
            self._acknowledged = [{} for _ in numbers]
            self.data.truth.made[(self.job, self.step, self.rank, self.session)] = self._digests
            for number, digest in enumerate(self._digests):
                key = (OWNER, self.job, self.step, self.rank, number)
                self.data.keep(key, digest, self.session)
            copies = min(len(shard.holders) for shard in self._shards)
            while True:
                epoch = await self._replicate(placement, copies)
                lost = await self._report(epoch)
                if not lost:
                    break
                for acknowledged in self._acknowledged:
                    for node_id in lost:
                        acknowledged.pop(node_id, None)
                placement = await self._place()
        except FastCheckdError as error:
            self.outcome = type(error).__name__
        else:
            self.outcome = "committed"
            self.data.truth.told_committed(self.job, self.step, self.rank, self.session)
        self.data.truth.note(f"save {self}: {self.outcome}")

    async def _wait_out(self, error: FastCheckdError) -> None:
        if self.data.process.now - self._moved_at > PATIENCE_S:
            raise error
        await asyncio.sleep(RETRY_PAUSE_S)

    def _reborn(self, owner: pb.NodeRef) -> bool:
        return self.data.identity.incarnation > owner.incarnation

    async def _place(self) -> rpb.PlaceResponse:
        data = self.data
        while True:
            now = data.process.now
            self._resting = {n: until for n, until in self._resting.items() if until > now}
            try:
                await data.identity.until_known(REGISTRY_TIMEOUT_S)
                owner = data.identity.ref()
                placed = await data.client.place(
                    rpb.PlaceRequest(
                        job=self.job,
                        step=self.step,
                        rank=self.rank,
                        world_size=self.world_size,
                        session=self.session,
                        owner=owner,
                        state_bytes=self._state_bytes,
                        chunk_bytes=data.machine.config.chunk_bytes,
                        avoid=sorted(self._resting),
                        oldest_step=self.step,
                    ),
                    timeout_s=REGISTRY_TIMEOUT_S,
                )
                under_way_s = data.process.now - self._begun_at
                self._begun_after = begun_after(self._begun_after, placed, under_way_s)
                return placed
            except (NoQuorumError, PlacementError, PeerError) as error:
                await self._wait_out(error)
            except IncarnationOverError:
                if not self._reborn(owner):
                    raise

    async def _replicate(self, placement: rpb.PlaceResponse, copies: int) -> int:
        for attempt in range(ATTEMPTS_MAX):
            offers = [
                self._offer(number, holder, placement.epoch)
                for number, got in enumerate(self._acknowledged)
                for holder in pick_holders(number, copies - len(got), got, placement)
            ]
            await asyncio.gather(*offers)
            if all(len(got) >= copies for got in self._acknowledged):
                return placement.epoch
            if self.data.process.now - self._moved_at > PATIENCE_S:
                break
            await asyncio.sleep(min(RETRY_PAUSE_S * attempt, 2.0))
            placement = await self._place()
        raise PlacementError("no round of sending reached enough holders")

    async def _offer(self, number: int, holder: pb.Holder, epoch: int) -> None:
        data, shard = self.data, self._shards[number]
        network, machine = data.machine.world.network, data.machine
        request = peer_pb2.ReplicateRequest(
            cluster_id=machine.config.cluster_id,
            epoch=epoch,
            holder_incarnation=holder.node.incarnation,
            key=pb.ShardKey(job=self.job, step=self.step, rank=self.rank, shard=number),
            digest=self._digests[number],
            bytes=shard.bytes,
            sources=[
                pb.Holder(
                    node=data.identity.ref(),
                    data_address=machine.config.data_address,
                    lane_address=machine.config.lane_address,
                )
            ],
        )
        try:
            await network.call(machine.name, holder.data_address, "Replicate", request, OFFER_TIMEOUT_S)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, holder.node.node_id)
            if not isinstance(error, FencedError):
                self._resting[holder.node.node_id] = data.process.now + QUARANTINE_S
            return
        self._moved_at = data.process.now
        self._acknowledged[number][holder.node.node_id] = holder.node

    async def _report(self, epoch: int) -> list[str]:
        """Holders that were lost; none when it is committed."""
        data = self.data
        while True:
            owner = data.identity.ref()
            record = rpb.RankRecord(
                rank=self.rank,
                session=self.session,
                owner=owner,
                state_bytes=self._state_bytes,
                shards=[
                    rpb.ShardRecord(
                        shard=number,
                        offset=shard.offset,
                        bytes=shard.bytes,
                        digest=self._digests[number],
                        holders=[
                            self._acknowledged[number][name] for name in sorted(self._acknowledged[number])
                        ],
                    )
                    for number, shard in enumerate(self._shards)
                ],
                begun_after=self._begun_after,
            )
            request = rpb.ReportRequest(
                job=self.job,
                step=self.step,
                world_size=self.world_size,
                epoch=epoch,
                record=record,
                wait_s=REPORT_WAIT_S,
            )
            try:
                response = await data.client.report(request, timeout_s=REPORT_WAIT_S + REGISTRY_TIMEOUT_S)
            except (NoQuorumError, PeerError) as error:
                await self._wait_out(error)
                continue
            if response.state == rpb.REPORT_STATE_COMMITTED:
                return []
            if response.state == rpb.REPORT_STATE_WAITING:
                if data.process.now - self._moved_at > PATIENCE_S:
                    raise SupersededError("other ranks did not save this step")
                continue
            if response.error.code == pb.ERROR_CODE_HOLDER_LOST:
                return [ref.node_id for ref in response.lost_holders]
            if response.error.code == pb.ERROR_CODE_INCARNATION_OVER and self._reborn(owner):
                continue
            raise from_code(response.error.code, response.error.message)


async def rule_out(data: Data, job: str, rank: int, session: int, below_step: int) -> None:
    """Have the registry rule out what a trainer has given up, and drop it here; once, as memory is asked for once."""
    try:
        await data.identity.until_known(REGISTRY_TIMEOUT_S)
        request = rpb.SupersedeRequest(
            job=job, rank=rank, session=session, owner=data.identity.ref(), below_step=below_step
        )
        answer = await data.client.supersede(request, timeout_s=REGISTRY_TIMEOUT_S)
    except FastCheckdError as error:
        data.truth.note(f"rule out {job} rank {rank} below {below_step}: {type(error).__name__}")
        return
    data.truth.note(f"rule out {job} rank {rank} below {below_step}")
    data.drop_own(job, rank, session, below_step, answer.kept_steps)


async def open_rank(
    data: Data,
    job: str,
    rank: int,
    world_size: int,
    client: str,
    *,
    again: bool = False,
    loads: bool = True,
    renews: int = 0,
) -> int | None:
    """A session for a new trainer process, or for one whose session before was ended; None: it is over already."""
    while True:
        try:
            await data.identity.until_known(REGISTRY_TIMEOUT_S)
            request = rpb.OpenRankRequest(
                job=job,
                rank=rank,
                world_size=world_size,
                client_id=client,
                node=data.identity.ref(),
                again=again,
                loads=loads,
                renews=renews,
            )
            return (await data.client.open_rank(request, timeout_s=REGISTRY_TIMEOUT_S)).session
        except FencedError:
            return None
        except (NoQuorumError, PeerError):
            await asyncio.sleep(RETRY_PAUSE_S)


async def load(data: Data, job: str, rank: int, world_size: int) -> int:
    """Bring a rank's newest committed step here; returns its number, -1 when there is none."""
    while True:
        floor = data.truth.floor(job)
        try:
            request = rpb.LookupRequest(job=job, rank=rank)
            response = await data.client.lookup(request, timeout_s=REGISTRY_TIMEOUT_S)
        except (NoQuorumError, PeerError):
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        data.truth.answered(job, floor, response)
        if not response.HasField("record"):
            return -1
        step = response.record.step
        if await _bring(data, job, step, response.record.ranks[0]):
            data.truth.loads += 1
            data.truth.note(f"load {job}/{step} rank {rank} at {data.machine.name}")
            return step
        data.truth.note(f"load {job}/{step} rank {rank} at {data.machine.name}: not now")
        await asyncio.sleep(RETRY_PAUSE_S)


async def _bring(data: Data, job: str, step: int, record: rpb.RankRecord) -> bool:
    try:
        view = await data.client.view(REGISTRY_TIMEOUT_S)
    except FastCheckdError:
        view = data.view.view
    nodes = {node.node_id: node for node in view.nodes}
    name = data.machine.name
    found: list[tuple[int, bytes]] = []
    for plan in plan_fetch(record, nodes, name):
        key = (job, step, record.rank, plan.record.shard)
        digest = plan.record.digest
        local = data.find(key, digest)
        if local is not None and not local.intact:
            data.condemn(key, digest)
            local = None
        if local is None:
            sources = [*plan.sources, *other_sources(plan, nodes, name)]
            for source in sources:
                if await data.pull(source.data_address, FetchRequest(key, digest)):
                    break
            else:
                return False
        found.append((plan.record.shard, digest))
    for number, digest in found:
        data.keep((OWNER, job, step, record.rank, number), digest, record.session)
    return True
