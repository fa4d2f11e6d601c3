"""Number formats as the codec sees them: a size, and how to look at the bits as integers."""

from __future__ import annotations

from enum import IntEnum


class DType(IntEnum):
    """Value: its number in encoded chunks; never reused."""

    BYTES = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FLOAT64 = 4
    INT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8

    @property
    def bytes(self) -> int:
        """Size of an element."""
        return _BYTES[self]

    @property
    def torch_name(self) -> str:
        """A name of it in `BY_NAME`."""
        return _NAMES[self]

    @property
    def is_float(self) -> bool:
        """Whether the bits are sign and magnitude."""
        return self in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)


_BYTES = {
    DType.BYTES: 1,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT64: 8,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
}

#: torch's names. Formats without arithmetic here (float8, complex, bool) are bytes or their halves.
BY_NAME: dict[str, DType] = {
    "float32": DType.FLOAT32,
    "bfloat16": DType.BFLOAT16,
    "float16": DType.FLOAT16,
    "float64": DType.FLOAT64,
    "int8": DType.INT8,
    "uint8": DType.BYTES,
    "bool": DType.BYTES,
    "int16": DType.INT16,
    "uint16": DType.INT16,
    "int32": DType.INT32,
    "uint32": DType.INT32,
    "int64": DType.INT64,
    "uint64": DType.INT64,
}
_NAMES: dict[DType, str] = {dtype: name for name, dtype in reversed(BY_NAME.items())}
