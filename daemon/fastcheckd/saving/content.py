"""What a save's bytes are: cut into which chunks, made of what, lossy or not. Pure.

A trainer says it with a `StateLayout`; without one the state is bytes without meaning. A step that an earlier
life of this process had staged brings its chunks and shards along in its manifests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import layout_pb2

from ..chunks import ChunkTable
from ..codec.chunk_plan import ChunkPlan, opaque, parse_layout
from ..codec.lossy import quantise
from .cut import cut

#: (chunk, the base's chunk if there is one, plan): turns a chunk into what its coding can say, in place.
Quantise: TypeAlias = Callable[[memoryview, memoryview | None, ChunkPlan], None]


@dataclass(frozen=True)
class Content:
    """The state's chunks, in order."""

    plans: tuple[ChunkPlan, ...]
    #: Whether manifests list the chunks; otherwise all have `chunk_bytes` but the last of a shard.
    listed: bool = False
    #: The trainer allowed a lossy coding.
    lossy: bool = False
    #: What makes the staged bytes lossy; None: nothing, or it has been done.
    quantise: Quantise | None = None
    #: Chunks of each shard, where that is settled already.
    shards: tuple[range, ...] | None = None

    def cut(self, count: int) -> tuple[range, ...]:
        """The chunks of each shard if `count` shards are wanted: a settled cut stays."""
        return self.shards or cut([plan.bytes for plan in self.plans], count)


#: Of a save that is over, or not sealed yet.
NOTHING = Content(())


def of_layout(layout: layout_pb2.StateLayout | None, state_bytes: int, chunk_bytes: int) -> Content:
    """As the trainer says; `chunk_bytes` is the size of chunks without meaning.

    Raises:
        InvalidRequestError: the layout is malformed.
    """
    plans = parse_layout(layout, state_bytes) if layout is not None else ()
    if not plans:
        lengths = ChunkTable.uniform(state_bytes, chunk_bytes).lengths
        return Content(tuple(opaque(length) for length in lengths))
    lossy = any(plan.precision is not None for plan in plans)
    return Content(plans, listed=True, lossy=lossy, quantise=quantise if lossy else None)


def of_manifests(manifests: Sequence[pb.ShardManifest]) -> Content:
    """As the manifests of all shards of a state say, in any order."""
    plans: list[ChunkPlan] = []
    shards = []
    for manifest in sorted(manifests, key=lambda m: m.offset):
        first = len(plans)
        plans += [opaque(length) for length in ChunkTable.of(manifest).lengths]
        shards.append(range(first, len(plans)))
    return Content(tuple(plans), listed=True, lossy=any(m.lossy for m in manifests), shards=tuple(shards))
