"""Moments as one small code a number: what an optimizer needs of them, and no more. Pure.

Blocks of 128 numbers share a scale. First moments (and momentum) are rounded to a linear book: what counts is
the error against the others of the block. Second moments are rounded to a logarithmic book: they are divided
by, so what counts is the relative error, and none of them may ever become zero. A code takes a byte
before, about the promised bits after entropy coding. Blocks with a NaN or an infinity in them stay exact.

Every number of a book is its own nearest, and the scale is the same computed from the rounded block: coding
twice changes nothing, and an encoder finds the very codes in the bytes. All arithmetic is exact: powers of two, and
integers. docs/codec.md, "Lossy", has the books.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CodecError
from .chunk_plan import Run
from .dtypes import DType
from .format import CodecId, Section
from .integers import Ints, signed
from .planes import PlaneMerger, PlaneSplitter, pack_plane, unpack_plane
from .scratch import BLOCK, SCRATCH, U8

#: Numbers that share a scale.
GROUP = 128
#: More exact groups than this part of a run, and the run is left to the exact codecs.
_EXACT_MAX = 0.25
#: Scale of a group that is not coded: its numbers are among the exact ones.
_EXACT = {1: 0xFF, 2: 0xFFFF}
#: Below this exponent (biased) a linear step would leave the range in which its inverse is a normal number.
_LINEAR_TOP_MIN = 9
_INFINITY = 0x7F800000
_LOG_CODES = 255

#: Whether the book is linear (has signs), exact groups.
_EXTRA = struct.Struct("<B3xI")

Scales = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Book:
    """Linear: q * 2**(top - bits), |q| < 2**(bits + 1). Logarithmic: 2**bits numbers in each octave."""

    linear: bool
    bits: int

    @property
    def scale_bytes(self) -> int:
        """Of one group: the top exponent alone, or with the top's mantissa bits."""
        return 1 if self.linear else 2


#: By codec, and whether linear.
BOOKS = {
    (CodecId.INDEX8, True): Book(True, 6),
    (CodecId.INDEX8, False): Book(False, 3),
    (CodecId.INDEX4, True): Book(True, 3),
    (CodecId.INDEX4, False): Book(False, 2),
}


def quantise_index(run: Run, book: Book, chunk: Any) -> None:
    """Change the run of the writable chunk to the nearest numbers that the book has."""
    bits = signed(chunk, run.dtype, run.offset, run.elements)
    for start in range(0, run.elements, BLOCK):
        block = bits[start : start + BLOCK]
        wide = _widen(run.dtype, block)
        codes, scales = _to_codes(book, wide)
        values = _to_bits(book, codes, scales)
        exact = scales == _EXACT[book.scale_bytes]
        if exact.any():
            values[exact] = wide[exact]
        _narrow(run.dtype, values, block)


