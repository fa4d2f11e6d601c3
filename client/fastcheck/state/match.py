"""Which of the caller's tensors belongs to which record, where a checkpoint's DTensors are laid out differently.

The same walk as that of a fill, and the same refusals, except for how tensors are cut. Nothing is filled, and no bytes
are needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import StateMismatchError, UnsupportedStateError
from .fill import FillPlan
from .header import Path, show
from .sharding import is_dtensor
from .tensors import why_unsupported


class Match(NamedTuple):
    """A record's path, and the caller's tensor whose layout it is to take."""

    path: Path
    like: torch.Tensor


class MatchPlan(FillPlan):
    """Matches of a header's records by index, in place of a fill."""

    matches_only = True

    def __init__(self, header: pb.StateHeader) -> None:
        super().__init__(header, torch.empty(0, dtype=torch.uint8))
        self.matches: dict[int, Match] = {}

    def claim(self, target: torch.Tensor, index: int, path: Path) -> bool:
        """Note a match, or what keeps the record from going there however it is cut."""
        if reason := why_unsupported(target):
            raise UnsupportedStateError(f"{show(path)} {reason}")
        record = self.header.tensors[index]
        if str(target.dtype) != f"torch.{record.dtype}":
            self.mismatch(path, f"has dtype {target.dtype} here, torch.{record.dtype} in the checkpoint")
            return False
        return self._match(target, index, path)

    def claim_like(self, parameter: torch.Tensor, index: int, path: Path, *, shaped: bool) -> None:
        """As `claim`, for a tensor that an optimizer will make, of any dtype."""
        if shaped or self.header.tensors[index].HasField("dtensor"):
            self._match(parameter, index, path)

    def _match(self, target: torch.Tensor, index: int, path: Path) -> bool:
        record = self.header.tensors[index]
        # A DTensor's shape is the global one.
        here, there = tuple(target.shape), whole_shape(record)
        if here != there:
            self.mismatch(path, f"has shape {here} here, {there} in the checkpoint, over all ranks")
            return False
        self.matches[index] = Match(path, target)
        return True


def whole_shape(record: pb.TensorRecord) -> tuple[int, ...]:
    """The shape of a saved tensor over all ranks."""
    return tuple(record.dtensor.global_shape if record.HasField("dtensor") else record.shape)


def match_records(state: object, header: pb.StateHeader) -> dict[int, Match]:
    """The matches of a header's records, by index. A record without one is made anew by the object that asks for it.

    Raises:
        UnsupportedStateError, StateMismatchError: as `fill`. Nothing was changed.
    """
    found = MatchPlan(header)
    try:
        found.check(state)
        for index, record in enumerate(header.tensors):
            if record.HasField("dtensor") and index not in found.matches:
                found.mismatches.append(
                    f"{record.name} is a DTensor in the checkpoint, and nothing here says how it is to be laid out"
                )
        if found.mismatches:
            raise StateMismatchError(found.mismatches)
        return dict(found.matches)
    finally:
        found.close()


def any_dtensor(header: pb.StateHeader, matches: dict[int, Match]) -> bool:
    """Whether there is a DTensor on either side."""
    return any(record.HasField("dtensor") for record in header.tensors) or any(
        is_dtensor(each.like) for each in matches.values()
    )
