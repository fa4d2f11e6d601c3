"""Which tensors of a state only an optimizer's step changes, so that they may be copied until the next one.

Whatever is not known to be such is copied before `save` returns: buffers change in the forward pass,
averages and frozen weights whenever their owner likes. Known are the parameters and the state of optimizer
objects in the state whose step runs torch's hooks, since those hooks are the fence.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import torch

from .collect import Collected
from .dtensors import local_of
from .tensors import view_key

#: Optimizers around one another, as libraries wrap them.
_WRAPPERS_MAX = 4


class Watched(NamedTuple):
    """A tensor to be copied later, and torch's count of the changes made to it so far."""

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