def encode_index(codec: CodecId, run: Run, linear: bool, chunk: Any) -> Section | None:
    """The run as codes, or None when its numbers are not (or not mostly) of the book."""
    if run.dtype not in (DType.FLOAT32, DType.BFLOAT16):
        return None
    book = BOOKS[codec, linear]
    n, groups = run.elements, -(-run.elements // GROUP)
    bits = signed(chunk, run.dtype, run.offset, n)
    plane = SCRATCH.take(n)
    all_scales = np.empty(groups, UNSIGNED_SCALE[book.scale_bytes])
    kept: list[Ints] = []
    for start in range(0, n, BLOCK):
        wide = _widen(run.dtype, bits[start : start + BLOCK])
        codes, scales = _to_codes(book, wide)
        same = np.equal(_to_bits(book, codes, scales), wide).all(axis=1)
        exact = scales == _EXACT[book.scale_bytes]
        if not (same | exact).all():
            return None
        if exact.any():
            kept.append(wide[exact].ravel())
        all_scales[start // GROUP : start // GROUP + len(scales)] = scales
        plane[start : start + BLOCK] = codes.ravel()[: n - start]
    exact_groups = sum(map(len, kept)) // GROUP
    if exact_groups > _EXACT_MAX * groups:
        return None
    planes = (pack_plane(plane), *_split(all_scales.view(np.uint8), groups, book.scale_bytes))
    if kept:
        numbers = np.concatenate(kept)
        planes += _split(numbers.view(np.uint8), len(numbers), 4)
    return Section(codec, run.dtype, run.offset, n, extra=_EXTRA.pack(linear, exact_groups), planes=planes)


def decode_index(section: Section, out: Any) -> None:
    """Write the run's numbers into the chunk `out`.

    Raises:
        CodecError: malformed.
    """
    book, exact_groups = _head(section)
    n, groups = section.elements, -(-section.elements // GROUP)
    width = book.scale_bytes
    plane = unpack_plane(section.planes[0], n)
    all_scales = np.empty(groups, UNSIGNED_SCALE[width])
    PlaneMerger(section.planes[1 : 1 + width], groups, width).block(0, groups, all_scales)
    if np.count_nonzero(all_scales == _EXACT[width]) != exact_groups:
        raise CodecError(
            "an encoded chunk is malformed: an index section with other exact groups than it says"
        )
    kept = np.empty((exact_groups, GROUP), np.int32)
    if exact_groups:
        PlaneMerger(section.planes[1 + width :], kept.size, 4).block(0, kept.size, kept.reshape(-1))
    taken = 0
    bits = signed(out, section.dtype, section.offset, n)
    for start in range(0, n, BLOCK):
        block = bits[start : start + BLOCK]
        scales = all_scales[start // GROUP : (start + BLOCK) // GROUP]
        codes = SCRATCH.array("index.codes", len(scales) * GROUP, np.uint8)
        codes[: len(block)] = plane if isinstance(plane, int) else plane[start : start + BLOCK]
        codes[len(block) :] = 0
        values = _to_bits(book, codes.reshape(-1, GROUP), scales)
        exact = scales == _EXACT[width]
        if exact.any():
            count = int(np.count_nonzero(exact))
            values[exact] = kept[taken : taken + count]
            taken += count
        _narrow(section.dtype, values, block)


UNSIGNED_SCALE: dict[int, Any] = {1: np.uint8, 2: np.uint16}


def _head(section: Section) -> tuple[Book, int]:
    if len(section.extra) != _EXTRA.size or section.dtype not in (DType.FLOAT32, DType.BFLOAT16):
        raise CodecError("an encoded chunk is malformed: an index section without its book")
    linear, exact_groups = _EXTRA.unpack(section.extra)
    if linear > 1 or section.flags or exact_groups > -(-section.elements // GROUP):
        raise CodecError("an encoded chunk is malformed: an index section with fields out of bounds")
    book = BOOKS[section.codec, bool(linear)]
    if len(section.planes) != 1 + book.scale_bytes + (4 if exact_groups else 0):
        raise CodecError(
            "an encoded chunk is malformed: an index section with other planes than its book has"
        )
    return book, exact_groups


def _split(data: U8, elements: int, width: int) -> tuple[Any, ...]:
    splitter = PlaneSplitter(np.empty(elements * width, np.uint8), elements, width)
    splitter.add(0, data.view(f"i{width}"))
    return splitter.planes()


def _widen(dtype: DType, block: Ints) -> Ints:
    """Bits of a block as float32, whole groups, the last one filled up with zeros; in scratch."""
    wide = SCRATCH.array("index.wide", -(-len(block) // GROUP) * GROUP, np.int32)
    wide[: len(block)] = block
    wide[len(block) :] = 0
    if dtype == DType.BFLOAT16:
        np.left_shift(wide, 16, out=wide)
    return wide.reshape(-1, GROUP)


def _narrow(dtype: DType, values: Ints, out: Ints) -> None:
    flat = values.reshape(-1)[: len(out)]
    if dtype == DType.BFLOAT16:
        flat = np.right_shift(flat, 16, out=flat)
    np.copyto(out, flat, casting="same_kind" if dtype == DType.FLOAT32 else "unsafe")


def _to_codes(book: Book, wide: Ints) -> tuple[U8, Scales]:
    """Codes and scales of groups; those of exact groups mean nothing but `_EXACT`."""
    return _to_linear(book.bits, wide) if book.linear else _to_logarithmic(book.bits, wide)


def _to_bits(book: Book, codes: U8, scales: Scales) -> Ints:
    """Float32 bits of codes, in scratch; those of exact groups mean nothing."""
    return _from_linear(book.bits, codes, scales) if book.linear else _from_log(book.bits, codes, scales)


def _to_linear(bits: int, wide: Ints) -> tuple[U8, Scales]:
    magnitudes = SCRATCH.array("index.work", wide.size, np.int32).reshape(wide.shape)
    np.bitwise_and(wide, 0x7FFFFFFF, out=magnitudes)
    largest = magnitudes.max(axis=1)
    # Of the rounded largest: rounding may carry into the next exponent.
    rounded = largest.view(np.uint32) + np.uint32(1 << (22 - bits))
    tops = np.where(largest == 0, 0, np.maximum(rounded >> 23, _LINEAR_TOP_MIN)).astype(np.uint32)
    exact = rounded >= _INFINITY
    inverse = ((254 + bits - tops.clip(_LINEAR_TOP_MIN, 254)) << 23).astype(np.uint32).view(np.float32)
    inverse[exact] = 0
    values = magnitudes.view(np.float32)
    with np.errstate(all="ignore"):
        np.multiply(wide.view(np.float32), inverse[:, None], out=values)
        np.rint(values, out=values)
        codes = SCRATCH.array("index.codes", wide.size, np.int8).reshape(wide.shape)
        np.copyto(codes, values, casting="unsafe")
    codes[exact] = 0
    tops[exact] = 0xFF
    return codes.view(np.uint8), tops.astype(np.uint8)


def _from_linear(bits: int, codes: U8, scales: Scales) -> Ints:
    # A malformed scale gives nonsense, never a trap; the digest tells.
    steps = ((scales.astype(np.int32) - bits).clip(1, 254) << 23).view(np.float32)
    values = SCRATCH.array("index.values", codes.size, np.float32).reshape(codes.shape)
    values[...] = codes.view(np.int8)
    np.multiply(values, steps[:, None], out=values)
    return values.view(np.int32)


def _to_logarithmic(bits: int, wide: Ints) -> tuple[U8, Scales]:
    shift = 23 - bits
    # A little up of the middle, where the mean of 1 / sqrt(v) stays what it is; towards v too large is also
    # the safe side.
    half = np.uint32((1 << (shift - 1)) + (1 << (20 - 2 * bits)))
    unsigned = wide.view(np.uint32)
    largest = unsigned.max(axis=1)
    # Below zero, and NaN, and what would be rounded to infinity.
    exact = largest >= np.uint32(_INFINITY) - half
    tops = np.maximum((largest + half) >> shift, 1).astype(np.uint32)
    work = SCRATCH.array("index.work", wide.size, np.uint32).reshape(wide.shape)
    np.add(unsigned, half, out=work)
    np.right_shift(work, shift, out=work)
    np.maximum(work, 1, out=work)
    np.subtract(tops[:, None], work, out=work)
    np.minimum(work, _LOG_CODES - 1, out=work)
    np.add(work, 1, out=work)
    codes = SCRATCH.array("index.codes", wide.size, np.uint8).reshape(wide.shape)
    np.copyto(codes, work, casting="unsafe")
    np.multiply(codes, unsigned != 0, out=codes, casting="unsafe")
    scales = tops.astype(np.uint16)
    scales[exact] = 0xFFFF
    codes[exact] = 0
    return codes, scales


def _from_log(bits: int, codes: U8, scales: Scales) -> Ints:
    values = SCRATCH.array("index.values", codes.size, np.int32).reshape(codes.shape)
    np.subtract(scales.astype(np.int32)[:, None] + 1, codes, out=values)
    np.left_shift(values, 23 - bits, out=values)
    np.multiply(values, codes != 0, out=values)
    return values
