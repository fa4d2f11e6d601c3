"""What a moment's code means: what an optimizer needs of the number, and no more. Pure.

Groups of 128 numbers share a scale. First moments (and momentum) are rounded to a linear book: what counts is
the error against the others of the group. Second moments are rounded to a logarithmic book: they are divided
by, so what counts is the relative error, and none of them may ever become zero. Groups with a NaN or an infinity in
them are not coded.

Every number of a book is its own nearest, and the scale is the same computed from the rounded group: coding
twice changes nothing. All arithmetic is exact: powers of two, and integers. docs/formats.md has the books.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .format import CodecId
from .integers import Ints
from .scratch import SCRATCH, U8

Scales: TypeAlias = NDArray[Any]

#: Numbers that share a scale.
GROUP = 128
#: Below this exponent (biased) a linear step would leave the range in which its inverse is a normal number.
_LINEAR_TOP_MIN = 9
_INFINITY = 0x7F800000
_LOG_CODES = 255


@dataclass(frozen=True, slots=True)
class Book:
    """Linear: q * 2**(top - bits), |q| < 2**(bits + 1). Logarithmic: 2**bits numbers in each octave."""

    linear: bool
    bits: int

    @property
    def scale_bytes(self) -> int:
        """Of one group: the top exponent alone, or with the top's mantissa bits."""
        return 1 if self.linear else 2

    @property
    def scale_dtype(self) -> Any:
        """Of scales in arrays."""
        return np.uint8 if self.linear else np.uint16

    @property
    def exact(self) -> int:
        """Scale of a group that is not coded: its numbers are among the exact ones."""
        return 0xFF if self.linear else 0xFFFF


#: By codec, and whether linear.
BOOKS = {
    (CodecId.INDEX8, True): Book(True, 6),
    (CodecId.INDEX8, False): Book(False, 3),
    (CodecId.INDEX4, True): Book(True, 3),
    (CodecId.INDEX4, False): Book(False, 2),
}


def to_codes(book: Book, wide: Ints) -> tuple[U8, Scales]:
    """Codes and scales of groups; codes of exact groups mean nothing."""
    return _to_linear(book.bits, wide) if book.linear else _to_logarithmic(book.bits, wide)


def to_bits(book: Book, codes: U8, scales: Scales) -> Ints:
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
