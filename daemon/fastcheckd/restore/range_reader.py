"""Parts of any ranks' states of a committed step, brought into one sparse segment (docs/reading.md).

Each read has a segment of its own: only the chunks that its ranges touch have memory in it. Nothing is published, no
seat is taken, and the segment is removed when whoever reads is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fastcheck_proto.conventions import STREAM_PIECE_BYTES
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..counters import Counters
from ..errors import LostError, OverBudgetError
from ..store.replica_store import ReplicaStore
from ..store.segments import Segment
from ..tasks import to_its_end
from .manifest_lookup import Description
from .plan import ShardPlan, plan_fetch
from .ranges import Marked, Want, check_request, header_of, mark, shards_with, wants
from .rank_loader import RankLoader
from .shard_loader import together
from .shared_states import Window
from .step_lookup import StepLookup
from .tally import Tally

#: Whose shards are asked for together. More would only wait for each other's connections.
RANKS_AT_ONCE = 8


@dataclass(frozen=True)
class Read:
    """Parts of states in local memory, which stay put until it is closed."""

    ready: tpb.ReadReady
    segment: Segment
    _marked: Sequence[Marked]
    _store: ReplicaStore

    def pieces(self) -> Iterator[bytes]:
        """The bytes that were asked for, one after the other, in pieces for a stream."""
        piece = bytearray()
        view = self.segment.view
        for place in (place for marked in self._marked for place in marked.places()):
            at = place.start
            while at < place.stop:
                stop = min(place.stop, at + STREAM_PIECE_BYTES - len(piece))
                piece += view[at:stop]
                at = stop
                if len(piece) == STREAM_PIECE_BYTES:
                    yield bytes(piece)
                    piece.clear()
        if piece:
            yield bytes(piece)

    def close(self) -> None:
        """Let go of the memory."""
        self._store.discard(self.segment)


class RangeReader:
    """All reads of one data process. Used on the event loop."""

    def __init__(
        self, config: Config, store: ReplicaStore, finder: StepLookup, bringer: RankLoader, counters: Counters
    ) -> None:
        self._config = config
        self._store = store
        self._finder = finder
        self._bringer = bringer
        self._counters = counters
        self._bringing = 0

    @property
    def bringing(self) -> bool:
        """Whether a read is under way whose bytes are not all here. May be asked from any thread."""
        return self._bringing > 0

    async def read(self, request: tpb.ReadRequest, tally: Tally) -> Read | None:
        """Bring what is asked for into local memory, which stays put until `Read.close`; `tally` follows it.

        None when no step was asked for by number and none is committed.

        Raises:
            InvalidRequestError: what is asked for does not exist, is malformed, or too much at once.
            StepGoneError: the asked-for step is not kept; the message lists what is.
            LostError: every copy of a chunk is bad or gone; the message names the other steps.
            OverBudgetError, StoreFullError: no room for the chunks that are touched.
            NoQuorumError: no registry answers.
        """
        started = time.monotonic()
        check_request(request)
        step = request.step if request.HasField("step") else None
        found = await self._finder.find_all_ranks(request.job, step)
        if found is None:
            return None
        record, kept = found
        asked = wants(request, record)
        self._bringing += 1
        try:
            segment, marked = await self._bring(record, asked, tally)
        except LostError as error:
            others = ", ".join(str(number) for number in kept if number != record.step)
            raise LostError(f"{error}. Other steps: {others or 'none'}") from None
        finally:
            self._bringing -= 1
        self._counters.add("reads")
        self._counters.add("read_bytes", tally.local_bytes + tally.fetched_bytes)
        ref = tpb.SegmentRef(path=str(segment.path), bytes=segment.length_bytes)
        ready = tpb.ReadReady(
            step=record.step,
            world_size=record.world_size,
            segment=None if request.by_stream else ref,
            ranks=[_rank_ready(each) for each in marked],
            lossy=any(rank.lossy for rank in record.ranks),
            local_bytes=tally.local_bytes,
            fetched_bytes=tally.fetched_bytes,
            holders=len(tally.holders),
            bad_copies=tally.bad_copies,
            read_s=time.monotonic() - started,
        )
        return Read(ready, segment, marked, self._store)

    async def _bring(
        self, step: rpb.StepRecord, asked: Sequence[Want], tally: Tally
    ) -> tuple[Segment, list[Marked]]:
        nodes = await self._bringer.nodes()
        marked = await together(
            [partial(self._mark, step, want, nodes) for want in asked], at_once=RANKS_AT_ONCE
        )
        segment = await self._reserve(step, marked)
        tally.begin(sum(part.bytes for each in marked for part in each.parts.values()))
        try:
            gathering = [partial(self._gather, step, each, segment, nodes, tally) for each in marked]
            await together(gathering, at_once=RANKS_AT_ONCE)
        except BaseException:
            self._store.discard(segment)
            raise
        return segment, marked

    async def _mark(self, step: rpb.StepRecord, want: Want, nodes: Mapping[str, rpb.NodeRecord]) -> Marked:
        """Learn how the touched shards are cut, and where the header lies."""
        plans = self._plans(want.record, nodes)

        async def describe(shards: Iterable[rpb.ShardRecord]) -> dict[int, Description]:
            numbers = [shard.shard for shard in shards]
            key = partial(pb.ShardKey, job=step.job, step=step.step, rank=want.record.rank)
            found = await together(
                [
                    partial(self._bringer.describer.describe, key(shard=n), want.record, plans[n], nodes)
                    for n in numbers
                ],
                at_once=RANKS_AT_ONCE,
            )
            return dict(zip(numbers, found, strict=True))

        described = await describe(want.shards())
        header = header_of(next(iter(described.values()))[0])
        if want.header:
            more = (shard for shard in shards_with(want.record, header) if shard.shard not in described)
            described |= await describe(more)
        return mark(want, header, {number: table for number, (_, table) in described.items()})

    async def _reserve(self, step: rpb.StepRecord, marked: Sequence[Marked]) -> Segment:
        """Memory for all chunks, before the first of them is asked for."""
        last = marked[-1].want
        length = last.offset + last.record.state_bytes
        stretches = [stretch for each in marked for stretch in each.stretches()]
        try:
            return await to_its_end(
                partial(self._store.allocate_sparse, length, stretches, step.job), undo=self._store.discard
            )
        except OverBudgetError as error:
            raise type(error)(
                f"no room for the parts of step {step.step} of job {step.job!r} that were asked for: {error}; or "
                "read less at a time"
            ) from None

    async def _gather(
        self,
        step: rpb.StepRecord,
        marked: Marked,
        segment: Segment,
        nodes: Mapping[str, rpb.NodeRecord],
        tally: Tally,
    ) -> None:
        want = marked.want
        plans = [plan for number, plan in self._plans(want.record, nodes).items() if number in marked.parts]
        into = Window(segment.view[want.offset : want.offset + want.record.state_bytes])
        await self._bringer.gather(
            step.job, step.step, want.record.rank, plans, into, nodes, tally, marked.parts
        )

    def _plans(self, record: rpb.RankRecord, nodes: Mapping[str, rpb.NodeRecord]) -> dict[int, ShardPlan]:
        return {plan.record.shard: plan for plan in plan_fetch(record, nodes, self._config.node_id)}


def _rank_ready(marked: Marked) -> tpb.RankReady:
    record = marked.want.record
    return tpb.RankReady(
        rank=record.rank,
        offset=marked.want.offset,
        state_bytes=record.state_bytes,
        header_offset=marked.header.start,
        header_bytes=len(marked.header),
        shared=record.shared if record.HasField("shared") else None,
    )
