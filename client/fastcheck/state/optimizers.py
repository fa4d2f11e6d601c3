"""The optimizers in a collected state, whatever form they come in, read into one: groups of parameters.

An optimizer object, its state_dict(), and the two forms of torch.distributed.checkpoint.state_dict (keys by name, and
flattened to "state.<name>.exp_avg") all become an `OptimizerSource`. Something that only looks like an optimizer is
left alone: roles are a hint, so nothing in here may raise because of what it reads.

Also: how much state an optimizer's first step will add, and which tensors only an optimizer's step changes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .collect import Collected
from .header import Path
from .layout import align
from .sharding import local_of
from .tensors import view_key

STEP_MAX = 2**62
#: Dtypes that a step count or a learning rate may have; not all of torch's can be read as numbers.
_READABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64}
)


@dataclass
class Parameter:
    """A parameter as an optimizer knows it."""

    #: Its index in the optimizer, or its name.
    key: Hashable
    #: Slots of its state tensors by name, without the step.
    state: dict[str, int]
    #: The optimizer's count of its steps, if it keeps one.
    step: Any = None
    #: Its own slot, when found by identity.
    slot: int | None = None
    #: Local elements, when the parameter itself is at hand.
    elements: int | None = None


@dataclass
class ParameterGroup:
    """Parameters with common hyper-parameters: the current ones, as they stand in `param_groups`."""

    settings: Mapping[str, Any]
    parameters: list[Parameter] = field(default_factory=list)


@dataclass
class OptimizerSource:
    """An optimizer in the state."""

    path: Path
    optimizer: torch.optim.Optimizer | None
    groups: list[ParameterGroup]
    #: Parameters are named instead of numbered.
    named: bool = False


def read_sources(found: Collected) -> list[OptimizerSource]:
    """All optimizers of a state, in tree order."""
    sources = []
    for path, value in found.containers:
        if not isinstance(value, dict):
            continue
        source = None
        if isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list):
            source = _nested(found, path, value)
        elif any(isinstance(key, str) and key.startswith("param_groups.") for key in value):
            source = _flattened(found, path, value)
        if source is not None:
            _count_steps(source)
            sources.append(source)
    return sources


def _nested(found: Collected, path: Path, value: dict[Any, Any]) -> OptimizerSource | None:
    groups = []
    for group in value["param_groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            return None
        keys = [key for key in group["params"] if isinstance(key, str | int)]
        if len(keys) != len(group["params"]):
            return None
        parameters = [_parameter(found, key, value["state"].get(key)) for key in keys]
        groups.append(ParameterGroup(group, parameters))
    owner = found.objects.get(path)
    optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
    named = any(isinstance(p.key, str) for group in groups for p in group.parameters)
    source = OptimizerSource(path, optimizer, groups, named)
    if optimizer is not None:
        _identify(found, source, optimizer)
    return source


def _flattened(found: Collected, path: Path, value: dict[Any, Any]) -> OptimizerSource:
    """Keys "state.<name>.exp_avg" and "param_groups.<name>.lr": names may have dots, what follows has none."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        kind, _, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        name, _, what = rest.rpartition(".")
        into = {"state": states, "param_groups": settings}.get(kind)
        if into is not None and name:
            into.setdefault(name, {})[what] = item
    # Every name has settings of its own; equal ones are one group.
    groups: dict[Hashable, ParameterGroup] = {}
    for name, of_name in settings.items():
        key = tuple((what, _comparable(v)) for what, v in of_name.items())
        group = groups.setdefault(key, ParameterGroup(of_name))
        group.parameters.append(_parameter(found, name, states.get(name)))
    return OptimizerSource(path, None, list(groups.values()), named=True)


