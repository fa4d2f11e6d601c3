"""What a state is like beside a checkpoint whose DTensors were laid out otherwise: which tensor meets which record.

The same walk as that of a fill, with the same refusals, but for how tensors are cut. Nothing is filled, and no bytes
are needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import StateMismatchError, UnsupportedStateError
from .dtensors import is_dtensor
from .fill import Plan
from .paths import Path, show
from .tensors import why_unsupported


class Met(NamedTuple):
    """A record's place in the tree, and the caller's tensor that it is to be laid out like."""

    path: Path
    like: torch.Tensor


class Survey(Plan):
    """All tensors of a header that met one of the caller's, by their index."""

    surveys = True

    def __init__(self, header: pb.StateHeader) -> None:
        super().__init__(header, torch.empty(0, dtype=torch.uint8))
        self.met: dict[int, Met] = {}

    def claim(self, target: torch.Tensor, index: int, path: Path) -> bool:
        """Note what a record meets, and what keeps it from going there however it is cut."""
        if reason := why_unsupported(target):
            raise UnsupportedStateError(f"{show(path)} {reason}")
        record = self.header.tensors[index]
        if str(target.dtype) != f"torch.{record.dtype}":
            self.mismatch(path, f"has dtype {target.dtype} here, torch.{record.dtype} in the checkpoint")
            return False
        return self._meet(target, index, path)

    def claim_like(self, parameter: torch.Tensor, index: int, path: Path, *, shaped: bool) -> None:
        """As `claim`, for a tensor that an optimizer will make, of whatever dtype."""
        if shaped or self.header.tensors[index].HasField("dtensor"):
            self._meet(parameter, index, path)

    def _meet(self, target: torch.Tensor, index: int, path: Path) -> bool:
        record = self.header.tensors[index]
        # A DTensor's shape is that of the whole.
        here, there = tuple(target.shape), whole_shape(record)
        if here != there:
            self.mismatch(path, f"has shape {here} here, {there} in the checkpoint, over all ranks")
            return False
        self.met[index] = Met(path, target)
        return True


def whole_shape(record: pb.TensorRecord) -> tuple[int, ...]:
    """The shape of a saved tensor over all ranks."""
    return tuple(record.dtensor.global_shape if record.HasField("dtensor") else record.shape)


def survey(state: object, header: pb.StateHeader) -> dict[int, Met]:
    """By record: what of the state it goes into. Records that meet nothing are made anew by who asks for them.

    Raises:
        UnsupportedStateError, StateMismatchError: as `fill`. Nothing was changed.
    """
    found = Survey(header)
    try:
        found.check(state)
        for index, record in enumerate(header.tensors):
            if record.HasField("dtensor") and index not in found.met:
                found.mismatches.append(
                    f"{record.name} is a DTensor in the checkpoint, and nothing here says how it is to be laid out"
                )
        if found.mismatches:
            raise StateMismatchError(found.mismatches)
        return dict(found.met)
    finally:
        found.close()


def any_dtensor(header: pb.StateHeader, met: dict[int, Met]) -> bool:
    """Whether there is a DTensor on either side."""
    return any(record.HasField("dtensor") for record in header.tensors) or any(
        is_dtensor(each.like) for each in met.values()
    )
