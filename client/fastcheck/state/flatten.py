"""From the caller's state to the tensors to copy, where each goes, and the header. Copies nothing itself.

Accepted are dicts, lists, tuples, plain values, tensors, and objects with state_dict and
load_state_dict. Anything else is refused by name before a byte has moved.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fastcheck_proto.conventions import HEADER_BYTES_MAX, TENSOR_ALIGNMENT_BYTES
from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import UnsupportedStateError
from . import dtypes
from .dtensors import is_dtensor, layout_of, local_of
from .header import SCHEMA, encode_int
from .paths import DEPTH_MAX, Path, dotted, show
from .tensors import view_key, why_unsupported


@dataclass(frozen=True)
class Piece:
    """A plain tensor and the byte range that its contiguous bytes take in the rank state."""

    tensor: torch.Tensor
    offset: int
    bytes: int


@dataclass(frozen=True)
class FlatState:
    """A state ready to be copied: `pieces` in order of offset, then the header. Sizes in bytes."""

    pieces: tuple[Piece, ...]
    header: bytes
    header_offset: int

    @property
    def state_bytes(self) -> int:
        """Payload and header together."""
        return self.header_offset + len(self.header)


def is_object(value: object) -> bool:
    """Whether FastCheck saves this through its state_dict and load_state_dict."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def align(offset: int) -> int:
    """The next offset at which a tensor may start."""
    return -(-offset // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES


def flatten(state: object) -> FlatState:
    """Lay the state out.

    Raises:
        UnsupportedStateError: something in it cannot be saved; the message names its path.
    """
    flattener = _Flattener()
    if not (isinstance(state, dict | list | tuple | torch.Tensor) or is_object(state)):
        _refuse(state, ())
    flattener.put(flattener.header.root, state, ())
    header = flattener.header.SerializeToString()
    if len(header) > HEADER_BYTES_MAX:
        raise UnsupportedStateError(
            f"the state's structure and plain values take {len(header)} bytes, more than {HEADER_BYTES_MAX}: "
            "put large bytes and long lists into tensors"
        )
    return FlatState(tuple(flattener.pieces), header, align(flattener.end))


class _Flattener:
    def __init__(self) -> None:
        self.header = pb.StateHeader(schema=SCHEMA)
        self.pieces: list[Piece] = []
        self.end = 0
        self._ranges: dict[Hashable, int] = {}
        # Keeps temporary tensors alive: a freed one's address could be taken by the next.
        self._kept: list[torch.Tensor] = []
        self._above: set[int] = set()
        self._in_object = False

    def put(self, out: pb.StateValue, value: Any, path: Path) -> None:
        kind = type(value)
        if value is None:
            out.none = True
        elif isinstance(value, torch.Tensor):
            out.tensor = self._tensor(value, path)
        elif kind is bool:
            out.bool_value = value
        elif kind is int:
            try:
                out.int_value = encode_int(value)
            except OverflowError as error:
                raise UnsupportedStateError(f"{show(path)} is {error}: save it as bytes") from None
        elif isinstance(value, float):  # numpy.float64 too: the double is the same
            out.float_value = value
        elif kind is str:
            try:
                out.string_value = value
            except UnicodeEncodeError:
                raise UnsupportedStateError(
                    f"{show(path)} is text that is not valid Unicode: save it as bytes"
                ) from None
        elif kind is bytes:
            out.bytes_value = value
        else:
            self._container(out, value, path)

    def _container(self, out: pb.StateValue, value: Any, path: Path) -> None:
        if id(value) in self._above:
            raise UnsupportedStateError(f"{show(path)} contains itself: a state must be a tree")
        if len(self._above) >= DEPTH_MAX:
            raise UnsupportedStateError(f"{show(path[:3])} is nested more than {DEPTH_MAX} levels deep")
        self._above.add(id(value))
        if is_object(value):
            self._object(out, value, path)
        elif isinstance(value, dict):
            self._dict(out.dict, value, path)
        elif isinstance(value, list | tuple):
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
        self.put(out.object, value.state_dict(), path)
        self._in_object = False

    def _dict(self, out: pb.StateDict, value: dict[Any, Any], path: Path) -> None:
        out.SetInParent()
        for key, item in value.items():
            if key is not None and type(key) not in (str, int, bool):
                raise UnsupportedStateError(
                    f"{show(path)} has the key {key!r} of type {type(key).__qualname__}: "
                    "keys must be str, int, bool or None"
                )
            entry = out.entries.add()
            self.put(entry.key, key, (*path, key))
            self.put(entry.value, item, (*path, key))

    def _tensor(self, tensor: torch.Tensor, path: Path) -> int:
        if reason := why_unsupported(tensor):
            raise UnsupportedStateError(f"{show(path)} {reason}")
        record = self.header.tensors.add(name=dotted(path))
        if is_dtensor(tensor):
            record.dtensor.CopyFrom(layout_of(tensor))
        local = local_of(tensor).detach()
        name = dtypes.name_of(local.dtype)
        assert name is not None
        record.dtype = name
        record.shape.extend(local.shape)
        record.bytes = local.numel() * local.dtype.itemsize
        record.offset = self._place(local, record.bytes)
        return len(self.header.tensors) - 1

    def _place(self, local: torch.Tensor, size: int) -> int:
        """Offset of the tensor's bytes; those of a view that is there already when it is the very same."""
        key = view_key(local)
        if size and key in self._ranges:
            return self._ranges[key]
        offset = self._ranges[key] = align(self.end)
        self._kept.append(local)
        self.pieces.append(Piece(local.resolve_conj().resolve_neg(), offset, size))
        self.end = offset + size
        return offset


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
