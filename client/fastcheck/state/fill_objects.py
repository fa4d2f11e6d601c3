"""Objects with state_dict and load_state_dict: which class fills which kind, modules, and the unknown kinds.

An object of a kind that FastCheck does not know gets fresh copies through its own load_state_dict, so it may keep them.
Modules (here) and optimizers (`fill_optimizer`), which hold nearly all bytes, are filled with less copying.

A module's tensors are filled in place, on several threads, so that bytes move once; load_state_dict is then given the
very same tensors, onto which it copies nothing. Where a module or a hook may do something of its own in loading, it is
given views of the segment instead and copies straight out of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import PartialLoadError
from .header import Key, Path, entries, materialize, show
from .sharding import is_dtensor, local_of, wrap
from .tensors import copy_exact, view_key

if TYPE_CHECKING:
    from .fill import FillPlan


class ObjectFill(ABC):
    """One object's part of a plan: its constructor checks and notes mismatches, `apply` fills."""

    def __init__(self, target: Any, value: pb.StateValue, path: Path, plan: FillPlan) -> None:
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

    def __init__(self, target: Any, value: pb.StateValue, path: Path, plan: FillPlan) -> None:
        super().__init__(target, value, path, plan)
        self._like: dict[int, torch.Tensor] = {}
        if plan.matches_only or any(record.HasField("dtensor") for record in plan.header.tensors):
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
        if self.plan.matches_only:
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


class ModuleFill(ObjectFill):
    """A module with torch's own load_state_dict."""

    target: torch.nn.Module

    def __init__(self, target: torch.nn.Module, value: pb.StateValue, path: Path, plan: FillPlan) -> None:
        super().__init__(target, value, path, plan)
        template = target.state_dict()
        self._template: dict[Key, Any] = dict(template.items())
        # Modules look up their own format versions there.
        self._metadata = getattr(template, "_metadata", None)
        self._saved: dict[Key, pb.StateValue] = {}
        if value.WhichOneof("kind") != "dict":
            plan.mismatch(path, "is a module here, but what was saved there is no module's state")
            return
        self._saved = entries(value.dict)
        for key in self._template:
            if key not in self._saved:
                plan.mismatch((*path, key), "is not in the checkpoint")
        for key, item in self._saved.items():
            if key not in self._template:
                plan.mismatch((*path, key), "is in the checkpoint, but not here")
            else:
                self._check(key, item)

    def _check(self, key: Key, item: pb.StateValue) -> None:
        if _is_extra(key):
            return
        path = (*self.path, key)
        current = self._template[key]
        if item.WhichOneof("kind") == "tensor":
            if isinstance(current, torch.Tensor):
                self.plan.claim(current, item.tensor, path)
            else:
                self.plan.mismatch(path, "is a tensor in the checkpoint, but not here")
        elif isinstance(current, torch.Tensor):
            self.plan.mismatch(path, "is a tensor here, but not in the checkpoint")

    def apply(self) -> None:
        """Load through views of the segment, then make sure that none of them stayed."""
        state_dict: OrderedDict[Key, Any] = OrderedDict()
        own = _own_tensors(self.target)
        for key, item in self._saved.items():
            if item.WhichOneof("kind") == "tensor" and not _is_extra(key):
                state_dict[key] = self._source(self._template[key], own.get(key), item.tensor)
            else:
                state_dict[key] = materialize(item, self.fresh, (*self.path, key))
        self.plan.flush()
        state_dict._metadata = self._metadata  # type: ignore[attr-defined]
        self.load(state_dict)
        for tensor in _tensors(self.target):
            _take_away(tensor, self.plan.segment)

    def _source(self, current: torch.Tensor, own: torch.Tensor | None, index: int) -> torch.Tensor:
        if own is not None and _same_memory(own, current):
            self.plan.later(local_of(own), index)
            return own
        view = self.plan.view(index)
        if not is_dtensor(current):
            return view
        if current.device.type == "cpu":
            return wrap(view, current)
        # from_local would first move the bytes into a second buffer on the device.
        copy_exact(local_of(current), view)
        return current


def _own_tensors(module: torch.nn.Module) -> dict[Key, torch.Tensor]:
    """Tensors that may be filled before load_state_dict sees them, by their keys.

    A module that loads in a way of its own might clear its tensors first, and a hook that runs before may look at
    what was there, or leave it so.
    """
    found: dict[Key, torch.Tensor] = {}
    if any(part._load_state_dict_pre_hooks for part in module.modules()):
        return found
    plain = torch.nn.Module._load_from_state_dict
    for name, part in module.named_modules(remove_duplicate=False):
        if type(part)._load_from_state_dict is plain and "_load_from_state_dict" not in vars(part):
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None:
                    found[f"{name}.{key}" if name else key] = tensor
    return found


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return view_key(local_of(one)) == view_key(local_of(other))


def _is_extra(key: Key) -> bool:
    """Whether this is what some module's get_extra_state returned: anything, and its size may change."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _take_away(tensor: torch.Tensor, segment: torch.Tensor) -> None:
    """Give the tensor memory of its own if a module put a view of the segment in its place."""
    local = local_of(tensor)
    start = segment.data_ptr()
    if local.device.type != "cpu" or not start <= local.data_ptr() < start + segment.numel():
        return
    own = local.clone()
    if is_dtensor(tensor):
        tensor._local_tensor = own  # type: ignore[attr-defined]
    else:
        tensor.data = own
