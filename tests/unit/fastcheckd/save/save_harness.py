"""A node that saves and nodes that hold, all real, and a registry that answers what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.unit.fastcheckd.transfer import transfer_harness
from tests.unit.fastcheckd.transfer.transfer_harness import EPOCH

from fastcheck_proto.conventions import LAYOUT_SCHEMA
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import layout_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.counters import Counters
from fastcheckd.durations import DATA, Durations
from fastcheckd.errors import NoQuorumError, PlacementError, from_code
from fastcheckd.save.coordinator import SaveCoordinator
from fastcheckd.save.replicator import Replicator
from fastcheckd.save.save import Save, SaveKey
from fastcheckd.save.session import TrainerSession
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import Segment
from fastcheckd.transfer.lane_meter import LaneMeter
from fastcheckd.transfer.policy import ReplicationPolicy
from fastcheckd.transfer.replication_pacing import ReplicationPacing
from fastcheckd.view import ViewFollower

CHUNK = 64 << 10
BUDGET = 32 << 20
DEADLINE_S = 20.0


class Registry:
    """Places on the holders that it was told of, one shard for each, and commits."""

    def __init__(self, holders: list[pb.Holder]) -> None:
        self.holders = holders
        self.tolerate = 1
        #: Steps that nobody can hold at present.
        self.unplaceable: set[int] = set()
        #: Answers to the next reports; then everything is committed.
        self.answers: list[rpb.ReportResponse | Exception] = []
        self.reports: list[rpb.ReportRequest] = []
        #: There is no quorum: nothing is answered.
        self.silent = False
        #: Some other rank is not there yet; these have not even begun the step.
        self.waiting = False
        self.absent: list[int] = []
        #: Of every rank.
        self.session = 1
        #: What was asked to be ruled out.
        self.superseded: list[rpb.SupersedeRequest] = []

    async def place(self, request, timeout_s):
        self._answer()
        if request.step in self.unplaceable:
            raise PlacementError("nobody is left")
        able = [h for h in self.holders if h.node.node_id not in request.avoid] or self.holders
        shards = [
            rpb.ShardPlacement(
                shard=index, holders=[able[(index + copy) % len(able)] for copy in range(self.tolerate)]
            )
            for index in range(len(able))
        ]
        return rpb.PlaceResponse(epoch=EPOCH, shards=shards)

    async def report(self, request, timeout_s):
        self._answer()
        self.reports.append(request)
        if self.waiting:
            await asyncio.sleep(0.02)
            return rpb.ReportResponse(state=rpb.REPORT_STATE_WAITING, absent_ranks=self.absent)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer or rpb.ReportResponse(state=rpb.REPORT_STATE_COMMITTED)

    async def open_rank(self, request, timeout_s):
        self._answer()
        return rpb.OpenRankResponse(session=self.session, current=self.session)

    async def current_session(self, request, timeout_s):
        self._answer()
        return self.session

    async def supersede(self, request, timeout_s):
        self._answer()
        self.superseded.append(request)
        return rpb.SupersedeResponse(kept_steps=[1])

    def _answer(self):
        if self.silent:
            raise NoQuorumError("no leader")


class Node:
    """The saving side of a data process, and the trainers that it has."""

    def __init__(
        self, coordinator: SaveCoordinator, store: ReplicaStore, counters: Counters, registry: Registry
    ) -> None:
        self.coordinator = coordinator
        self.store = store
        self.counters = counters
        self.registry = registry
        self.sessions: dict[tuple[str, int, int], TrainerSession] = {}

    async def session(
        self, job: str = "gpt", rank: int = 0, number: int = 1, **more: object
    ) -> TrainerSession:
        """A trainer's session, opened at its first use."""
        if (job, rank, number) not in self.sessions:
            self.registry.session = number
            more = {"world_size": 2, "client_id": f"c{number}", **more}
            asked = tpb.OpenSession(job=job, rank=rank, **more)
            self.sessions[job, rank, number] = await self.coordinator.sessions.open(asked)
        return self.sessions[job, rank, number]

    async def segment(
        self, session: TrainerSession, state_bytes: int, step: int | None = None
    ) -> tuple[str, Segment]:
        """A segment that the trainer may fill, waited for if it has none; raises what it is refused with."""
        while True:
            for segment_id, segment in list(session.held.items()):
                if segment.size_bytes >= state_bytes:
                    return segment_id, segment
                self.coordinator.abandon(session, segment_id)
            self.coordinator.reserve(session, tpb.ReserveMemory(state_bytes=state_bytes, step=step))
            assert session.reserving is not None
            await asyncio.wait({session.reserving})
            refused(session, step)

    async def stage(
        self,
        step: int,
        state: bytes,
        layout: layout_pb2.StateLayout | None = None,
        rank: int = 0,
        job: str = "gpt",
        session: int = 1,
    ) -> Save:
        """What a trainer does: take a segment, fill it, seal it."""
        stream = await self.session(job, rank, session)
        began_s = time.monotonic()
        segment_id, segment = await self.segment(stream, len(state), step)
        segment.view[: len(state)] = state
        sealed = tpb.Sealed(
            segment_id=segment_id,
            step=step,
            state_bytes=len(state),
            header_offset=len(state) - 10,
            header_bytes=10,
            layout=layout,
            begun_s=began_s,
        )
        return await self.seal(stream, sealed)

    async def seal(self, stream: TrainerSession, sealed: tpb.Sealed) -> Save:
        """Seal a segment; raises what it is refused with."""
        await self.coordinator.sealed(stream, sealed)
        refused(stream, sealed.step)
        return await self.coordinator.find(SaveKey(stream.job, stream.rank, sealed.step), stream.number)

    async def save(
        self, step: int, state: bytes, layout: layout_pb2.StateLayout | None = None, job: str = "gpt"
    ) -> Save:
        """Stage it and wait for the commit."""
        save = await self.stage(step, state, layout, job=job)
        await self.done(save)
        return save

    async def done(self, save: Save) -> None:
        """Wait for its end; raises what it failed with."""
        async with asyncio.timeout(DEADLINE_S):
            await save.until_done()
        if save.error is not None:
            raise save.error


