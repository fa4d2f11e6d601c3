"""Fills the caller's state in place from a header and a segment: first everything is checked, then filled.

Checking collects all that does not fit, by name; until it has passed nothing of the caller's is
touched. Tensors are filled by copying bits; plain values are put into their dicts and lists; tuples
are rebuilt as the caller's type; objects are asked to load themselves. No view of the segment outlives
`fill`: the daemon reuses those bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import StateMismatchError, UnsupportedStateError
from .collect import is_object
from .fill_objects import AnyObjectFill, ModuleFill, ObjectFill
from .fill_optimizer import OptimizerFill
from .header import Path, entries, is_plain_tree, materialize, plain, show
from .records import Move, Pour, copy_record, fresh, is_cut, moves, pour_plainly, same_place, whole
from .sharding import layout_mismatch, local_of
from .tensors import equal_bits, is_expanded, is_repeated, view_key, why_unsupported

_NUMBERS = ("bool_value", "int_value", "float_value")
_WORDS = {
    "none": "None",
    "bool_value": "a bool",
    "int_value": "an int",
    "float_value": "a float",
    "string_value": "a str",
    "bytes_value": "bytes",
    "dict": "a dict",
    "list": "a list",
    "tuple": "a tuple",
    "tensor": "a tensor",
    "object": "an object with a state_dict",
}
#: Makes the value that must replace the current one in its parent.
_Replacement = Callable[[], Any]


class RelaidError(StateMismatchError):
    """State and checkpoint do not fit, and some DTensor is laid out differently: see `reshard`."""


def fill(
    state: object,
    header: pb.StateHeader,
    segment: torch.Tensor,
    pour: Pour = pour_plainly,
    agree: Callable[[], None] = lambda: None,
) -> None:
    """Fill `state` from a parsed header and the rank state's bytes (flat uint8, on the CPU, aligned).

    `pour` moves the bytes of all that can be filled by address. `agree` is called once all is checked and nothing is
    filled; what it raises ends the load there.

    Raises:
        UnsupportedStateError: the state holds something that cannot be filled. Nothing was changed.
        StateMismatchError: state and checkpoint do not fit. Nothing was changed.
        PartialLoadError: an object refused its state after other parts were filled.
    """
    plan = FillPlan(header, segment, pour)
    try:
        plan.check(state)
        agree()
        plan.apply()
    finally:
        plan.close()


class FillPlan:
    """What has to be done to fill one state, and all mismatches."""

    #: Only finds out which tensor belongs to which record (see `match`).
    matches_only = False

    def __init__(self, header: pb.StateHeader, segment: torch.Tensor, pour: Pour = pour_plainly) -> None:
        self.header = header
        self.segment = segment
        self._pour = pour
        #: What `later` gathered, with the tensors, so that they stay alive until `flush`.
        self._moves: list[Move] = []
        self._poured: list[torch.Tensor] = []
        self.mismatches: list[str] = []
        self._relaid = False
        self._copies: list[tuple[torch.Tensor, int]] = []
        self._objects: list[ObjectFill] = []
        self._assignments: list[Callable[[], None]] = []
        self._claims: dict[Hashable, tuple[int, Path]] = {}

    def check(self, state: object) -> None:
        """Compare the whole state with the header; raises what `fill` says."""
        replacement = self._visit(state, self.header.root, ())
        if self.mismatches:
            raise (RelaidError if self._relaid else StateMismatchError)(self.mismatches)
        if replacement is not None:
            raise UnsupportedStateError(
                "the state itself is a plain value, or a tuple with plain values in it, and cannot be "
                "changed in place: put it into a dict or a list"
            )

    def apply(self) -> None:
        """Fill what was checked."""
        for target, index in self._copies:
            self.later(target, index)
        self.flush()
        for item in self._objects:
            item.apply()
        for assign in self._assignments:
            assign()

    def close(self) -> None:
        """Drop all views of the segment: the plan and its parts refer to each other."""
        self._copies.clear()
        self._moves.clear()
        self._poured.clear()
        self._objects.clear()
        self._assignments.clear()
        self.segment = torch.empty(0, dtype=torch.uint8)

    def view(self, index: int) -> torch.Tensor:
        """A record's tensor: a view of the segment unless it is cut, then memory of its own."""
        return whole(self.header.tensors[index], self.segment)

    def fresh(self, index: int) -> torch.Tensor:
        """A record's tensor in CPU memory of its own."""
        return fresh(self.header.tensors[index], self.segment)

    def copy(self, target: torch.Tensor, index: int) -> None:
        """Copy a record's bits into a plain tensor that fits."""
        copy_record(target, self.header.tensors[index], self.segment)

    def later(self, target: torch.Tensor, index: int) -> None:
        """As `copy`, but what can be moved by address is done by `flush`, all at once."""
        found = moves(target, self.header.tensors[index], self.segment)
        if found is None:
            self.copy(target, index)
        else:
            self._moves += found
            self._poured.append(target)

    def flush(self) -> None:
        """Do the moves that `later` has put off."""
        self._pour(self._moves)
        with torch.no_grad():
            for target in self._poured:
                # Autograd has to notice the change, as it does of a copy_.
                if not target.is_inference():
                    torch.autograd.graph.increment_version(target)
        self._moves.clear()
        self._poured.clear()

    def is_cut(self, index: int) -> bool:
        """Whether a record's tensor lies in several pieces."""
        return is_cut(self.header.tensors[index])

    def mismatch(self, path: Path, why: str) -> None:
        """Note that something does not fit."""
        self.mismatches.append(f"{show(path)} {why}")

    def claim(self, target: torch.Tensor, index: int, path: Path) -> bool:
        """Check that a record fits a tensor of the caller's; notes what does not."""
        record = self.header.tensors[index]
        reason = why_unsupported(target)
        if reason is not None:
            raise UnsupportedStateError(f"{show(path)} {reason}")
        reason = self._layout_mismatch(target, record)
        local = local_of(target)
        if reason is None and tuple(local.shape) != tuple(record.shape):
            reason = f"has shape {tuple(local.shape)} here, {tuple(record.shape)} in the checkpoint"
        if reason is None and str(local.dtype) != f"torch.{record.dtype}":
            reason = f"has dtype {local.dtype} here, torch.{record.dtype} in the checkpoint"
        if reason is None:
            reason = self._cannot_hold(local, index, path)
        if reason is not None:
            self.mismatch(path, reason)
        return reason is None

    def claim_like(self, parameter: torch.Tensor, index: int, path: Path, *, shaped: bool) -> None:
        """Check that a record fits what an optimizer will make for a parameter; `shaped`: in the parameter's shape."""
        record = self.header.tensors[index]
        if not shaped and not record.HasField("dtensor"):
            return
        reason = self._layout_mismatch(parameter, record)
        here, there = tuple(local_of(parameter).shape), tuple(record.shape)
        if reason is None and here != there:
            reason = f"belongs to a parameter of shape {here} here, has shape {there} in the checkpoint"
        if reason is not None:
            self.mismatch(path, reason)

    def relaid(self, path: Path, why: str) -> None:
        """Note that a tensor is distributed differently than when it was saved."""
        self._relaid = True
        self.mismatch(path, why)

    def _layout_mismatch(self, target: torch.Tensor, record: pb.TensorRecord) -> str | None:
        reason = layout_mismatch(target, record)
        self._relaid = self._relaid or reason is not None
        return reason

    def _cannot_hold(self, local: torch.Tensor, index: int, path: Path) -> str | None:
        """Whether memory that several elements or several names share would have to hold two values."""
        if not local.numel():
            return None
        if is_expanded(local) and not is_repeated(local, self.view(index)):
            return "is expanded here, but its elements differ in the checkpoint"
        other, other_path = self._claims.setdefault(view_key(local), (index, path))
        here, there = self.header.tensors[index], self.header.tensors[other]
        if not same_place(here, there) and not equal_bits(self.view(index), self.view(other)):
            return f"shares its memory with {show(other_path)} here, but the two differ in the checkpoint"
        return None

    def _visit(self, current: Any, value: pb.StateValue, path: Path) -> _Replacement | None:
        """Plan how to fill `current`; returns a maker of its replacement where it cannot be filled in place."""
        want, have = value.WhichOneof("kind"), _kind_of(current, path)
        assert want is not None
        if want != have and not (_is_plain(want) and _is_plain(have) and _may_replace(want, have)):
            self.mismatch(path, f"is {_WORDS[have]} here, {_WORDS[want]} in the checkpoint")
        elif want == "tensor":
            if self.claim(current, value.tensor, path):
                self._copies.append((local_of(current), value.tensor))
        elif want == "object":
            self._objects.append(_object_fill(current, value.object, path, self))
        elif want == "dict":
            self._visit_dict(current, value.dict, path)
        elif want == "list":
            self._visit_list(current, value.list, value, path)
        elif want == "tuple":
            return self._visit_tuple(current, value.tuple, path)
        else:
            return lambda: plain(value)
        return None

    def _visit_dict(self, current: dict[Any, Any], value: pb.StateDict, path: Path) -> None:
        saved = entries(value)
        for key in current:
            if key not in saved:
                self.mismatch((*path, key), "is not in the checkpoint")
        for key, item in saved.items():
            if key not in current:
                self.mismatch((*path, key), "is in the checkpoint, but not here")
                continue
            replacement = self._visit(current[key], item, (*path, key))
            if replacement is not None:
                self._assign(current, key, replacement)

    def _visit_list(self, current: list[Any], value: pb.StateList, whole: pb.StateValue, path: Path) -> None:
        if len(current) != len(value.items):
            # A list of plain values is a value itself: a history may have grown since.
            if is_plain_tree(whole) and _holds_plain(current, path):
                self._assign(current, slice(None), lambda: materialize(whole, self._no_tensor, path))
            else:
                self.mismatch(path, f"has {len(current)} items here, {len(value.items)} in the checkpoint")
            return
        for index, item in enumerate(value.items):
            replacement = self._visit(current[index], item, (*path, index))
            if replacement is not None:
                self._assign(current, index, replacement)

    def _visit_tuple(self, current: tuple[Any, ...], value: pb.StateList, path: Path) -> _Replacement | None:
        if len(current) != len(value.items):
            self.mismatch(path, f"has {len(current)} items here, {len(value.items)} in the checkpoint")
            return None
        made = [
            self._visit(c, v, (*path, i)) for i, (c, v) in enumerate(zip(current, value.items, strict=True))
        ]
        if all(m is None for m in made):
            return None

        def rebuild() -> Any:
            items = [c if m is None else m() for c, m in zip(current, made, strict=True)]
            kind = type(current)
            return kind._make(items) if hasattr(kind, "_make") else kind(items)

        return rebuild

    def _assign(self, parent: Any, key: Any, replacement: _Replacement) -> None:
        def assign() -> None:
            parent[key] = replacement()

        self._assignments.append(assign)

    def _no_tensor(self, index: int, path: Path) -> torch.Tensor:
        raise AssertionError("a plain tree has no tensors")


