"""What one save leaves for the next: a training loop saves the same structure every time.

**Layouts** are kept by the structure of the state. **The last walk** is kept as a trace: the next state is walked along
it, at a quarter of the cost of collecting it anew (docs/decisions/0012). As long as everything is as it was then
(types, keys, lengths, shapes, and which tensors share memory), names, records and slots are reused, and plain values
are written into the same header. At the first difference the trace is dropped, and the state is collected anew.

Tensors are only gathered on the walk and compared all together: ten thousand of them in a few calls for each of their
properties, instead of a dozen calls for each of them. Where all lie at the addresses of the last time, they share
memory as they did then, and nothing has to be compared.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from fastcheck_proto.conventions import LAYOUT_BYTES_MAX
from fastcheck_proto.v1 import layout_pb2 as pb

from .collect import (
    Collected,
    Structure,
    TraceContainer,
    TraceEntry,
    TraceTensor,
    TraceValue,
    collect,
    put_plain,
    trace_tensors,
)
from .header import Path
from .layout import Arrangement, Extent, Group, arrange
from .optimizer_steps import StepRecorder, optimizer_steps, step_classes
from .optimizers import OptimizerSource, read_sources
from .tensor_groups import find_groups

logger = logging.getLogger("fastcheck")


_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_IS_NESTED = attrgetter("is_nested")
#: The parts of `view_key` besides the address.
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
    def __init__(self, last: Collected, trace: list[TraceEntry]) -> None:
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
        self._seen = last.seen or trace_tensors(trace)
        self._tensors: list[torch.Tensor] = []
        self._paths = [path for path, _ in last.containers]
        self._object_paths = list(last.objects)

    def go(self, value: Any) -> None:
        entry = self._trace[self._at] if self._at < len(self._trace) else None
        self._at += 1
        if isinstance(entry, TraceTensor):
            self._tensors.append(value)
        elif isinstance(entry, TraceValue):
            if value is not entry.value:
                if isinstance(value, torch.Tensor) or not put_plain(entry.out, value):
                    raise _DiffersError
                self._trace[self._at - 1] = TraceValue(value, entry.out)
        elif entry is None or type(value) is not entry.kind:
            raise _DiffersError
        else:
            self._container(value, entry)

    def _container(self, value: Any, entry: TraceContainer) -> None:
        found = self.found
        if entry.content is None:
            found.objects[self._object_paths[len(found.objects)]] = value
            self.go(value.state_dict())
            return
        found.containers.append((self._paths[len(found.containers)], value))
        if isinstance(value, dict):
            if (tuple(map(type, value)), tuple(value)) != entry.content:
                raise _DiffersError
            value = value.values()
        elif len(value) != entry.content:
            raise _DiffersError
        trace, tensors = self._trace, self._tensors
        for item in value:
            if self._at < len(trace) and type(trace[self._at]) is TraceTensor:
                self._at += 1
                tensors.append(item)
            else:
                self.go(item)

    def compare(self) -> None:
        """Check that the tensors have the views that they had, and that the same ones share memory."""
        tensors, seen, found = self._tensors, self._seen, self.found
        if list(map(type, tensors)) != seen.kinds or not _PLAIN_TENSORS.issuperset(seen.kinds):
            raise _DiffersError
        # Others have no strides, perhaps no shape.
        if any(t.layout is not torch.strided for t in tensors) or any(map(_IS_NESTED, tensors)):
            raise _DiffersError
        # The columns of `view_key`; a state without tensors has none.
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


#: A state before and after an optimizer's first step, and a few that take turns.
KEPT_MAX = 4


class Layouts:
    """Layouts of one trainer's states by their structure, and the hooks on its optimizers.

    Args:
        precision: What the trainer allows to be lost; None: nothing.
    """

    def __init__(self, precision: pb.Precision | None = None) -> None:
        self.precision = precision
        self._known: OrderedDict[Hashable, Arrangement] = OrderedDict()
        self._last: Collected | None = None
        self._recorder = StepRecorder()
        self._complained = False

    def collect(self, state: object) -> Collected:
        """Walk a state, along the trace of the last one if it is like it. The result is good until the next call.

        Raises:
            UnsupportedStateError: something in it cannot be saved; the message names its path.
        """
        last, self._last = self._last, None
        found = retrace(last, state) if last is not None else None
        return collect(state) if found is None else found

    def keep(self, found: Collected) -> None:
        """Keep the walk of a state that is laid out for the next one. Nothing of the caller's is kept alive."""
        found.forget_tensors()
        self._last = found

    def arrange(
        self, found: Collected, without: Collection[int] = (), like: dict[Any, Any] | None = None
    ) -> Arrangement:
        """The state's arrangement, with its optimizers' latest steps and without the header's chunks.

        It belongs to this object and is good until the next call for the same slots. Slots in `without` are left out.
        `like`: the same tensors in dicts and lists that show which belong together, where the state itself does not.
        """
        try:
            if like is not None:
                found = replace(found, containers=list(containers_of(like)), objects={})
            return self._arrange(found, read_sources(found), frozenset(without))
        except Exception:
            # Roles are a hint: not understanding a state must not keep it from being saved.
            if not self._complained:
                logger.exception("defect in FastCheck: saving goes on, but with larger transfers")
                self._complained = True
            return self._arrange(found, [], frozenset(without))

    def _arrange(
        self, found: Collected, sources: list[OptimizerSource], without: frozenset[int]
    ) -> Arrangement:
        key = (_structure(found, sources), without)
        known = self._known.get(key)
        if known is None:
            known = arrange(*_left(found.extents, find_groups(found, sources), without))
            if self.precision is not None:
                known.layout.precision.CopyFrom(self.precision)
            if known.layout.ByteSize() > LAYOUT_BYTES_MAX:
                for chunk in known.layout.chunks:
                    chunk.ClearField("runs")
            self._known[key] = known
            while len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        del known.layout.chunks[known.chunks :]
        del known.layout.optimizer_steps[:]
        for source in sources:
            known.layout.optimizer_steps.extend(optimizer_steps(source, self._recorder))
        return known

    def watch(self, state: object) -> None:
        """Put hooks on the optimizers in a state that will be saved later, so that its first save knows the rate."""
        todo, seen = [state], set[int]()
        while todo:
            item = todo.pop()
            if isinstance(item, torch.optim.Optimizer):
                self._recorder.watch(item)
            elif isinstance(item, dict | list | tuple) and id(item) not in seen:
                seen.add(id(item))
                todo.extend(item.values() if isinstance(item, dict) else item)

    def close(self) -> None:
        """Take the hooks off and forget everything."""
        self._recorder.close()
        self._known.clear()
        self._last = None


def containers_of(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All dicts and lists of a tree by their paths, as `Collected.containers` has them."""
    if isinstance(tree, dict | list):
        yield path, tree
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from containers_of(item, (*path, key))


def _left(
    extents: Sequence[Extent], groups: Sequence[Group], without: frozenset[int]
) -> tuple[Sequence[Extent], Sequence[Group]]:
    """Extents and groups without some slots: those have no bytes, and no group has such a member."""
    if not without:
        return extents, groups
    kept = [Extent(e.dtype, (0,), True) if slot in without else e for slot, e in enumerate(extents)]
    return kept, [g for g in groups if not any(member.slot in without for member in g.members)]


def _structure(found: Collected, sources: list[OptimizerSource]) -> Hashable:
    """Equal for states that are laid out alike."""
    if found.structure is None:
        found.structure = Structure((tuple(found.names), tuple(found.record_slots), tuple(found.extents)))
    return (
        found.structure,
        tuple(
            (
                source.path,
                source.optimizer is None,
                tuple(tuple((p.key, p.slot, p.elements) for p in g.parameters) for g in source.groups),
                tuple(tuple(classes) for classes in step_classes(source)),
            )
            for source in sources
        ),
    )
