"""The shards of a save under way: which bytes, against which base, planned how, and who has them.

A base is the newest earlier step that this node still holds with the same chunks. It stays pinned while
shards are sent, so that neither retention nor a recycled segment takes it away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.chunk_plan import ChunkPlan
from ..codec.planner import Plan, Sent
from ..errors import NotHeldError
from ..store.ram_store import HeldShard, RamStore
from ..store.thinning import Thinning
from ..transfer.put_tally import PutOutcome
from ..transfer.shard_source import BaseSource, ShardSource
from .content import Quantise


@dataclass(frozen=True)
class Copy:
    """A copy that its holder acknowledged."""

    holder: pb.Holder
    outcome: PutOutcome
    #: From asking to acknowledgement, without the time that the trainer was waited for.
    seconds: float

    @property
    def node(self) -> pb.NodeRef:
        """The life that holds it."""
        return self.holder.node


@dataclass(eq=False)
class Shard:
    """One shard of the save and the copies of it that are acknowledged."""

    index: int
    offset: int
    bytes: int
    source: ShardSource
    manifest: pb.ShardManifest
    plan: Plan
    #: Copies acknowledged, by node id.
    acknowledged: dict[str, Copy] = field(default_factory=dict)
    #: On the way to keeping the base as a way back from this step.
    thinning: Thinning | None = None
    #: The owner's own copy is findable.
    published: bool = False
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: A put of it has failed.
    troubled: bool = False

    def sent(self) -> Sent | None:
        """How the sending went; None if it was not all one way."""
        copies = list(self.acknowledged.values())
        if self.troubled or not copies:
            return None
        return Sent(
            seconds=max(copy.seconds for copy in copies),
            sent_bytes=sum(copy.outcome.sent_bytes for copy in copies) // len(copies),
            send_s=max(copy.outcome.send_s for copy in copies),
            encode_s=self.source.encode_s,
            patched=all(copy.outcome.base_step is not None for copy in copies),
            fresh_memory=any(copy.outcome.fresh_memory for copy in copies),
        )


class Bases(contextlib.ExitStack):
    """Finds bases and keeps them pinned while inside."""

    def __init__(self, store: RamStore) -> None:
        super().__init__()
        self._store = store

    def find(self, key: pb.ShardKey, offset: int, table: ChunkTable) -> BaseSource | None:
        """The newest earlier step of a shard that lies here in full, cut alike, as this node's own."""
        held = [
            h
            for h in self._store.held(key.job)
            if h.kind == pb.REPLICA_KIND_OWNER
            and (h.key.rank, h.key.shard) == (key.rank, key.shard)
            and h.key.step < key.step
            and h.manifest.offset == offset
            and h.is_full
        ]
        for candidate in sorted(held, key=lambda h: -h.key.step):
            if ChunkTable.of(candidate.manifest) == table and (found := self._pin(candidate, table)):
                return found
        return None

    def _pin(self, held: HeldShard, table: ChunkTable) -> BaseSource | None:
        try:
            self.enter_context(self._store.pinned(held))
        except NotHeldError:
            return None  # retention was faster
        manifest = held.manifest
        return BaseSource(held.key.step, manifest.digest, manifest.chunk_digests, held.view, table)


class Preparation:
    """Makes a shard's staged bytes lossy, chunk by chunk, each once: that is seen to by `ShardSource`."""

    def __init__(
        self, quantise: Quantise, view: memoryview, plans: Sequence[ChunkPlan], base: BaseSource | None
    ) -> None:
        self._quantise = quantise
        self._view = view
        self._plans = plans
        self._table = ChunkTable([plan.bytes for plan in plans])
        self._base = base

    def __call__(self, index: int) -> None:
        """Turn one chunk into what its coding can say."""
        start, stop = self._table.range(index)
        base = None if self._base is None else self._base.view[start:stop]
        self._quantise(self._view[start:stop], base, self._plans[index])


def uses_per_copy(shards: Iterable[Shard], copies: int) -> list[pb.CodecUse]:
    """What each codec did, by name, over all acknowledged copies and divided by their number."""
    raw: Counter[str] = Counter()
    encoded: Counter[str] = Counter()
    for shard in shards:
        for copy in shard.acknowledged.values():
            for use in copy.outcome.uses:
                raw[use.codec] += use.raw_bytes
                encoded[use.codec] += use.encoded_bytes
    return [
        pb.CodecUse(codec=codec, raw_bytes=raw[codec] // copies, encoded_bytes=encoded[codec] // copies)
        for codec in sorted(raw)
    ]
