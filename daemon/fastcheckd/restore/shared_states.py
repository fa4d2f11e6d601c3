"""A state that all ranks hold alike, brought together from the parts that each of them saved (docs/replicated.md).

All parts go into one segment, one rank's after the other's. It belongs to nobody's rank: several loads of the step, by
ranks of this node, read the same one, and the last of them lets it go. Nothing in it is published: the node would
otherwise keep the whole state in addition to its own parts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..store.replica_store import ReplicaStore
from ..store.segments import PAGE_BYTES, Segment
from ..tasks import settled, to_its_end


class Bytes(Protocol):
    """Memory that a rank's state is brought into: a segment, or a window of one."""

    @property
    def view(self) -> memoryview:
        """All of it, writable."""
        ...


@dataclass(frozen=True)
class Window:
    """A stretch of a segment."""

    view: memoryview


@dataclass(frozen=True)
class SharedPlace:
    """Where one rank's state lies in the whole's segment, and its header in there."""

    offset: int
    bytes: int
    shared: pb.SharedPart


#: Brings one rank's state into memory and returns the manifest of one of its shards.
Bring = Callable[[rpb.RankRecord, Bytes], Awaitable[pb.ShardManifest]]


def is_in_parts(record: rpb.StepRecord) -> bool:
    """Whether a step's ranks saved parts of one state."""
    return any(rank.HasField("shared") for rank in record.ranks)


def places(ranks: Sequence[rpb.RankRecord]) -> list[SharedPlace]:
    """One rank's state after the other's, by rank, each at a page's start."""
    found = []
    offset = 0
    for rank in ranks:
        found.append(SharedPlace(offset, rank.state_bytes, rank.shared))
        offset += -(-rank.state_bytes // PAGE_BYTES) * PAGE_BYTES
    return found


@dataclass(eq=False)
class Whole:
    """All parts of a step, for as long as somebody reads them."""

    segment: Segment
    places: list[SharedPlace]
    key: tuple[str, int, bytes]
    #: Of each rank, one manifest: it says where the rank's header lies.
    manifests: list[pb.ShardManifest] = field(default_factory=list)
    readers: int = 0

    def ready(self, rank: int) -> tpb.LoadReady:
        """What a load by `rank` is told of it: its own header if it has a part, else that of rank 0."""
        header_rank = rank if rank < len(self.places) else 0
        place, manifest = self.places[header_rank], self.manifests[header_rank]
        last = self.places[-1]
        return tpb.LoadReady(
            segment=tpb.SegmentRef(path=str(self.segment.path), bytes=self.segment.size_bytes),
            state_bytes=last.offset + last.bytes,
            header_offset=place.offset + manifest.header_offset,
            header_bytes=manifest.header_bytes,
            parts=[tpb.LoadedPart(offset=p.offset, bytes=p.bytes, shared=p.shared) for p in self.places],
            header_rank=header_rank,
        )


class SharedStates:
    """The whole states that somebody reads at present. Owned by the event loop's thread."""

    def __init__(self, store: ReplicaStore) -> None:
        self._store = store
        #: By job, for as long as somebody holds or awaits one.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._wholes: dict[tuple[str, int, bytes], Whole] = {}

    async def take(self, record: rpb.StepRecord, bring: Bring) -> Whole:
        """The step's parts in one segment until `let_go`; brought here if nobody reads them yet.

        Raises:
            LostError: a part cannot be had.
            OverBudgetError, StoreFullError: there is no room for the whole state.
        """
        digests = hashlib.sha256(b"".join(shard.digest for rank in record.ranks for shard in rank.shards))
        key = (record.job, record.step, digests.digest())
        async with self._locks.setdefault(record.job, asyncio.Lock()):
            found = self._wholes.get(key)
            if found is None:
                found = await self._bring_together(key, record, bring)
                self._wholes[key] = found
            found.readers += 1
        return found

    def let_go(self, found: Whole) -> None:
        """One reader less; the last one's end is the segment's."""
        found.readers -= 1
        if not found.readers:
            del self._wholes[found.key]
            self._store.discard(found.segment)

    async def _bring_together(
        self, key: tuple[str, int, bytes], record: rpb.StepRecord, bring: Bring
    ) -> Whole:
        ranks = sorted(record.ranks, key=lambda rank: rank.rank)
        where = places(ranks)
        size = where[-1].offset + where[-1].bytes
        segment = await to_its_end(
            partial(self._store.allocate_new, size, f"gathered.{record.job}"), undo=self._store.discard
        )
        bringing = [
            asyncio.ensure_future(
                bring(rank, Window(segment.view[place.offset : place.offset + place.bytes]))
            )
            for rank, place in zip(ranks, where, strict=True)
        ]
        try:
            return Whole(segment, where, key, list(await asyncio.gather(*bringing)))
        except BaseException:
            # One that failed, or a caller that is gone, ends all, and only then is the segment given back.
            for task in bringing:
                task.cancel()
            await settled(bringing)
            self._store.discard(segment)
            raise
