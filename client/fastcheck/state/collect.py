"""From the caller's state to its tensors, its optimizers and a header without places. Copies nothing.

Accepted are dicts, lists, tuples, plain values, tensors, and objects with state_dict and
load_state_dict. Anything else is refused by name before a byte has moved.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import UnsupportedStateError
from .header import DEPTH_MAX, SCHEMA, Path, dotted, encode_int, show
from .layout import Arrangement, Extent
from .sharding import is_dtensor, layout_of, local_of
from .tensors import dtype_name, view_key, why_unsupported


class TraceTensor(NamedTuple):
    """A plain tensor: its type, the view of its memory (see `view_key`), its slot, whether it has no elements."""

    kind: type
    view: tuple[Hashable, ...]
    slot: int
    empty: bool


class TraceValue(NamedTuple):
    """A plain value and its place in the header."""

    value: Any
    out: pb.StateValue


class TraceContainer(NamedTuple):
    """A container or an object: its type, and the types of a dict's keys and the keys, or a length."""

    kind: type
    content: Hashable


TraceEntry = TraceTensor | TraceValue | TraceContainer


class TraceTensors(NamedTuple):
    """All tensors of a trace, in its order, property by property; `firsts` by slot, the others by record."""

    kinds: list[type]
    #: The view of each one's memory; and the same by column: the devices of all, the dtypes of all, and so on.
    views: list[tuple[Hashable, ...]]
    properties: list[list[Hashable]]
    slots: list[int]
    #: The first record of each slot.
    firsts: list[int]
    #: Records that have elements, and how many slots those have.
    filled: list[int]
    filled_slots: int


def trace_tensors(trace: list[TraceEntry]) -> TraceTensors:
    """A trace's tensors, to compare others with."""
    tensors = [each for each in trace if isinstance(each, TraceTensor)]
    views = [each.view for each in tensors]
    slots = [each.slot for each in tensors]
    firsts = dict(zip(reversed(slots), reversed(range(len(slots))), strict=True))
    filled = [record for record, each in enumerate(tensors) if not each.empty]
    return TraceTensors(
        [each.kind for each in tensors],
        views,
        [list(column) for column in zip(*views, strict=True)],
        slots,
        [firsts[slot] for slot in range(len(firsts))],
        filled,
        len({slots[record] for record in filled}),
    )


class Structure:
    """The key of a state's layout. Hashing it takes long, so it is hashed once; it equals itself at once."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key


@dataclass
class Collected:
    """A walked state. A **slot** is a tensor that is stored; records of the very same view share one."""

    #: Offsets and pieces of its records are not set yet.
    header: pb.StateHeader = field(default_factory=lambda: pb.StateHeader(schema=SCHEMA))
    names: list[str] = field(default_factory=list)
    record_slots: list[int] = field(default_factory=list)
    #: Per slot: the rank's local tensor, neither conjugated nor negated lazily, without a gradient to trace; the name
    #: of its first record; what a layout needs of it.
    tensors: list[torch.Tensor] = field(default_factory=list)
    slot_names: list[str] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    #: Slots by `view_key` of the local tensor; those of empty tensors are not here.
    by_view: dict[Hashable, int] = field(default_factory=dict)
    #: Slots by `id` of the tensor that stands in the state; `kept` keeps it alive.
    by_id: dict[int, int] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    #: Containers in tree order, and objects by the path of what their state_dict() returned.
    containers: list[tuple[Path, Any]] = field(default_factory=list)
    objects: dict[Path, Any] = field(default_factory=dict)
    #: All entries in order, for `retrace`; None if some part of the state cannot be retraced.
    trace: list[TraceEntry] | None = field(default_factory=list)
    #: The trace's tensors, once one was retraced, and the addresses for which `by_view` was made then.
    seen: TraceTensors | None = None
    addresses: list[int] | None = None
    #: Names, slots and extents, once they are needed.
    structure: Structure | None = None
    #: The arrangement whose places its header's records have.
    placed_by: Arrangement | None = None

    def forget_tensors(self) -> None:
        """Keep only what the next walk needs: nothing of the caller's stays alive for it."""
        self.tensors, self.kept = [], []
        self.by_id = {}
        self.containers = [(path, None) for path, _ in self.containers]
        self.objects = dict.fromkeys(self.objects)


