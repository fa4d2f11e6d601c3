"""Hyper-parameters of an optimizer's last step: recorded by a hook while it was made, else as they stand now.

After `scheduler.step()` the learning rate in `param_groups` is already the next step's, so a hook notes the rate when
the step is made (docs/decisions/0012 says what that is worth). Nothing here raises into training.
"""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fastcheck_proto.v1 import layout_pb2 as pb

from .optimizers import OptimizerSource, read_numbers
from .sharding import local_of

logger = logging.getLogger("fastcheck")

_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening")
_SWITCHES = ("nesterov", "maximize", "amsgrad")
_RECORDED = (*_NUMBERS, *_SWITCHES, "betas", "decoupled_weight_decay")


@dataclass(frozen=True)
class Recorded:
    """What one parameter group was stepped with; `step` is the count of one of its parameters, if it has one."""

    settings: dict[str, Any]
    step: Any


class StepHook:
    """Records an optimizer's settings after each step. Plain data, so copying and pickling it is harmless."""

    def __init__(self) -> None:
        self.groups: list[Recorded | None] = []
        self._complained = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step."""
        if torch.compiler.is_compiling():
            return  # a compiled step runs without us: better nothing recorded than a break in its graph
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.groups = []  # the graph's replays will not run the hook: what is recorded now would be stale
            return
        try:
            before = [*self.groups, *[None] * len(optimizer.param_groups)]
            self.groups = [
                _record(optimizer, group, last)
                for group, last in zip(optimizer.param_groups, before, strict=False)
            ]
        except Exception:
            # G4: nothing of ours ends a training step. What is not observed is fitted by the daemon.
            self.groups = []
            if not self._complained:
                logger.warning(
                    "cannot record what an optimizer steps with, saves may be larger", exc_info=True
                )
                self._complained = True

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """After load_state_dict: what was recorded is about other numbers."""
        self.groups = []


def _record(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], last: Recorded | None
) -> Recorded | None:
    """What a group was just stepped with; what it was before if none of its parameters had a gradient."""
    stepped = next((p for p in group["params"] if p.grad is not None), None)
    if stepped is None:
        return last
    settings = {name: _held(group[name]) for name in _RECORDED if name in group}
    return Recorded(settings, _held(optimizer.state.get(stepped, {}).get("step")))


def _held(value: Any) -> Any:
    """The value as it is now: a scheduler or the next step may change a tensor in place."""
    if isinstance(value, tuple | list):
        return tuple(_held(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    return local_of(value).detach().clone()


class StepRecorder:
    """The hooks on all optimizers that were seen, without keeping those alive. `close` takes them off."""

    def __init__(self) -> None:
        self._hooks: dict[int, tuple[weakref.ref[torch.optim.Optimizer], StepHook]] = {}
        self._handles: list[RemovableHandle] = []
        self._end = weakref.finalize(self, _remove, self._handles)
        self._end.atexit = False

    def watch(self, optimizer: torch.optim.Optimizer) -> StepHook | None:
        """The optimizer's hook, put there on first sight; None once closed, or where it takes no hooks."""
        known = self._hooks.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        if not self._end.alive:
            return None
        for key in [key for key, (ref, _) in self._hooks.items() if ref() is None]:
            del self._hooks[key]
        self._handles[:] = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
        hook = StepHook()
        try:
            self._handles.append(optimizer.register_step_post_hook(hook))
            self._handles.append(optimizer.register_load_state_dict_post_hook(hook.forget))
            self._hooks[id(optimizer)] = weakref.ref(optimizer), hook
        except Exception:
            # An optimizer of somebody's own: its settings are read when it is saved, as without a hook.
            logger.info("%s takes no step hook", type(optimizer).__qualname__, exc_info=True)
            return None
        return hook

    def close(self) -> None:
        """Take all hooks off."""
        self._end()
        self._hooks.clear()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def step_classes(source: OptimizerSource) -> list[list[int]]:
    """Per group and parameter: a number that is equal for those that were last stepped together, from 0."""
    return [
        [classes.setdefault(p.step, len(classes)) for p in group.parameters]
        for group in source.groups
        for classes in [dict[int | None, int]()]
    ]


def optimizer_steps(source: OptimizerSource, recorder: StepRecorder) -> list[pb.OptimizerStep]:
    """One message per group and class of `step_classes`, in order."""
    recorded: list[Recorded | None] = []
    if source.optimizer is not None:
        hook = recorder.watch(source.optimizer)
        recorded = hook.groups if hook is not None else []
    if len(recorded) != len(source.groups):
        recorded = []
    messages = []
    for index, group in enumerate(source.groups):
        kind = _kind(source.optimizer, group.settings)
        seen = recorded[index] if recorded else None
        seen_step = read_numbers([seen.step])[0] if seen else None
        for step in dict.fromkeys(p.step for p in group.parameters):
            observed = seen is not None and seen_step == step
            settings = seen.settings if seen is not None and observed else group.settings
            messages.append(_message(kind, settings, step or 0, observed=observed))
    return messages


def _message(
    kind: pb.OptimizerKind.ValueType, settings: Mapping[str, Any], step: int, *, observed: bool
) -> pb.OptimizerStep:
    betas = settings.get("betas")
    betas = list(betas) if isinstance(betas, tuple | list) and len(betas) == 2 else [None, None]
    values = read_numbers([*betas, *(settings.get(name) for name in _NUMBERS)])
    message = pb.OptimizerStep(kind=kind, step=step, observed=observed)
    for name, value in zip(("beta1", "beta2", *_NUMBERS), values, strict=True):
        if value is not None and math.isfinite(value):
            setattr(message, name, value)
    for name in _SWITCHES:
        setattr(message, name, settings.get(name) is True)
    return message


def _kind(optimizer: torch.optim.Optimizer | None, settings: Mapping[str, Any]) -> pb.OptimizerKind.ValueType:
    """How the parameter follows from its moments: by the optimizer's class, else guessed from its settings."""
    decoupled = settings.get("decoupled_weight_decay")
    adamw = adam = sgd = False
    if optimizer is None:
        adam = {"betas", "amsgrad", "eps"} <= settings.keys()
        # Older torch does not say which of the two; without decay both are one.
        adamw = adam and (decoupled is True or (decoupled is None and settings.get("weight_decay") != 0))
        sgd = {"momentum", "nesterov"} <= settings.keys()
    else:
        adam = _steps_like(optimizer, torch.optim.Adam)
        adamw = _steps_like(optimizer, torch.optim.AdamW) or (adam and decoupled is True)
        sgd = _steps_like(optimizer, torch.optim.SGD)
    if adamw:
        return pb.OPTIMIZER_KIND_ADAMW
    if adam:
        return pb.OPTIMIZER_KIND_ADAM
    return pb.OPTIMIZER_KIND_SGD if sgd else pb.OPTIMIZER_KIND_UNSPECIFIED


def _steps_like(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Whether this is one of a kind, or of a subclass that leaves `step` alone (torch wraps it per class)."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)
