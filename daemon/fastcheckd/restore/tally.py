"""How far one load is, and where its bytes came from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..store.segments import Segment

#: The rate is that of the last so many looks.
_LOOKS = 8


@dataclass
class Tally:
    """Of one load. Bytes from elsewhere are counted by one thread at a time, all else on the event loop."""

    clock: Callable[[], float] = time.monotonic
    total_bytes: int = 0
    #: From this node's own memory.
    local_bytes: int = 0
    #: From other nodes, as they come; what came bad or twice is not among them.
    fetched_bytes: int = 0
    #: Copies that were found bad or gone.
    bad_copies: int = 0
    holders: set[str] = field(default_factory=set)
    #: Where the bytes will probably be, as soon as that is known.
    segment: Segment | None = None
    #: What is said of a shard there, if it is there already.
    here: pb.ShardManifest | None = None
    _looks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    def came(self, node_id: str, count: int) -> None:
        """Good bytes came from a node."""
        self.fetched_bytes += count
        self.holders.add(node_id)

    def expect(self, segment: Segment | None, here: pb.ShardManifest | None = None) -> None:
        """The bytes will probably be in this segment; `here`: they are, though perhaps not good."""
        self.segment, self.here = segment, here

    def where(self) -> tpb.LoadSegment | None:
        """Where the bytes will probably be, and where in them the header is, as far as that is known."""
        if self.segment is None:
            return None
        found = tpb.LoadSegment(
            segment=tpb.SegmentRef(path=str(self.segment.path), bytes=self.segment.size_bytes)
        )
        if self.here is not None:
            found.state_bytes = self.here.state_bytes
            found.header_offset, found.header_bytes = self.here.header_offset, self.here.header_bytes
        return found

    def begin(self, total_bytes: int) -> None:
        """A step's bytes are to be brought. Where an earlier one turned out to be incomplete, it begins anew."""
        self.total_bytes, self.local_bytes, self.fetched_bytes = total_bytes, 0, 0
        self._looks.clear()

    def look(self) -> tpb.LoadProgress:
        """How far it is, with the rate since a few looks ago."""
        now, done = self.clock(), self.local_bytes + self.fetched_bytes
        then, before = self._looks[0] if self._looks else (now, done)
        self._looks.append((now, done))
        return tpb.LoadProgress(
            bytes_done=done,
            bytes_total=self.total_bytes,
            bytes_per_s=max(0, done - before) / (now - then) if now > then else 0.0,
            holders=len(self.holders),
        )
