"""Weights as whole steps from the base, each within a promised distance of the truth. Pure.

`w' = base + q * quantum`, in single precision: the product is exact (20 bits times 4), the sum is rounded once,
so both ends compute the same. The base is what the other end holds, itself coded so: errors never add up (closed loop).
What was promised is checked number by number; what does not keep it (NaN, infinities, steps too large, numbers so
large that the sum's rounding matters) stays exact and travels beside.

The quantum follows from the run's standard deviation, cut to 4 significant bits: computed from the coded numbers it
comes out the same, or as a neighbour, so an encoder finds it without being told.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import CodecError
from .chunk_plan import Run
from .dtypes import DType
from .format import CodecId, Section
from .integers import Ints, signed, unzigzag, zigzag
from .planes import PlaneMerger, PlaneSplitter
from .scratch import BLOCK, SCRATCH

F32: TypeAlias = NDArray[np.float32]

_CODE_MAX = np.float32(2**19)
#: More exact numbers than this part of a run, and the coding is not worth its loss.
_EXACT_MAX = 1 / 16
_SAMPLE = 4096
#: Mantissa bits of a quantum that are cut off: 4 significant ones stay.
_CUT_BITS = 20
#: Beyond these a quantum's arithmetic would leave the normal numbers.
_QUANTUM_MIN, _QUANTUM_MAX = 2.0**-90, 2.0**90
#: Room for the rounding of the sum.
_SLACK = 1 - 2.0**-10

#: Quantum, exact numbers.
_EXTRA = struct.Struct("<fI")


def quantise_bounded(run: Run, bound: float, base: Any, chunk: Any) -> bool:
    """Change the float32 run of the writable chunk to steps from the base, by at most `bound` standard deviations.

    False, and nothing changed, where that would not be worth it.
    """
    w, w0 = _floats(chunk, run), _floats(base, run)
    deviation = standard_deviation(w)
    quantum = _quantum(2 * bound * deviation)
    if quantum is None:
        return False
    error_max = np.float32(bound * deviation * (1 - 2.0**-20))
    SCRATCH.empty_arena(4 * run.elements)
    coded = SCRATCH.take(4 * run.elements).view(np.float32)
    exact = 0
    with np.errstate(all="ignore"):
        for start in range(0, run.elements, BLOCK):
            old, new = w0[start : start + BLOCK], w[start : start + BLOCK]
            codes, fits = _codes(old, new, quantum)
            values = coded[start : start + BLOCK]
            _apply(old, codes, quantum, values)
            errors = np.subtract(values, new, out=codes)
            np.abs(errors, out=errors)
            np.logical_and(fits, errors <= error_max, out=fits)
            kept = len(fits) - int(np.count_nonzero(fits))
            if kept:
                np.copyto(values, new, where=~fits)
                exact += kept
    if exact > _EXACT_MAX * run.elements:
        return False
    w.view(np.int32)[...] = coded.view(np.int32)
    return True


def encode_bounded(run: Run, bound: float, new: Any, base: Any) -> Section | None:
    """The run as steps, or None when its numbers are not mostly such steps from the base."""
    w1, w0 = _floats(new, run), _floats(base, run)
    quantum = _find_quantum(w0, w1, bound)
    if quantum is None:
        return None
    n = run.elements
    splitter = PlaneSplitter(SCRATCH.take(4 * n), n, 4)
    places: list[Any] = []
    for start in range(0, n, BLOCK):
        values, missed = _exact_codes(w0[start : start + BLOCK], w1[start : start + BLOCK], quantum)
        if missed.any():
            places.append(np.flatnonzero(missed) + start)
        zigzag(values, SCRATCH.array("mask", len(values), np.int32))
        splitter.add(start, values)
    exact = sum(map(len, places))
    if exact > _EXACT_MAX * n:
        return None
    planes = splitter.planes()
    if exact:
        at = np.concatenate(places)
        gaps = (np.diff(at, prepend=-1) - 1).astype(np.int32)
        for numbers in (gaps, w1.view(np.int32)[at]):
            beside = PlaneSplitter(np.empty(4 * exact, np.uint8), exact, 4)
            beside.add(0, numbers)
            planes += beside.planes()
    extra = _EXTRA.pack(float(quantum), exact)
    return Section(CodecId.BOUNDED, DType.FLOAT32, run.offset, n, extra=extra, planes=planes)


def decode_bounded(section: Section, base: Any, out: Any) -> None:
    """Write the run's numbers into the chunk `out`.

    Raises:
        CodecError: malformed.
    """
    quantum, exact = _head(section)
    n = section.elements
    w0 = signed(base, DType.FLOAT32, section.offset, n).view(np.float32)
    bits = signed(out, DType.FLOAT32, section.offset, n)
    merger = PlaneMerger(section.planes[:4], n, 4)
    with np.errstate(all="ignore"):
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            values = SCRATCH.array("values", stop - start, np.int32)
            merger.block(start, stop, values)
            unzigzag(values, SCRATCH.array("mask", stop - start, np.int32))
            _apply(w0[start:stop], values, quantum, bits[start:stop].view(np.float32))
    if exact:
        gaps, numbers = np.empty(exact, np.int32), np.empty(exact, np.int32)
        PlaneMerger(section.planes[4:8], exact, 4).block(0, exact, gaps)
        PlaneMerger(section.planes[8:], exact, 4).block(0, exact, numbers)
        at = np.cumsum(gaps.view(np.uint32).astype(np.int64) + 1) - 1
        if int(at[-1]) >= n:
            raise CodecError("an encoded chunk is malformed: an exact number that is not there")
        bits[at] = numbers


def standard_deviation(numbers: F32) -> float:
    """Of the finite ones, in double precision; 0 if there are none, and if all are equal exactly 0."""
    finite: Any = numbers
    with np.errstate(invalid="ignore"):
        total = float(np.add.reduce(numbers, dtype=np.float64))
    if not math.isfinite(total):
        finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return 0.0
    # Distances from any of them: no cancellation where all are nearly the same.
    origin = np.float64(finite[0])
    total = squares = 0.0
    for start in range(0, len(finite), BLOCK):
        block = finite[start : start + BLOCK]
        distances = SCRATCH.array("bounded.distances", len(block), np.float64)
        np.subtract(block, origin, out=distances, dtype=np.float64)
        total += float(distances.sum())
        # No dot product: it would wake the linear algebra library's threads.
        np.multiply(distances, distances, out=distances)
        squares += float(distances.sum())
    mean = total / len(finite)
    return math.sqrt(max(0.0, squares / len(finite) - mean * mean))


def _quantum(width: float) -> np.float32 | None:
    """The largest of 4 significant bits that is not above `width` (less some room); None where there is none."""
    if not _QUANTUM_MIN < width < _QUANTUM_MAX:
        return None
    bits = np.float32(width * _SLACK).view(np.uint32) >> _CUT_BITS << _CUT_BITS
    return np.uint32(bits).view(np.float32)


def _find_quantum(w0: F32, w1: F32, bound: float) -> np.float32 | None:
    first = _quantum(2 * bound * standard_deviation(w1))
    if first is None:
        return None
    stride = max(1, len(w1) // _SAMPLE)
    old, new = np.ascontiguousarray(w0[::stride]), np.ascontiguousarray(w1[::stride])
    best, fewest = None, _EXACT_MAX * len(new) + 1
    for offset in (0, 1, -1):
        quantum = (first.view(np.int32) + np.int32(offset << _CUT_BITS)).view(np.float32)
        missed = int(np.count_nonzero(_exact_codes(old, new, quantum)[1]))
        if missed < fewest:
            best, fewest = quantum, missed
    return best


def _exact_codes(w0: F32, w1: F32, quantum: np.float32) -> tuple[Ints, Any]:
    """Steps (int32, zero where there is none; in scratch) that lead from w0 to w1 bit by bit, and where none does."""
    values = SCRATCH.array("values", len(w1), np.int32)
    with np.errstate(all="ignore"):
        codes, fits = _codes(w0, w1, quantum)
        again = SCRATCH.array("bounded.again", len(w1), np.float32)
        _apply(w0, codes, quantum, again)
        np.copyto(values, codes, casting="unsafe")
    np.logical_and(fits, again.view(np.int32) == w1.view(np.int32), out=fits)
    missed = np.logical_not(fits, out=fits)
    if missed.any():
        values[missed] = 0
    return values, missed


def _codes(w0: F32, w1: F32, quantum: np.float32) -> tuple[F32, Any]:
    """Steps from w0 to the nearest of w1, as whole floats in scratch, and which of them are small enough."""
    codes = SCRATCH.array("bounded.codes", len(w1), np.float32)
    np.subtract(w1, w0, out=codes)
    np.multiply(codes, np.float32(1) / quantum, out=codes)
    np.rint(codes, out=codes)
    sizes = np.abs(codes, out=SCRATCH.array("bounded.again", len(w1), np.float32))
    return codes, sizes <= _CODE_MAX


def _apply(w0: F32, codes: Any, quantum: np.float32, out: F32) -> None:
    steps = SCRATCH.array("bounded.steps", len(w0), np.float32)
    np.copyto(steps, codes, casting="unsafe")
    np.multiply(steps, quantum, out=steps)
    np.add(w0, steps, out=out)


def _floats(chunk: Any, run: Run) -> F32:
    return signed(chunk, DType.FLOAT32, run.offset, run.elements).view(np.float32)


def _head(section: Section) -> tuple[np.float32, int]:
    if len(section.extra) != _EXTRA.size or section.dtype != DType.FLOAT32:
        raise CodecError("an encoded chunk is malformed: a bounded section without its quantum")
    quantum, exact = _EXTRA.unpack(section.extra)
    if not 0 < quantum < math.inf or exact > section.elements or section.flags:
        raise CodecError("an encoded chunk is malformed: a bounded section with fields out of bounds")
    if len(section.planes) != (12 if exact else 4):
        raise CodecError("an encoded chunk is malformed: a bounded section with other planes than it needs")
    return np.float32(quantum), exact
