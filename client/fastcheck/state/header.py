"""The header of a saved state: bytes in, checked message, values and tensors out; and paths, which name what is in it.

Trusts nothing: after `parse`, every index, offset, size, dtype and number in the message is good, and nothing was
allocated that the segment does not hold already. Running code from it is impossible.
"""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import HEADER_BYTES_MAX, TENSOR_ALIGNMENT_BYTES
from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import CorruptError
from .tensors import DTYPES

Key = str | int | bool | None
Path = tuple[Key, ...]

#: Levels of containers and objects. A protobuf parser stops at 100 nested messages, three to a dict.
DEPTH_MAX = 30


def show(path: Path) -> str:
    """The path as code that the caller would write: `state['optimizer']['state'][0]`."""
    return "state" + "".join(f"[{_text(key)}]" for key in path)


def dotted(path: Path) -> str:
    """The path as a name for people: `optimizer.state.0`."""
    return ".".join(key if isinstance(key, str) else _text(key) for key in path)


def _text(key: Key) -> str:
    if isinstance(key, int) and key.bit_length() > 4000:  # Python refuses to print far larger ones
        return f"an int of {key.bit_length()} bits"
    return repr(key)


SCHEMA = 2
#: Written for a part of a state that several ranks share: its places are not those in one rank's state.
SHARED_SCHEMA = 3
_DIMS_MAX = 64
_ELEMENTS_MAX = 2**60
_DECIMAL = re.compile(r"-?[0-9]+")
#: Python refuses to convert longer ones between int and str; the decimal module does not.
_STR_DIGITS_MAX = 4000
#: Converting takes quadratic time: this many digits take a third of a second.
INT_DIGITS_MAX = 100_000

#: Builds the tensor for an index into the header's records, at a path.
TensorMaker = Callable[[int, Path], torch.Tensor]


def encode_int(value: int) -> str:
    """An integer as decimal digits; raises OverflowError beyond INT_DIGITS_MAX of them."""
    if value.bit_length() < 3 * _STR_DIGITS_MAX:
        return str(value)
    if value.bit_length() > 3.32 * INT_DIGITS_MAX:
        raise OverflowError(f"an integer of more than {INT_DIGITS_MAX} digits")
    return format(decimal.Decimal(value), "f")


def _decode_int(text: str) -> int:
    return int(text) if len(text) <= _STR_DIGITS_MAX else int(decimal.Decimal(text))


def parse(data: bytes, state_bytes: int, schema: int = SCHEMA) -> pb.StateHeader:
    """Parse and check a header, of a schema that is expected, against the size of the rank state that it describes.

    Raises:
        CorruptError: it is no header, of an unknown version, or contradicts itself.
    """
    if len(data) > HEADER_BYTES_MAX:
        raise CorruptError(f"the checkpoint's header has {len(data)} bytes, more than {HEADER_BYTES_MAX}")
    try:
        header = pb.StateHeader.FromString(data)
    except DecodeError as error:
        raise _corrupt(f"it is not readable ({error})") from None
    if header.schema != schema:
        raise CorruptError(
            f"the checkpoint's header has format version {header.schema}, this SDK reads {schema} here: load it with "
            "the FastCheck version that saved it"
        )
    for record in header.tensors:
        _check_record(record, state_bytes)
        _check_pieces(record, state_bytes)
    _check_values(header)
    return header


def _corrupt(why: str) -> CorruptError:
    return CorruptError(f"the checkpoint's header is damaged: {why}; ask for another step (see steps())")


def _check_record(record: pb.TensorRecord, state_bytes: int) -> None:
    name = repr(record.name[:200])
    dtype = DTYPES.get(record.dtype)
    if dtype is None:
        raise CorruptError(
            f"tensor {name} has dtype {record.dtype[:40]!r}, which this torch ({torch.__version__}) does not "
            "have: load it with the version that saved it"
        )
    # Sizes next to a zero count too: torch multiplies them into strides.
    if len(record.shape) > _DIMS_MAX or math.prod(max(1, d) for d in record.shape) > _ELEMENTS_MAX:
        raise _corrupt(f"tensor {name} has an impossible shape")
    if math.prod(record.shape) * dtype.itemsize != record.bytes:
        raise _corrupt(f"tensor {name} has a size that is not its shape's")
    if record.offset % TENSOR_ALIGNMENT_BYTES or record.offset + record.bytes > state_bytes:
        raise _corrupt(f"tensor {name} lies outside the state")


