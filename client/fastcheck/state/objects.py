"""Objects with state_dict and load_state_dict: who fills which kind, and how the unknown kinds are filled.

An object of a kind that FastCheck does not know gets fresh copies through its own load_state_dict, so
it may keep them. Modules and optimizers, which hold nearly all bytes, are filled with less copying.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import PartialLoadError
from .dtensors import is_dtensor, local_of, wrap
from .header import materialize
from .paths import Path, show

if TYPE_CHECKING:
    from .fill import Plan


class ObjectFill(ABC):
    """One object's part of a plan: its constructor checks and notes mismatches, `apply` fills."""

    def __init__(self, target: Any, value: pb.StateValue, path: Path, plan: Plan) -> None:
        self.target = target
        self.value = value
        self.path = path
        self.plan = plan

    @abstractmethod
    def apply(self) -> None:
        """Fill the object."""

    def load(self, state_dict: Any) -> None:
        """Call the object's load_state_dict; what it raises becomes a PartialLoadError."""
        try:
            self.target.load_state_dict(state_dict)
        except Exception as error:
            raise PartialLoadError(
                f"{show(self.path)}: load_state_dict of {type(self.target).__qualname__} failed when other "
                f"parts of the state were filled already: it is mixed now and must not be trained on: {error}"
            ) from error

    def fresh(self, index: int, path: Path) -> torch.Tensor:
        """A tensor of its own with a record's bytes, in CPU memory."""
        return self.plan.fresh(index)


class AnyObjectFill(ObjectFill):
    """An object that FastCheck knows nothing about."""

    def __init__(self, target: Any, value: pb.StateValue, path: Path, plan: Plan) -> None:
        super().__init__(target, value, path, plan)
        self._like: dict[int, torch.Tensor] = {}
        if plan.surveys or any(record.HasField("dtensor") for record in plan.header.tensors):
            # Only the object's own state tells which mesh its DTensors live on.
            materialize(value, _Matcher(self, target.state_dict()).match, path)

    def apply(self) -> None:
        """Give the object a copy of everything."""
        self.load(materialize(self.value, self._make, self.path))

    def _make(self, index: int, path: Path) -> torch.Tensor:
        like = self._like.get(index)
        if like is None:
            return self.fresh(index, path)
        local = torch.empty_like(local_of(like))
        self.plan.copy(local, index)
        return wrap(local, like)

    def expect(self, index: int, path: Path, current: object) -> None:
        """Note which DTensor a DTensor's record is to be laid out like."""
        distributed = self.plan.header.tensors[index].HasField("dtensor")
        if self.plan.surveys:
            if isinstance(current, torch.Tensor) and (distributed or is_dtensor(current)):
                self.plan.claim(current, index, path)
            return
        if not distributed:
            return
        if not is_dtensor(current):
            self.plan.relaid(
                path, "is a DTensor in the checkpoint, but not in what state_dict() returns here"
            )
        else:
            assert isinstance(current, torch.Tensor)
            if self.plan.claim(current, index, path):
                self._like[index] = current


class _Matcher:
    """Walks a state dict along the paths of saved tensors."""

    def __init__(self, fill: AnyObjectFill, state_dict: Any) -> None:
        self._fill = fill
        self._state_dict = state_dict
        self._depth = len(fill.path)

    def match(self, index: int, path: Path) -> torch.Tensor:
        current = self._state_dict
        for key in path[self._depth :]:
            try:
                current = current[key]
            except (LookupError, TypeError):
                current = None
        self._fill.expect(index, path, current)
        return torch.empty(0)


def prepare(target: Any, value: pb.StateValue, path: Path, plan: Plan) -> ObjectFill:
    """Check an object against what was saved of it and choose how to fill it."""
    from .modules import ModuleFill  # noqa: PLC0415  both build on this module
    from .optimizers import OptimizerFill  # noqa: PLC0415

    kind: type[ObjectFill] = AnyObjectFill
    # Whoever overrides load_state_dict may do anything with what it is given: treat it as unknown.
    load = getattr(target.load_state_dict, "__func__", None)
    if isinstance(target, torch.nn.Module) and load is torch.nn.Module.load_state_dict:
        kind = ModuleFill
    elif isinstance(target, torch.optim.Optimizer) and load is torch.optim.Optimizer.load_state_dict:
        kind = OptimizerFill
    return kind(target, value, path, plan)
