"""The header of a shared state whose parts lie in one segment: its places turned into those in the segment. Pure.

As untrusted as any header: what does not fit the parts that the daemon brought is refused before it is used.
"""

from __future__ import annotations

from bisect import bisect_right

from fastcheck_proto.v1 import state_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb

from ..errors import CorruptError
from ..state.header import SHARED_SCHEMA, parse


def parse_shared(data: bytes, ready: pb.LoadReady) -> state_pb2.StateHeader:
    """Parse and check the header of one part; places of tensors are then those in the segment with all parts.

    Raises:
        CorruptError: it is no such header, or the parts are not those that it speaks of.
    """
    if ready.header_rank >= len(ready.parts):
        raise CorruptError(f"step {ready.step} came with {len(ready.parts)} parts and the header of another")
    mine = ready.parts[ready.header_rank]
    whole_bytes = mine.shared.shared_bytes
    header = parse(data, whole_bytes + mine.bytes, SHARED_SCHEMA)
    cuts = [part.shared.start for part in ready.parts] + [ready.parts[-1].shared.stop]
    fits = all(
        part.shared.stop == stop and part.shared.stop - part.shared.start <= part.bytes
        for part, stop in zip(ready.parts, cuts[1:], strict=True)
    )
    if not fits or list(header.shared.cuts) != cuts or cuts[0] or cuts[-1] != whole_bytes:
        raise CorruptError(
            f"step {ready.step}: the parts that came do not make the state that its header describes"
        )
    places = _Places(ready, cuts)
    for record in header.tensors:
        if not record.bytes:
            record.offset = 0
            continue
        size = record.piece_bytes or record.bytes
        offsets = list(record.piece_offsets) or [record.offset]
        moved = [
            places.of(record.name, offset, min(size, record.bytes - number * size))
            for number, offset in enumerate(offsets)
        ]
        record.offset = moved[0]
        if record.piece_offsets:
            record.piece_offsets[:] = moved
    return header


class _Places:
    def __init__(self, ready: pb.LoadReady, cuts: list[int]) -> None:
        self._ready = ready
        self._cuts = cuts

    def of(self, name: str, offset: int, size: int) -> int:
        """Where bytes of the whole, or of this rank's own behind it, lie in the segment."""
        parts, cuts = self._ready.parts, self._cuts
        if offset >= cuts[-1]:
            part = parts[self._ready.header_rank]
            within = part.shared.stop - part.shared.start + offset - cuts[-1]
            end = part.bytes
        else:
            number = bisect_right(cuts, offset) - 1
            part = parts[number]
            within = offset - cuts[number]
            end = cuts[number + 1] - cuts[number]
        if within + size > end:
            raise CorruptError(f"tensor {name[:200]!r} of step {self._ready.step} reaches beyond its part")
        return part.offset + within
