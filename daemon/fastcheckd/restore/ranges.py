"""What a read asks for: checked, placed in a segment, and turned into chunks of shards. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastcheck_proto.conventions import RANK_MAX
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..chunks import ChunkTable
from ..errors import InvalidRequestError
from ..store.segments import PAGE_BYTES
from ..transfer.scheduler import WantedChunks

#: In one request: each costs some microseconds, and its chunks at most once.
RANGES_MAX = 1 << 18
#: Of the states of all asked ranks together: a mapping of them must fit into an address space, the trainer's too.
LENGTH_BYTES_MAX = 1 << 45


@dataclass(frozen=True)
class Want:
    """What is asked for of one rank, and where its state begins in the segment."""

    record: rpb.RankRecord
    offset: int
    #: Bytes of its state, rising, none empty, none overlapping.
    ranges: tuple[range, ...]
    header: bool

    def shards(self) -> list[rpb.ShardRecord]:
        """Those that its ranges touch; for a header alone the last, where it lies."""
        found = [shard for shard in self.record.shards if _overlapping(self.ranges, shard)]
        return found or [max(self.record.shards, key=lambda shard: shard.offset)]


@dataclass(frozen=True)
class Marked:
    """Chunks that are to be brought for one rank, by shard, and where its header lies in its state."""

    want: Want
    header: range
    parts: Mapping[int, WantedChunks]

    def stretches(self) -> list[range]:
        """Bytes of the segment that will be written."""
        offsets = {shard.shard: self.want.offset + shard.offset for shard in self.want.record.shards}
        return [
            range(offsets[number] + start, offsets[number] + stop)
            for number, part in self.parts.items()
            for start, stop in map(part.table.range, part.chunks)
        ]

    def places(self) -> list[range]:
        """Bytes of the segment that were asked for, in the order in which they are sent: the header last."""
        asked = [*self.want.ranges, *([self.header] if self.want.header and self.header else [])]
        return [range(self.want.offset + each.start, self.want.offset + each.stop) for each in asked]


def check_request(request: tpb.ReadRequest) -> None:
    """All that can be told before the step is known.

    Raises:
        InvalidRequestError: too much is asked for at once, a rank twice, or ranges that are empty or out of order.
    """
    count = sum(len(rank.ranges) for rank in request.ranks)
    if count > RANGES_MAX:
        raise InvalidRequestError(f"{count} ranges are more than {RANGES_MAX}: ask for some at a time")
    if len(request.ranks) > RANK_MAX or len({rank.rank for rank in request.ranks}) < len(request.ranks):
        raise InvalidRequestError("each rank may be asked for once: put all its ranges together")
    for rank in request.ranks:
        if any(not each.bytes for each in rank.ranges):
            raise InvalidRequestError(f"a range of rank {rank.rank} is empty: leave it out")
        if any(a.offset + a.bytes > b.offset for a, b in pairwise(rank.ranges)):
            raise InvalidRequestError(
                f"ranges of rank {rank.rank} overlap or are not in order: sort and merge them"
            )


def wants(request: tpb.ReadRequest, step: rpb.StepRecord) -> list[Want]:
    """What a checked request asks for of a step, rank after rank in the segment, each at a page's start.

    Raises:
        InvalidRequestError: there is no such rank, a range is not within its state, or all are too long together.
    """
    records = {record.rank: record for record in step.ranks}
    asked = list(request.ranks) or [tpb.RankRead(rank=rank, header=True) for rank in sorted(records)]
    found: list[Want] = []
    offset = 0
    for each in asked:
        record = records.get(each.rank)
        if record is None:
            raise InvalidRequestError(
                f"step {step.step} of job {step.job!r} has no rank {each.rank}: it was saved by {step.world_size}"
            )
        ranges = tuple(range(one.offset, one.offset + one.bytes) for one in each.ranges)
        if ranges and ranges[-1].stop > record.state_bytes:
            raise InvalidRequestError(
                f"a range ends at {ranges[-1].stop}, the state of rank {each.rank} in step {step.step} at "
                f"{record.state_bytes}: take places from its header"
            )
        found.append(Want(record, offset, ranges, each.header))
        offset += -(-record.state_bytes // PAGE_BYTES) * PAGE_BYTES
    if offset > LENGTH_BYTES_MAX:
        raise InvalidRequestError(
            f"the states of {len(found)} ranks are {offset} bytes long together, more than {LENGTH_BYTES_MAX}: ask "
            "for fewer ranks at a time"
        )
    return found


def mark(want: Want, header: range, tables: Mapping[int, ChunkTable]) -> Marked:
    """The chunks that a rank's ranges touch, and its header if that is wanted; `tables` of the touched shards."""
    parts: dict[int, WantedChunks] = {}
    asked = [want.ranges, (header,)] if want.header and header else [want.ranges]
    for shard in want.record.shards:
        chunks: set[int] = set()
        for ranges in asked:
            for each in _overlapping(ranges, shard):
                low, high = max(0, each.start - shard.offset), min(shard.bytes, each.stop - shard.offset)
                chunks.update(tables[shard.shard].touched(low, high))
        if chunks:
            parts[shard.shard] = WantedChunks(tables[shard.shard], tuple(sorted(chunks)))
    return Marked(want, header, parts)


def header_of(manifest: pb.ShardManifest) -> range:
    """Where a rank's header lies in its state."""
    return range(manifest.header_offset, manifest.header_offset + manifest.header_bytes)


def shards_with(record: rpb.RankRecord, stretch: range) -> list[rpb.ShardRecord]:
    """Those that have some of these bytes of a rank's state."""
    return [shard for shard in record.shards if _overlapping((stretch,), shard)]


def _overlapping(ranges: Sequence[range], shard: rpb.ShardRecord) -> Sequence[range]:
    """Those of rising ranges, none empty, that have bytes of a shard."""
    low = bisect_right(ranges, shard.offset, key=lambda each: each.stop)
    high = bisect_left(ranges, shard.offset + shard.bytes, key=lambda each: each.start)
    return ranges[low:high]