def _comparable(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(_comparable(item) for item in value)
    return value if isinstance(value, bool | int | float | str) else None


def _parameter(found: Collected, key: Hashable, state: Any) -> Parameter:
    parameter = Parameter(key, {})
    for name, value in state.items() if isinstance(state, dict) else ():
        if name == "step":
            parameter.step = value
        elif isinstance(name, str) and isinstance(value, torch.Tensor):
            slot = found.by_id.get(id(value))
            if slot is not None:
                parameter.state[name] = slot
    return parameter


def _identify(found: Collected, source: OptimizerSource, optimizer: torch.optim.Optimizer) -> None:
    """Find the optimizer's parameters among the tensors of the state: the same view of the same memory."""
    own = optimizer.param_groups
    if [len(g["params"]) for g in own] != [len(g.parameters) for g in source.groups]:
        return
    for group, ours in zip(source.groups, own, strict=True):
        for parameter, tensor in zip(group.parameters, ours["params"], strict=True):
            local = local_of(tensor)
            parameter.elements = local.numel()
            if parameter.elements:
                parameter.slot = found.by_view.get(view_key(local))


def _count_steps(source: OptimizerSource) -> None:
    """Turn the step counts into whole numbers; None where there is none."""
    parameters = [p for group in source.groups for p in group.parameters]
    whole_numbers = read_numbers([p.step for p in parameters])
    for parameter, number in zip(parameters, whole_numbers, strict=True):
        good = number is not None and math.isfinite(number) and 0 <= number <= STEP_MAX
        parameter.step = int(number) if good and number is not None else None


def read_numbers(values: list[Any]) -> list[float | None]:
    """Numbers, or tensors with one number each, as Python's; None for anything else.

    Tensors on a GPU are read all at once, with one wait for the device instead of one each.
    """
    read: list[float | None] = []
    away: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for index, value in enumerate(values):
        number: float | None = None
        if isinstance(value, torch.Tensor):
            local = local_of(value)
            if local.numel() == 1 and local.dtype in _READABLE:
                if local.device.type == "cpu":
                    number = local.item()
                else:
                    away.setdefault((local.device, local.dtype), []).append((index, local))
        elif isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1000):
            number = value
        read.append(number)
    for tensors in away.values():
        gathered = torch.stack([t.detach().reshape(()) for _, t in tensors]).tolist()
        for (index, _), number in zip(tensors, gathered, strict=True):
            read[index] = number
    return read


#: A record of the header: its name, shape and place.
_RECORD_BYTES = 128


def missing_bytes(state: object) -> int:
    """Bytes that the optimizers in a state will keep for parameters that they have not stepped yet."""
    total = 0
    todo, seen = [state], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.optim.Optimizer):
            total += _of_optimizer(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)
    return total


def _of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for group in optimizer.param_groups:
        moments = _moments(group)
        for parameter in group["params"] if moments else ():
            if parameter.requires_grad and not optimizer.state.get(parameter):
                local = local_of(parameter)
                size = align(local.numel() * local.dtype.itemsize)
                total += moments * (size + _RECORD_BYTES) + 2 * _RECORD_BYTES
    return total


def _moments(group: dict[str, Any]) -> int:
    """Tensors of a parameter's size that torch's own optimizers keep, known by their settings."""
    momentum = 1 if group.get("momentum") else 0
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    if "rho" in group:
        return 2
    if "alpha" in group:
        return 1 + momentum + (1 if group.get("centered") else 0)
    return momentum


#: Optimizers around one another, as libraries wrap them.
_WRAPPERS_MAX = 4


class Watched(NamedTuple):
    """A tensor to be copied later, and torch's count of the changes made to it until now."""

    name: str
    tensor: torch.Tensor
    version: int

    @property
    def changed(self) -> bool:
        """Whether it was changed since; torch counts all changes but those through `.data` and raw memory."""
        return self.tensor._version != self.version


def steady_slots(found: Collected, restless: Container[str]) -> dict[int, Watched]:
    """Slots that only a step changes; tensors named in `restless` were seen to change otherwise."""
    steady: dict[int, Watched] = {}
    for optimizer in found.objects.values():
        if not (isinstance(optimizer, torch.optim.Optimizer) and is_fenced(optimizer)):
            continue
        for tensor in _own_tensors(optimizer):
            slot = found.by_id.get(id(tensor))
            if slot is None:
                slot = found.by_view.get(view_key(local_of(tensor)))
            if slot is None or slot in steady or found.slot_names[slot] in restless:
                continue
            stored = found.tensors[slot]
            movable = (stored.is_cpu and stored.is_contiguous()) or stored.is_cuda
            if movable and not stored.is_inference():  # of inference tensors torch counts no changes
                # Its own view of the memory: the caller may give the tensor another one before it is copied.
                stored = found.tensors[slot] = stored.detach()
                steady[slot] = Watched(found.slot_names[slot], stored, stored._version)
    return steady


def is_fenced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's step is sure to run torch's step hooks.

    Not if it may be captured into a CUDA graph, whose replays run no Python. One that steps in a way of its
    own may wrap another one that does run them.
    """
    inner: object = optimizer
    for _ in range(_WRAPPERS_MAX):
        if not isinstance(inner, torch.optim.Optimizer):
            return False
        if any(group.get("capturable") for group in inner.param_groups):
            return False
        if getattr(type(inner).step, "hooked", False):
            return True
        inner = getattr(inner, "optimizer", None)
    return False


def _own_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, Mapping):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
