"""How much an optimizer's first step will add to a state that is looked at before it. An estimate, never more."""

from __future__ import annotations

from typing import Any

import torch

from .dtensors import local_of
from .layout import align

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
