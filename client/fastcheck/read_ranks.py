"""What one rank saved of a step that is read in parts: its header, and where the bytes lie that it speaks of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fastcheck_proto.v1 import common_pb2, state_pb2
from fastcheck_proto.v1 import trainer_pb2 as pb

from .errors import CorruptError
from .replicated.whole import parse_shared
from .state.header import parse
from .state.records import ByteRange, StateBytes


@dataclass(frozen=True, eq=False)
class ReadRank:
    """One rank of a step."""

    rank: int
    state_bytes: int
    #: Set if its state is a part of one that all ranks hold alike (docs/replicated.md).
    shared: common_pb2.SharedPart | None
    _header: bytes
    step: int
    #: Of a shared state: all ranks' states as if they lay one after the other.
    _parts: Sequence[pb.LoadedPart]

    @cached_property
    def header(self) -> state_pb2.StateHeader:
        """Parsed and checked when first asked for.

        Places of tensors are those in the rank's state. Of a shared state they are those in all ranks' states, one
        after the other: `locate` says which bytes of which rank that is.

        Raises:
            CorruptError: it is damaged, or of a version that is not known here.
        """
        if self.shared is None:
            return parse(self._header, self.state_bytes)
        return parse_shared(
            self._header, pb.LoadReady(step=self.step, parts=self._parts, header_rank=self.rank)
        )

    def locate(self, ranges: Iterable[ByteRange]) -> dict[int, list[ByteRange]]:
        """By rank, in its state: the bytes that lie at these places of the header's."""
        if self.shared is None:
            return {self.rank: list(ranges)}
        found: dict[int, list[ByteRange]] = {}
        for each in ranges:
            part = self._part(each.offset, each.bytes)
            within = each.offset - self._parts[part].offset
            found.setdefault(part, []).append(ByteRange(within, each.bytes))
        return found

    def bytes_in(self, states: Mapping[int, torch.Tensor]) -> StateBytes:
        """What was read, by the header's places."""
        return states[self.rank] if self.shared is None else _PartsOf(self, states)

    def _part(self, offset: int, size: int) -> int:
        """The rank whose state has all of these bytes: no piece of a tensor lies in two."""
        parts = self._parts
        number = bisect_right(parts, offset, key=lambda part: part.offset) - 1
        if number < 0 or offset + size > parts[number].offset + parts[number].bytes:
            raise CorruptError(f"bytes {offset} to {offset + size} of a shared state lie in no part of it")
        return number


@dataclass(frozen=True)
class _PartsOf:
    """The bytes of all ranks' states, by places in all of them."""

    rank: ReadRank
    states: Mapping[int, torch.Tensor]

    def __getitem__(self, where: slice) -> torch.Tensor:
        ((part, (found,)),) = self.rank.locate([ByteRange(where.start, where.stop - where.start)]).items()
        return self.states[part][found.offset : found.offset + found.bytes]


def ranks_of(ready: pb.ReadReady, headers: Mapping[int, bytes]) -> dict[int, ReadRank]:
    """All ranks of a step, from an answer about all of them.

    Raises:
        CorruptError: some ranks' states are parts of a shared one, and others are not.
    """
    shared = {rank.HasField("shared") for rank in ready.ranks}
    if len(shared) > 1:
        raise CorruptError(f"only some ranks of step {ready.step} have a part of a shared state")
    # Where the answer's segment had them.
    parts = [
        pb.LoadedPart(offset=rank.offset, bytes=rank.state_bytes, shared=rank.shared) for rank in ready.ranks
    ]
    return {
        rank.rank: ReadRank(
            rank.rank,
            rank.state_bytes,
            rank.shared if rank.HasField("shared") else None,
            headers[rank.rank],
            ready.step,
            parts,
        )
        for rank in ready.ranks
    }
