"""Moments as one small code a number: runs to and from sections. Pure.

A code takes a byte before, about the promised bits after entropy coding. What a code means is in books.py;
groups that no book can say travel beside, exact. The encoder is given bytes that were quantised before, and finds
the very codes in them; other bytes it leaves to the exact codecs.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ..errors import CodecError
from .chunk_plan import Run
from .codebooks import BOOKS, GROUP, Book, to_bits, to_codes
from .dtypes import DType
from .format import CodecId, Section
from .integers import Ints, signed
from .planes import PlaneMerger, PlaneSplitter, pack_plane, unpack_plane
from .scratch import BLOCK, SCRATCH, U8

#: More exact groups than this part of a run, and the run is left to the exact codecs.
_EXACT_MAX = 0.25
#: Whether the book is linear (has signs), exact groups.
_EXTRA = struct.Struct("<B3xI")


def quantise_index(run: Run, book: Book, chunk: Any) -> None:
    """Change the run of the writable chunk to the nearest numbers that the book has."""
    bits = signed(chunk, run.dtype, run.offset, run.elements)
    for start in range(0, run.elements, BLOCK):
        block = bits[start : start + BLOCK]
        wide = _widen(run.dtype, block)
        codes, scales = to_codes(book, wide)
        values = to_bits(book, codes, scales)
        exact = scales == book.exact
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
    all_scales = np.empty(groups, book.scale_dtype)
    kept: list[Ints] = []
    for start in range(0, n, BLOCK):
        wide = _widen(run.dtype, bits[start : start + BLOCK])
        codes, scales = to_codes(book, wide)
        same = np.equal(to_bits(book, codes, scales), wide).all(axis=1)
        exact = scales == book.exact
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
    all_scales = np.empty(groups, book.scale_dtype)
    PlaneMerger(section.planes[1 : 1 + width], groups, width).block(0, groups, all_scales)
    if np.count_nonzero(all_scales == book.exact) != exact_groups:
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
        values = to_bits(book, codes.reshape(-1, GROUP), scales)
        exact = scales == book.exact
        if exact.any():
            count = int(np.count_nonzero(exact))
            values[exact] = kept[taken : taken + count]
            taken += count
        _narrow(section.dtype, values, block)


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
