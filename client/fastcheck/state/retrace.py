"""Collecting a state that looks like the last one, at a quarter of the cost: a training loop saves the same structure
every time.

The state is walked along the trace of the last walk. As long as everything is as it was then (types, keys, lengths,
shapes, and which tensors share memory), names, records and slots are those of then; plain values are written into
the same header. At the first difference nothing is kept, and the state is collected anew.
"""

from __future__ import annotations

from typing import Any

import torch

from .collect import Collected, Met, MetContainer, MetTensor, MetValue, put_plain
from .tensors import view_key

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class _DiffersError(Exception):
    """This state is not like the last one."""


def retrace(last: Collected, state: object) -> Collected | None:
    """The state, collected along the trace of the last one, whose header it takes over; None if it differs.

    Either way `last` is of no more use. An error in the state is left to `collect`, which can say where it is.
    """
    trace, last.trace = last.trace, None
    if trace is None:
        return None
    walk = _Walk(last, trace)
    try:
        walk.go(state)
    except (_DiffersError, OverflowError, UnicodeEncodeError):
        return None
    walk.found.trace = trace
    return walk.found


class _Walk:
    def __init__(self, last: Collected, trace: list[Met]) -> None:
        self.found = Collected(
            header=last.header,
            names=last.names,
            record_slots=last.record_slots,
            slot_names=last.slot_names,
            extents=last.extents,
            placed_by=last.placed_by,
        )
        self._trace = trace
        self._at = 0
        self._paths = [path for path, _ in last.containers]
        self._object_paths = list(last.objects)

    def go(self, value: Any) -> None:
        met = self._trace[self._at] if self._at < len(self._trace) else None
        self._at += 1
        if isinstance(met, MetTensor):
            self._tensor(value, met)
        elif isinstance(met, MetValue):
            if value is not met.value:
                if isinstance(value, torch.Tensor) or not put_plain(met.out, value):
                    raise _DiffersError
                self._trace[self._at - 1] = MetValue(value, met.out)
        elif met is None or type(value) is not met.kind:
            raise _DiffersError
        else:
            self._container(value, met)

    def _container(self, value: Any, met: MetContainer) -> None:
        found = self.found
        if met.content is None:
            found.objects[self._object_paths[len(found.objects)]] = value
            self.go(value.state_dict())
            return
        found.containers.append((self._paths[len(found.containers)], value))
        if isinstance(value, dict):
            if (tuple(map(type, value)), tuple(value)) != met.content:
                raise _DiffersError
            value = value.values()
        elif len(value) != met.content:
            raise _DiffersError
        for item in value:
            self.go(item)

    def _tensor(self, value: Any, met: MetTensor) -> None:
        tensor: torch.Tensor = value
        kind: type = type(value)
        if kind is not met.kind or kind not in _PLAIN_TENSORS:
            raise _DiffersError
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise _DiffersError  # has no view key
        key = view_key(tensor)
        if key[1] != met.view:
            raise _DiffersError
        found = self.found
        if met.slot < len(found.tensors):
            if not met.empty and found.by_view.get(key) != met.slot:
                raise _DiffersError
        elif met.empty or found.by_view.setdefault(key, met.slot) == met.slot:
            found.tensors.append(tensor.detach())
        else:
            raise _DiffersError
        found.kept.append(tensor)
        found.by_id[id(tensor)] = met.slot
