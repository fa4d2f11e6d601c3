"""What one rank saved of a step: its header, its records, and where the bytes lie that these name.

Of a state that all ranks hold alike each rank saved a part (docs/replicated.md). The header has places in the whole,
and the bytes are in the states of all ranks.
"""

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
from .state.header import Path, materialize, parse
from .state.records import ByteRange, StateBytes


@dataclass(frozen=True, eq=False)
class SavedRank:
    """What one rank saved of a step: its header, and where the bytes lie that the header names."""

    rank: int
    state_bytes: int
    #: Set if its state is a part of one that all ranks hold alike (docs/replicated.md).
    shared: common_pb2.SharedPart | None
    _header: bytes
    step: int
    #: Of a shared state: the parts, as if all ranks' states lay one after the other.
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

    @cached_property
    def records(self) -> Mapping[Path, state_pb2.TensorRecord]:
        """The records of its tensors, by their paths; needed only for DTensors."""
        found: dict[Path, state_pb2.TensorRecord] = {}
        nothing = torch.empty(0)

        def note(index: int, path: Path) -> torch.Tensor:
            found[path] = self.header.tensors[index]
            return nothing

        materialize(self.header.root, note, ())
        return found

    def locate(self, ranges: Iterable[ByteRange]) -> dict[int, list[ByteRange]]:
        """By rank, in that rank's state: the bytes at these places of the header."""
        if self.shared is None:
            return {self.rank: list(ranges)}
        found: dict[int, list[ByteRange]] = {}
        for each in ranges:
            part = self._part(each.offset, each.bytes)
            within = each.offset - self._parts[part].offset
            found.setdefault(part, []).append(ByteRange(within, each.bytes))
        return found

    def bytes_in(self, states: Mapping[int, torch.Tensor]) -> StateBytes:
        """The bytes read, by places of the header."""
        return states[self.rank] if self.shared is None else _PartsOf(self, states)

    def _part(self, offset: int, size: int) -> int:
        """The rank whose state has all of these bytes: no piece of a tensor lies in two ranks' states."""
        parts = self._parts
        number = bisect_right(parts, offset, key=lambda part: part.offset) - 1
        if number < 0 or offset + size > parts[number].offset + parts[number].bytes:
            raise CorruptError(f"bytes {offset} to {offset + size} of a shared state lie in no part of it")
        return number


@dataclass(frozen=True)
class _PartsOf:
    """The bytes of a shared state, by places in all ranks' states together."""

    rank: SavedRank
    states: Mapping[int, torch.Tensor]

    def __getitem__(self, where: slice) -> torch.Tensor:
        ((part, (found,)),) = self.rank.locate([ByteRange(where.start, where.stop - where.start)]).items()
        return self.states[part][found.offset : found.offset + found.bytes]


def saved_ranks(ready: pb.ReadReady, headers: Mapping[int, bytes]) -> dict[int, SavedRank]:
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
        rank.rank: SavedRank(
            rank.rank,
            rank.state_bytes,
            rank.shared if rank.HasField("shared") else None,
            headers[rank.rank],
            ready.step,
            parts,
        )
        for rank in ready.ranks
    }
