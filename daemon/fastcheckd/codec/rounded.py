"""bf16 and fp16 copies that are nothing but the rounded fp32 master: zero bytes after a check. Pure."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from fastcheck_proto.v1 import layout_pb2 as pb

from ..errors import CodecError
from .chunk_plan import Run
from .dtypes import DType
from .format import CodecId, Section
from .integers import Ints, signed
from .scratch import BLOCK, SCRATCH

_EXTRA = struct.Struct("<I4x")


def round_to(dtype: DType, master: Ints) -> Any:
    """Bits of fp32 numbers (int32) rounded to nearest even, as int16; valid until the next call."""
    bits = master.view(np.uint32)
    if dtype == DType.FLOAT16:
        # Values too large become infinite, NaNs whatever this CPU makes of them: nobody may rely on those.
        return bits.view(np.float32).astype(np.float16).view(np.int16)
    half = SCRATCH.array("rounding", len(bits), np.uint32)
    np.right_shift(bits, 16, out=half)
    np.bitwise_and(half, 1, out=half)
    np.add(half, 0x7FFF, out=half)
    np.add(half, bits, out=half)
    np.right_shift(half, 16, out=half)
    return half.astype(np.uint16).view(np.int16)


def encode_rounded(low: Run, master: Run, chunk: Any) -> Section | None:
    """A section without a body if `low` is the rounding of `master` in this chunk, else None."""
    if low.dtype not in (DType.BFLOAT16, DType.FLOAT16) or master.dtype != DType.FLOAT32:
        return None
    copy = signed(chunk, low.dtype, low.offset, low.elements)
    numbers = signed(chunk, master.dtype, master.offset, master.elements)
    if low.dtype == DType.FLOAT16 and np.isnan(numbers.view(np.float32).max()):
        return None
    for start in range(0, low.elements, BLOCK):
        if not np.array_equal(
            round_to(low.dtype, numbers[start : start + BLOCK]), copy[start : start + BLOCK]
        ):
            return None
    return Section(CodecId.ROUNDED, low.dtype, low.offset, low.elements, 0, _EXTRA.pack(master.offset))


def decode_rounded(section: Section, out: Any) -> None:
    """Write the copy; its master stands in `out` already."""
    master = master_of(section, len(out))
    n = section.elements
    copy = signed(out, section.dtype, section.offset, n)
    numbers = signed(out, DType.FLOAT32, master.offset, n)
    for start in range(0, n, BLOCK):
        copy[start : start + BLOCK] = round_to(section.dtype, numbers[start : start + BLOCK])


def master_of(section: Section, chunk_bytes: int) -> Run:
    """The master's run; CodecError when the section names none that lies in the chunk, apart from its copy."""
    if len(section.extra) != _EXTRA.size or section.dtype not in (DType.BFLOAT16, DType.FLOAT16):
        raise CodecError("an encoded chunk is malformed: a rounded section without its master")
    offset: int = _EXTRA.unpack(section.extra)[0]
    master = Run(offset, section.elements, DType.FLOAT32, pb.ROLE_UNSPECIFIED)
    low_stop = section.offset + 2 * section.elements
    if offset % 4 or master.stop > chunk_bytes or (offset < low_stop and section.offset < master.stop):
        raise CodecError("an encoded chunk is malformed: a master that does not fit")
    return master