def _check_pieces(record: pb.TensorRecord, state_bytes: int) -> None:
    offsets, size = record.piece_offsets, record.piece_bytes
    if not offsets and not size:
        return
    name = repr(record.name[:200])
    if len(offsets) < 2 or not size or size % DTYPES[record.dtype].itemsize:
        raise _corrupt(f"tensor {name} is cut as no tensor is")
    rest = record.bytes - (len(offsets) - 1) * size
    if not 0 < rest <= size:
        raise _corrupt(f"tensor {name} has pieces that do not add up to its size")
    if offsets[0] != record.offset or any(offset % TENSOR_ALIGNMENT_BYTES for offset in offsets):
        raise _corrupt(f"tensor {name} has pieces in places where none begins")
    if max(offsets[:-1]) + size > state_bytes or offsets[-1] + rest > state_bytes:
        raise _corrupt(f"tensor {name} has a piece that lies outside the state")


def _check_values(header: pb.StateHeader) -> None:
    todo = [header.root]
    while todo:
        value = todo.pop()
        kind = value.WhichOneof("kind")
        if kind is None:
            raise _corrupt("it holds a value of no kind")
        if kind == "tensor" and value.tensor >= len(header.tensors):
            raise _corrupt("it names a tensor that it does not list")
        if kind == "int_value":
            _check_int(value.int_value)
        if kind == "object":
            todo.append(value.object)
        elif kind in ("list", "tuple"):
            todo.extend(getattr(value, kind).items)
        elif kind == "dict":
            for entry in value.dict.entries:
                if entry.key.WhichOneof("kind") not in ("none", "bool_value", "int_value", "string_value"):
                    raise _corrupt("it holds a key of no allowed kind")
                if entry.key.WhichOneof("kind") == "int_value":
                    _check_int(entry.key.int_value)
                todo.append(entry.value)
            if len(entries(value.dict)) != len(value.dict.entries):
                raise _corrupt("it holds a key twice")


def _check_int(text: str) -> None:
    if len(text) > INT_DIGITS_MAX + 1 or not _DECIMAL.fullmatch(text):
        raise _corrupt("it holds an integer that is not one")


def entries(value: pb.StateDict) -> dict[Key, pb.StateValue]:
    """A dict's values by their keys, in order."""
    return {cast(Key, plain(entry.key)): entry.value for entry in value.entries}


def plain(value: pb.StateValue) -> Any:
    """The Python value of a value that is no container, tensor or object."""
    kind = value.WhichOneof("kind")
    if kind == "none":
        return None
    if kind == "int_value":
        return _decode_int(value.int_value)
    assert kind in ("bool_value", "float_value", "string_value", "bytes_value")
    return getattr(value, kind)


def is_plain_tree(value: pb.StateValue) -> bool:
    """Whether there is no tensor and no object in it."""
    kind = value.WhichOneof("kind")
    if kind == "dict":
        return all(is_plain_tree(entry.value) for entry in value.dict.entries)
    if kind in ("list", "tuple"):
        return all(is_plain_tree(item) for item in getattr(value, kind).items)
    return kind not in ("tensor", "object")


def materialize(value: pb.StateValue, tensor: TensorMaker, path: Path) -> Any:
    """Build a whole value anew, with `tensor` making its tensors."""
    kind = value.WhichOneof("kind")
    if kind == "tensor":
        return tensor(value.tensor, path)
    if kind == "object":
        return materialize(value.object, tensor, path)
    if kind == "dict":
        return {k: materialize(v, tensor, (*path, k)) for k, v in entries(value.dict).items()}
    if kind == "list":
        return [materialize(v, tensor, (*path, i)) for i, v in enumerate(value.list.items)]
    if kind == "tuple":
        return tuple(materialize(v, tensor, (*path, i)) for i, v in enumerate(value.tuple.items))
    return plain(value)