def refused(session: TrainerSession, step: int | None) -> None:
    """Raise what the trainer was told of a step, if it was refused."""
    message = session._outbox.pop(("refused", session.number, step), None)
    if message is not None:
        raise from_code(message.refused.error.code, message.refused.error.message)


@contextlib.asynccontextmanager
async def running_node(directory: Path, registry: Registry, **settings: object) -> AsyncIterator[Node]:
    """A node over a RAM directory; the next one over the same directory is the next life of this one."""
    chosen = {"codec": "always", "ram_budget_bytes": BUDGET, "quarantine_s": 0.1, **settings}
    running = transfer_harness.running_node(
        directory,
        "owner",
        budget_bytes=BUDGET,
        job_budget_bytes=int(settings.get("job_budget_bytes", 0)),  # type: ignore[call-overload]
        codec=str(chosen["codec"]),
        settings=chosen,
    )
    async with running as there:
        config, identity, counters = there.config, there.identity, there.counters
        view = ViewFollower(registry, identity)  # type: ignore[arg-type]
        common = {"config": config, "identity": identity, "store": there.store, "registry": registry}
        pacing = ReplicationPacing(
            cap_bytes_per_s=0, interface="", restoring=lambda: False, meter=LaneMeter(), counters=counters,
            chunk_bytes=CHUNK, transfer_timeout_s=config.transfer_timeout_s,
        )  # fmt: skip
        replicator = Replicator(
            **common, client=there.client, view=view, counters=counters, codec=there.pool,
            encoders=there.encoders, policy=ReplicationPolicy(config.codec, config.codec_threads), pacing=pacing,
        )  # fmt: skip
        coordinator = SaveCoordinator(
            **common, view=view, counters=counters, durations=Durations(DATA), replicator=replicator
        )
        try:
            yield Node(coordinator, there.store, counters, registry)
        finally:
            await coordinator.stop()


@contextlib.asynccontextmanager
async def running_world(
    directory: Path, holders: int = 2, holders_job_budget_bytes: int = 0, **settings: object
) -> AsyncIterator[tuple[Node, Registry, list[transfer_harness.Node]]]:
    """A node and its holders `node-1`, `node-2`, ..."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        refs = []
        for index in range(1, holders + 1):
            holder = await stack.enter_async_context(
                transfer_harness.running_node(
                    directory, f"node-{index}", job_budget_bytes=holders_job_budget_bytes
                )
            )
            found.append(holder)
            refs.append(holder.ref())
        registry = Registry(refs)
        node = await stack.enter_async_context(running_node(directory, registry, **settings))
        yield node, registry, found


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that no codec makes smaller."""
    return random.Random(seed).randbytes(size)


def next_step(state: bytes, at: int = 0) -> bytes:
    """The state with one byte changed."""
    changed = bytearray(state)
    changed[at] ^= 1
    return bytes(changed)


def layout_of(*lengths: int, precision: layout_pb2.Precision | None = None) -> layout_pb2.StateLayout:
    """Chunks of these lengths, bytes without meaning."""
    chunks = [layout_pb2.ChunkLayout(bytes=length) for length in lengths]
    return layout_pb2.StateLayout(schema=LAYOUT_SCHEMA, chunks=chunks, precision=precision)
