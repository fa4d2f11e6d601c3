"""What a save's bytes are: cut into which chunks and shards, made of what, lossy, shared with other ranks. Pure.

A trainer says it when it seals; without a `StateLayout` the state is bytes without meaning. A step that an earlier
life of this process had staged brings its chunks and shards along in its manifests, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import layout_pb2
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..chunks import ChunkTable
from ..codec.chunk_plan import ChunkPlan, opaque, parse_layout
from ..codec.lossy import quantise
from ..errors import InvalidRequestError
from ..registry import commands, model, shared_state

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


def cut(lengths: Sequence[int], count: int) -> tuple[range, ...]:
    """The chunks of each shard: `count` stretches, ended at the chunk ends nearest to an even split.

    The registry says how many shards there are and who holds them; only the owner knows which bytes must stay
    together. It cuts at chunk ends, so that the parts of a unit never part. Equal chunks are cut alike, step after
    step: a shard can be encoded against the one before only if it is the same stretch.

    Args:
        lengths: size of each chunk in bytes, at least one, all above 0.
        count: shards wanted, above 0; with fewer chunks than that there are as many shards as chunks.

    No stretch is empty. Of two ends equally near the earlier one is taken.
    """
    ends = list(accumulate(lengths))
    count = min(count, len(ends))
    cuts = [0]
    for number in range(1, count):
        target = ends[-1] * number / count
        behind = bisect_left(ends, target)  # the first end at or behind the target
        before = behind - 1
        nearest = before if before >= 0 and target - ends[before] <= ends[behind] - target else behind
        # At least one chunk for this shard, and one for each that follows.
        cuts.append(min(max(nearest + 1, cuts[-1] + 1), len(ends) - (count - number)))
    return tuple(range(start, stop) for start, stop in pairwise([*cuts, len(ends)]))


@dataclass(frozen=True)
class SharedClaim:
    """A rank's part of a state that all ranks hold alike, and the digests that are compared with those of others."""

    part: pb.SharedPart
    digests: tuple[pb.PartDigest, ...]

    @classmethod
    def of(cls, sealed: tpb.Sealed, state_bytes: int) -> SharedClaim | None:
        """As the trainer says when it seals; None if the state is the rank's own.

        Raises:
            InvalidRequestError: the part does not lie in the rank's state, or the digests are none. The registry would
                refuse it after everything was sent.
        """
        if not sealed.HasField("shared"):
            return None
        claim = cls(sealed.shared, tuple(sealed.shared_digests))
        try:
            commands.check_shared_part(claim.part, state_bytes)
            shared_state.check_digests({each.part: each.digest for each in claim.digests})
        except model.MalformedError as error:
            raise InvalidRequestError(str(error)) from None
        return claim
