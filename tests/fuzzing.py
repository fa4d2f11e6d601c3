"""Inputs for fuzzing: how many, and protobuf messages with whatever somebody may write into them.

`make fuzz EXAMPLES=...` tries more of them than the tests by themselves do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: Names that become paths, lines of a log, addresses, or nothing at all.
HOSTILE_TEXTS = (
    "", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\r\nforged", "é", "😀", "%s%n",
    "a" * 128, "a" * 129, "x" * 100_000, "127.0.0.1:1", "127.0.0.1:99999", "[::1]:0", "unix:///tmp/x", "dns:///x:1",
)  # fmt: skip
_FLOATS = (0.0, -1.0, 1e-9, 0.05, 3.0, 1e308, float("inf"), float("-inf"), float("nan"))
_BYTES = (b"", b"\0" * 15, b"\0" * 16, b"\xff" * 16, b"\0" * 32, b"\xff" * 65_536)
#: Of a repeated field, where each takes but few bytes.
_MANY = 3000
_DEPTH_MAX = 4


def examples(default: int) -> settings:
    """Settings for so many inputs, or for as many as the environment says; none is too slow or too large."""
    return settings(
        max_examples=int(os.environ.get("FASTCHECK_FUZZ_EXAMPLES", default)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def unsigned(bits: int) -> st.SearchStrategy[int]:
    """Any number of so many bits, above all those at some edge."""
    edges = {0, 1, 2, 3, 4096, 65_536, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**62 + 1, 2**63, 2**64 - 1}
    return st.sampled_from(sorted(n for n in edges if n < 2**bits)) | st.integers(0, 2**bits - 1)


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: unsigned(32),
    FieldDescriptor.TYPE_UINT64: unsigned(64),
    FieldDescriptor.TYPE_INT64: unsigned(63) | unsigned(63).map(lambda number: -number - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.sampled_from(_FLOATS) | st.floats(),
    FieldDescriptor.TYPE_BYTES: st.sampled_from(_BYTES) | st.binary(max_size=64),
    FieldDescriptor.TYPE_STRING: st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=20),
}


@st.composite
def messages(draw: st.DrawFn, of: Descriptor, known: Sequence[str] = (), depth: int = 0) -> Message:
    """A message of that type; of its texts about half are among the `known` ones."""
    made: Message = GetMessageClass(of)()
    for field in of.fields:
        _fill(draw, made, field, known, depth)
    return made


def _fill(draw: st.DrawFn, made: Message, field: FieldDescriptor, known: Sequence[str], depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kinds = field.message_type.fields_by_name
        for _ in range(draw(st.integers(0, 3))):
            key = draw(_scalar(kinds["key"], known))
            getattr(made, field.name)[key] = draw(_scalar(kinds["value"], known))
        return
    if field.is_repeated:
        if field.message_type is None:
            items = draw(st.lists(_scalar(field, known), max_size=3))
            if items and len(str(items)) < 100 and draw(st.integers(0, 9)) == 0:
                items *= _MANY
        else:
            deeper = messages(field.message_type, known, depth + 1)
            items = draw(st.lists(deeper, max_size=3 if depth < _DEPTH_MAX else 0))
            if items and items[0].ByteSize() < 100 and draw(st.integers(0, 9)) == 0:
                items *= _MANY
        getattr(made, field.name).extend(items)
    elif draw(st.integers(0, 3)) == 0:
        return  # unset
    elif field.message_type is None:
        setattr(made, field.name, draw(_scalar(field, known)))
    elif depth < _DEPTH_MAX:
        getattr(made, field.name).CopyFrom(draw(messages(field.message_type, known, depth + 1)))


def _scalar(field: FieldDescriptor, known: Sequence[str]) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([*field.enum_type.values_by_number, 99, 2**31 - 1, -1])
    if field.type == FieldDescriptor.TYPE_STRING and known:
        return st.sampled_from(list(known)) | _SCALARS[field.type]
    return _SCALARS[field.type]  # KeyError: nobody has thought of such a field yet


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes, or some of them changed, left out or too many."""
    out = bytearray(data)
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        at = draw(st.integers(0, len(out)))
        what = draw(st.integers(0, 2))
        if what == 0 and at < len(out):
            out[at] = draw(st.integers(0, 255))
        elif what == 1:
            del out[at : at + draw(st.integers(1, 16))]
        else:
            out[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(out)
