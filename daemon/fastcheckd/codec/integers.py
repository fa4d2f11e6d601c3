"""Numbers as integers whose difference is small when the numbers are close. Pure, in place, exact both ways.

Floats are sign and magnitude: their bits, read as integers, run backwards below zero. `to_ordered`
turns them so that the integers are ordered as the floats are; it is its own inverse. All
arithmetic wraps around, so every difference of any two bit patterns comes back exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dtypes import DType

Ints = NDArray[Any]

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def signed(data: Any, dtype: DType, offset: int, elements: int) -> Ints:
    """A run's bits as signed integers: a view of `data`."""
    return np.frombuffer(data, SIGNED[dtype.bytes], elements, offset)


def to_ordered(bits: Ints, out: Ints, mask: Ints) -> None:
    """Ordered integers of float bits, and back; `mask` is scratch, `out` may be `bits`."""
    top = bits.dtype.itemsize * 8 - 1
    np.right_shift(bits, top, out=mask)
    np.bitwise_and(mask, np.iinfo(bits.dtype).max, out=mask)
    np.bitwise_xor(bits, mask, out=out)


def zigzag(values: Ints, mask: Ints) -> None:
    """In place: small of either sign becomes small and positive; the result is to be read as unsigned."""
    np.right_shift(values, values.dtype.itemsize * 8 - 1, out=mask)
    np.left_shift(values, 1, out=values)
    np.bitwise_xor(values, mask, out=values)


def unzigzag(values: Ints, mask: Ints) -> None:
    """In place inverse of `zigzag`, on the same signed view."""
    unsigned = values.view(UNSIGNED[values.dtype.itemsize])
    np.bitwise_and(values, 1, out=mask)
    np.negative(mask, out=mask)
    np.right_shift(unsigned, 1, out=unsigned)
    np.bitwise_xor(values, mask, out=values)
