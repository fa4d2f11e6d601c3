"""The shards of a save under way: which bytes, how they are sent, and who has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastcheck_proto.v1 import common_pb2 as pb

from ..chunks import ChunkTable
from ..codec.chunk_plan import ChunkPlan
from ..digests import DIGEST_BYTES, chunk_digest, shard_digest
from ..store.replica import Replica
from ..store.replica_store import OpenReplica
from ..store.reverse_deltas import ReverseDeltas
from ..tasks import spread
from ..transfer.outgoing import OutgoingShard
from .content import Quantise


@dataclass(frozen=True)
class Copy:
    """A copy that its holder acknowledged."""

    holder: pb.Holder
    #: Payload bytes that came over the lane for it.
    received_bytes: int
    codecs: tuple[pb.CodecUse, ...]

    @property
    def node(self) -> pb.NodeRef:
        """The incarnation that holds it."""
        return self.holder.node


@dataclass(eq=False)
class Shard:
    """One shard of the save and the copies of it that are acknowledged."""

    manifest: pb.ShardManifest
    #: What each of its chunks consists of.
    plans: tuple[ChunkPlan, ...]
    table: ChunkTable
    #: The owner's newest older step of it that is cut alike and lies here as it is.
    base: Replica | None = None
    #: The owner's own copy, once it is published.
    own: Replica | None = None
    outgoing: OutgoingShard | None = None
    #: Where memory is short: the base on its way to being kept as reverse deltas.
    deltas: ReverseDeltas | None = None
    #: By node id.
    acknowledged: dict[str, Copy] = field(default_factory=dict)
    #: An offer of it has failed.
    troubled: bool = False

    @property
    def index(self) -> int:
        """Its number within the rank's state."""
        return self.manifest.key.shard

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.manifest.bytes


def complete_digests(
    shard: Shard, view: memoryview, threads: int, quantise: Quantise | None, base: OpenReplica | None
) -> None:
    """Make a shard's bytes lossy if the trainer allowed it, hash its chunks, and enter the digests in its manifest.

    Blocks, on so many threads.

    Args:
        view: the shard's staged bytes.
        quantise: what makes a chunk lossy, against the base's if there is one.
    """
    digests = bytearray(DIGEST_BYTES * len(shard.table))

    def work(index: int) -> None:
        start, stop = shard.table.range(index)
        with view[start:stop] as chunk:
            if quantise is not None:
                if base is None:
                    quantise(chunk, None, shard.plans[index])
                else:
                    with base.chunk(index) as older:
                        quantise(chunk, older, shard.plans[index])
            digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)] = chunk_digest(chunk)

    spread(range(len(shard.table)), threads, work)
    shard.manifest.chunk_digests = bytes(digests)
    shard.manifest.digest = shard_digest(shard.manifest.chunk_digests)


def uses_per_copy(shards: Iterable[Shard], copies: int) -> list[pb.CodecUse]:
    """What each codec did, by name, over all acknowledged copies and divided by their number."""
    raw: Counter[str] = Counter()
    encoded: Counter[str] = Counter()
    for shard in shards:
        for copy in shard.acknowledged.values():
            for use in copy.codecs:
                raw[use.codec] += use.raw_bytes
                encoded[use.codec] += use.encoded_bytes
    return [
        pb.CodecUse(codec=codec, raw_bytes=raw[codec] // copies, encoded_bytes=encoded[codec] // copies)
        for codec in sorted(raw)
    ]