def _object_fill(target: Any, value: pb.StateValue, path: Path, plan: FillPlan) -> ObjectFill:
    """Check an object against what was saved of it and choose how to fill it."""
    kind: type[ObjectFill] = AnyObjectFill
    # Whoever overrides load_state_dict may do anything with what it is given: treat it as unknown.
    load = getattr(target.load_state_dict, "__func__", None)
    if isinstance(target, torch.nn.Module) and load is torch.nn.Module.load_state_dict:
        kind = ModuleFill
    elif isinstance(target, torch.optim.Optimizer) and load is torch.optim.Optimizer.load_state_dict:
        kind = OptimizerFill
    return kind(target, value, path, plan)


def _kind_of(value: Any, path: Path) -> str:
    if value is None:
        return "none"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, bool):
        return "bool_value"
    for kind, name in (
        (int, "int_value"),
        (float, "float_value"),
        (str, "string_value"),
        (bytes, "bytes_value"),
    ):
        if isinstance(value, kind):
            return name
    if is_object(value):
        return "object"
    for container in (dict, list, tuple):
        if isinstance(value, container):
            return container.__name__
    raise UnsupportedStateError(
        f"{show(path)} is a {type(value).__module__}.{type(value).__qualname__}, which FastCheck cannot fill"
    )


def _is_plain(kind: str) -> bool:
    return kind == "none" or kind.endswith("_value")


def _may_replace(want: str, have: str) -> bool:
    """None stands for "no value yet"; numbers stand for one another."""
    return "none" in (want, have) or (want in _NUMBERS and have in _NUMBERS)


def _holds_plain(value: Any, path: Path) -> bool:
    kind = _kind_of(value, path)
    if kind == "dict":
        return all(_holds_plain(v, path) for v in value.values())
    if kind in ("list", "tuple"):
        return all(_holds_plain(v, path) for v in value)
    return _is_plain(kind)
