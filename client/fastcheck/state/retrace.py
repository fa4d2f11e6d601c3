"""Collecting a state that looks like the last one, at a quarter of the cost: a training loop saves the same structure
every time.

The state is walked along the trace of the last walk. As long as everything is as it was then (types, keys, lengths,
shapes, and which tensors share memory), names, records and slots are those of then; plain values are written into
the same header. At the first difference nothing is kept, and the state is collected anew.

Tensors are only gathered on the walk and compared all together: ten thousand of them in a few calls for each of their
properties, instead of a dozen calls for each of them. Where all lie at the addresses of the last time, they share
memory as they did then, and nobody need look which do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import torch

from .collect import Collected, Met, MetContainer, MetTensor, MetValue, put_plain, seen_in

_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_IS_NESTED = attrgetter("is_nested")
#: What `view_key` sees of a tensor besides its address.
_VIEW: tuple[Callable[[torch.Tensor], Any], ...] = (
    attrgetter("device"),
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)


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
        walk.compare()
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
            structure=last.structure,
        )
        self._last = last
        self._trace = trace
        self._at = 0
        self._seen = last.seen or seen_in(trace)
        self._tensors: list[torch.Tensor] = []
        self._paths = [path for path, _ in last.containers]
        self._object_paths = list(last.objects)

    def go(self, value: Any) -> None:
        met = self._trace[self._at] if self._at < len(self._trace) else None
        self._at += 1
        if isinstance(met, MetTensor):
            self._tensors.append(value)
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
        trace, tensors = self._trace, self._tensors
        for item in value:
            if self._at < len(trace) and type(trace[self._at]) is MetTensor:
                self._at += 1
                tensors.append(item)
            else:
                self.go(item)

    def compare(self) -> None:
        """Whether what stands where tensors stood is seen as then, and the same of them share memory."""
        tensors, seen, found = self._tensors, self._seen, self.found
        if list(map(type, tensors)) != seen.kinds or not _PLAIN_TENSORS.issuperset(seen.kinds):
            raise _DiffersError
        # Others have no strides, perhaps no shape.
        if any(t.layout is not torch.strided for t in tensors) or any(map(_IS_NESTED, tensors)):
            raise _DiffersError
        # In the words of `view_key`; a state without tensors has no properties.
        if any(list(map(read, tensors)) != then for read, then in zip(_VIEW, seen.properties, strict=False)):
            raise _DiffersError
        found.addresses = list(map(torch.Tensor.data_ptr, tensors))
        # A list is equal to another number by number: the same views of the same memory, then.
        same = found.addresses == self._last.addresses
        found.by_view = self._last.by_view if same else self._slots_by_view(found.addresses)
        first = [tensors[i] for i in seen.firsts]
        found.tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in first]
        found.by_id = dict(zip(map(id, tensors), seen.slots, strict=True))
        found.kept = tensors
        found.seen = seen

    def _slots_by_view(self, addresses: list[int]) -> dict[Hashable, int]:
        """The slots by `view_key`, if the same tensors share memory as then."""
        seen = self._seen
        keys, slots = list(zip(addresses, seen.views, strict=True)), seen.slots
        if len(seen.filled) < len(keys):
            keys, slots = [keys[i] for i in seen.filled], [slots[i] for i in seen.filled]
        # As many views as slots, and each view has its slot: then so it is the other way round.
        by_view: dict[Hashable, int] = dict(zip(keys, slots, strict=True))
        if len(by_view) != seen.filled_slots:
            raise _DiffersError
        if len(keys) > len(by_view) and list(map(by_view.get, keys)) != slots:
            raise _DiffersError
        return by_view