def is_object(value: object) -> bool:
    """Whether FastCheck saves this through its state_dict and load_state_dict."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def put_plain(out: pb.StateValue, value: Any) -> bool:
    """Write a plain value; returns whether it is one.

    Raises:
        OverflowError: an integer with too many digits.
        UnicodeEncodeError: text that is not valid Unicode.
    """
    kind = type(value)
    if value is None:
        out.none = True
    elif kind is bool:
        out.bool_value = value
    elif kind is int:
        out.int_value = encode_int(value)
    elif isinstance(value, float):  # numpy.float64 too: the double is the same
        out.float_value = value
    elif kind is str:
        out.string_value = value
    elif kind is bytes:
        out.bytes_value = value
    else:
        return False
    return True


def collect(state: object) -> Collected:
    """Walk the state.

    Raises:
        UnsupportedStateError: something in it cannot be saved; the message names its path.
    """
    collector = _Collector()
    if not (isinstance(state, dict | list | tuple | torch.Tensor) or is_object(state)):
        _refuse(state, ())
    collector.put(collector.found.header.root, state, ())
    return collector.found


class _Collector:
    def __init__(self) -> None:
        self.found = Collected()
        self._above: set[int] = set()
        self._in_object = False

    def put(self, out: pb.StateValue, value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            out.tensor = self._tensor(value, path)
        elif self._plain(out, value, path):
            self._note(TraceValue(value, out))
        else:
            self._container(out, value, path)

    def _plain(self, out: pb.StateValue, value: Any, path: Path) -> bool:
        try:
            return put_plain(out, value)
        except OverflowError as error:
            raise UnsupportedStateError(f"{show(path)} is {error}: save it as bytes") from None
        except UnicodeEncodeError:
            raise UnsupportedStateError(
                f"{show(path)} is text that is not valid Unicode: save it as bytes"
            ) from None

    def _note(self, entry: TraceEntry) -> None:
        if self.found.trace is not None:
            self.found.trace.append(entry)

    def _container(self, out: pb.StateValue, value: Any, path: Path) -> None:
        if id(value) in self._above:
            raise UnsupportedStateError(f"{show(path)} contains itself: a state must be a tree")
        if len(self._above) >= DEPTH_MAX:
            raise UnsupportedStateError(f"{show(path[:3])} is nested more than {DEPTH_MAX} levels deep")
        self._above.add(id(value))
        if is_object(value):
            self._object(out, value, path)
        elif isinstance(value, dict):
            self.found.containers.append((path, value))
            self._dict(out.dict, value, path)
        elif isinstance(value, list | tuple):
            self.found.containers.append((path, value))
            self._note(TraceContainer(type(value), len(value)))
            items = out.list if isinstance(value, list) else out.tuple
            items.SetInParent()
            for index, item in enumerate(value):
                self.put(items.items.add(), item, (*path, index))
        else:
            _refuse(value, path)
        self._above.discard(id(value))

    def _object(self, out: pb.StateValue, value: Any, path: Path) -> None:
        if self._in_object:
            raise UnsupportedStateError(
                f"{show(path)}: the state_dict() above it returns a {type(value).__qualname__} itself; "
                "let it return that object's state_dict()"
            )
        self._in_object = True
        self.found.objects[path] = value
        self._note(TraceContainer(type(value), None))
        self.put(out.object, value.state_dict(), path)
        self._in_object = False

    def _dict(self, out: pb.StateDict, value: dict[Any, Any], path: Path) -> None:
        out.SetInParent()
        self._note(TraceContainer(type(value), (tuple(map(type, value)), tuple(value))))
        for key, item in value.items():
            if key is not None and type(key) not in (str, int, bool):
                raise UnsupportedStateError(
                    f"{show(path)} has the key {key!r} of type {type(key).__qualname__}: "
                    "keys must be str, int, bool or None"
                )
            entry = out.entries.add()
            self._plain(entry.key, key, (*path, key))
            self.put(entry.value, item, (*path, key))

    def _tensor(self, tensor: torch.Tensor, path: Path) -> int:
        if reason := why_unsupported(tensor):
            raise UnsupportedStateError(f"{show(path)} {reason}")
        found = self.found
        known = found.by_id.get(id(tensor))
        name = dotted(path)
        record = found.header.tensors.add(name=name)
        if is_dtensor(tensor):
            record.dtensor.CopyFrom(layout_of(tensor))
        slot = self._slot(tensor, name) if known is None else known
        extent = found.extents[slot]
        record.dtype = extent.dtype
        record.shape.extend(extent.shape)
        record.bytes = extent.bytes
        found.names.append(name)
        found.record_slots.append(slot)
        if is_dtensor(tensor) or tensor.is_conj() or tensor.is_neg():
            found.trace = None
        else:
            self._note(TraceTensor(type(tensor), view_key(tensor)[1], slot, not tensor.numel()))
        return len(found.names) - 1

    def _slot(self, tensor: torch.Tensor, name: str) -> int:
        """The tensor's slot: a new one unless the very same view has one already."""
        found = self.found
        local = local_of(tensor).detach()
        dtype = dtype_name(local.dtype)
        assert dtype is not None
        new = len(found.tensors)
        # Empty tensors have no address to tell them apart by.
        slot = found.by_view.setdefault(view_key(local), new) if local.numel() else new
        if slot == new:
            plain = local.resolve_conj().resolve_neg()
            found.tensors.append(plain)
            found.slot_names.append(name)
            found.extents.append(Extent(dtype, tuple(local.shape), plain.is_contiguous()))
        # Keeps temporary tensors alive: a freed one's address could be taken by the next.
        found.kept += (tensor, local)
        found.by_id[id(tensor)] = slot
        return slot


def _refuse(value: object, path: Path) -> NoReturn:
    kind = type(value)
    hint = "leave it out or turn it into one of these"
    if kind.__module__ == "numpy":
        hint = "use .item() for a scalar, torch.from_numpy() for an array"
    raise UnsupportedStateError(
        f"{show(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: a state holds "
        "dicts, lists, tuples, tensors, int, float, str, bytes, bool, None and objects with state_dict and "
        f"load_state_dict; {hint}"
    )
