"""Single runs: raw, same, stateless planes, delta against the base, changed rows. Pure.

Each function codes one run of a chunk. `Chunk` arguments are whole chunks; a run says where in them.
Which codec a run gets is tried out on a sample: data and gap decide, not the role.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import CodecError
from .chunk_plan import Run
from .dtypes import DType
from .format import REVERSED, CodecId, Plane, PlaneKind, Section
from .integers import UNSIGNED, Ints, signed, to_ordered, unzigzag, zigzag
from .planes import PlaneMerger, PlaneSplitter, cost, pack_plane, unpack_plane
from .scratch import BLOCK, SCRATCH

#: Elements that a codec is tried on.
_SAMPLE = 4096
_GLANCE_BYTES = 4096
_GLANCE_ROWS = 16
#: A changed run that is no more than this part of its chunk is sent as it is: the chunk would hardly be smaller,
#: and a codec's fixed cost is that of coding a hundred times as much.
TINY_PART = 2048
#: A codec must save this much of the run, or the run stays as it is.
_WORTH = 0.97
#: Rows are sent one by one if at most this part of them changed.
_ROWS_MAX = 0.5
#: Shorter rows are not worth their numbers; and those take no more memory than the rows.
_ROW_BYTES_MIN = 32
_ROWS = struct.Struct("<IIB3x")


def is_same(run: Run, new: Any, base: Any) -> bool:
    """Whether the run's bytes are those of the base. Mostly seen in its first block."""
    a = np.frombuffer(new, np.uint8, run.elements * run.dtype.bytes, run.offset)
    b = np.frombuffer(base, np.uint8, len(a), run.offset)
    # What changed mostly did so everywhere: a glance tells.
    if not np.array_equal(a[:_GLANCE_BYTES], b[:_GLANCE_BYTES]):
        return False
    step = 4 * BLOCK
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(_GLANCE_BYTES, len(a), step))


def encode_run(run: Run, new: Any, base: Any | None) -> Section:
    """The smallest that pays for one run; `base` is the base's chunk, None without one."""
    if base is not None and is_same(run, new, base):
        return Section(CodecId.SAME, run.dtype, run.offset, run.elements)
    if (run.stop - run.offset) * TINY_PART <= len(new):
        return raw(run, new)
    bits = signed(new, run.dtype, run.offset, run.elements)
    old = None if base is None else signed(base, run.dtype, run.offset, run.elements)
    section = None if old is None else _encode_rows(run, bits, old)
    if section is None:
        section = _encode_planes(run, bits, old)
    plain = raw(run, new)
    if section is None or section.encoded_bytes >= _WORTH * plain.encoded_bytes:
        return plain
    return section


def raw(run: Run, new: Any) -> Section:
    """The run's bytes as they are, by reference."""
    body = memoryview(new)[run.offset : run.stop]
    return Section(CodecId.RAW, run.dtype, run.offset, run.elements, planes=(Plane(PlaneKind.RAW, 0, body),))


def decode_run(section: Section, base: Any | None, out: Any) -> None:
    """Write a RAW, SAME, PLANES, DELTA or ROWS section's numbers into the chunk `out`.

    Raises:
        CodecError: malformed, or it needs a base and there is none.
    """
    bits = signed(out, section.dtype, section.offset, section.elements)
    if section.codec == CodecId.RAW:
        if len(section.planes) != 1:
            raise CodecError("an encoded chunk is malformed: a raw section is one plane of bytes")
        bits.view(np.uint8)[...] = unpack_plane(section.planes[0], bits.nbytes)
        return
    if section.codec == CodecId.PLANES:
        _merge(section.dtype, section.planes, None, bits)
        return
    old = signed(need_base(base), section.dtype, section.offset, section.elements)
    if section.codec == CodecId.SAME:
        bits[...] = old
    elif section.codec == CodecId.DELTA:
        _merge(section.dtype, section.planes, old, bits, section.flags & REVERSED)
    elif section.codec == CodecId.ROWS:
        _decode_rows(section, old, bits)
    else:
        raise CodecError(f"an encoded chunk is malformed: {section.codec.label} is not for a single run")


def reverse_run(section: Section, run: Run, base: Any, new: Any) -> Section:
    """The section that leads from `new` back to `base`, given the one that led forth."""
    row_elements, codec = 0, section.codec
    if codec == CodecId.ROWS:
        row_elements, _, codec = _rows_head(section)
    if codec in (CodecId.SAME, CodecId.DELTA):
        # Subtracting what was added: the same body serves both ways.
        return Section(
            section.codec, section.dtype, section.offset, section.elements, section.flags ^ REVERSED,
            section.extra, section.planes,
        )  # fmt: skip
    return encode_run(replace(run, row_elements=row_elements), base, new)


def need_base(base: Any | None) -> Any:
    """The base's chunk; CodecError when a section needs one and there is none."""
    if base is None:
        raise CodecError("an encoded chunk is malformed: a section needs a base, the chunk says it has none")
    return base


# --- planes of numbers, or of their differences ---------------------------------------------------


def _encode_planes(run: Run, bits: Ints, old: Ints | None) -> Section | None:
    codec = _choose(run.dtype, bits, old)
    if codec == CodecId.RAW:
        return None
    planes = _split(run.dtype, bits, old if codec == CodecId.DELTA else None)
    return Section(codec, run.dtype, run.offset, run.elements, planes=planes)


def _choose(dtype: DType, bits: Ints, old: Ints | None) -> CodecId:
    width = dtype.bytes
    middle = max(0, len(bits) // 2 - _SAMPLE // 2)
    sample = bits[middle : middle + _SAMPLE]
    values = SCRATCH.array("sample", len(sample), bits.dtype)
    best, codec = _WORTH * width, CodecId.RAW
    if old is not None:
        difference(dtype, sample, old[middle : middle + _SAMPLE], values)
        taken = cost(values, width)
        if taken < best:
            best, codec = taken, CodecId.DELTA
    if codec == CodecId.RAW or best > 0.25 * width:
        _rotate(dtype, sample, values)
        if cost(values, width) < best:
            codec = CodecId.PLANES
    return codec


def _split(dtype: DType, bits: Ints, old: Ints | None) -> tuple[Plane, ...]:
    splitter = PlaneSplitter(SCRATCH.take(bits.nbytes), len(bits), dtype.bytes)
    for start in range(0, len(bits), BLOCK):
        stop = min(start + BLOCK, len(bits))
        values = SCRATCH.array("values", stop - start, bits.dtype)
        if old is None:
            _rotate(dtype, bits[start:stop], values)
        else:
            difference(dtype, bits[start:stop], old[start:stop], values)
        splitter.add(start, values)
    return splitter.planes()


def _merge(dtype: DType, planes: tuple[Plane, ...], old: Ints | None, out: Ints, reverse: int = 0) -> None:
    merger = PlaneMerger(planes, len(out), dtype.bytes)
    for start in range(0, len(out), BLOCK):
        stop = min(start + BLOCK, len(out))
        values = SCRATCH.array("values", stop - start, out.dtype)
        merger.block(start, stop, values)
        if old is None:
            _rotate_back(dtype, values, out[start:stop])
        else:
            add_difference(dtype, values, old[start:stop], out[start:stop], reverse)


def difference(dtype: DType, new: Ints, old: Ints, out: Ints) -> None:
    """Ordered difference of two blocks, zigzag, into `out`."""
    mask = SCRATCH.array("mask", len(new), new.dtype)
    if dtype.is_float:
        other = SCRATCH.array("other", len(new), new.dtype)
        to_ordered(old, other, mask)
        to_ordered(new, out, mask)
        np.subtract(out, other, out=out)
    else:
        np.subtract(new, old, out=out)
    zigzag(out, mask)


def add_difference(dtype: DType, values: Ints, old: Ints, out: Ints, reverse: int) -> None:
    """Undo `difference`: `values` (zigzag, destroyed) onto `old` (or, in reverse, from it) into `out`."""
    mask = SCRATCH.array("mask", len(old), old.dtype)
    unzigzag(values, mask)
    combine = np.subtract if reverse else np.add
    if dtype.is_float:
        other = SCRATCH.array("other", len(old), old.dtype)
        to_ordered(old, other, mask)
        combine(other, values, out=values)
        to_ordered(values, out, mask)
    else:
        combine(old, values, out=out)


def _rotate(dtype: DType, bits: Ints, out: Ints) -> None:
    """Sign to the lowest bit, so that a float's exponent is a plane of its own."""
    if not dtype.is_float:
        out[...] = bits
        return
    unsigned, turned = bits.view(UNSIGNED[dtype.bytes]), out.view(UNSIGNED[dtype.bytes])
    mask = SCRATCH.array("mask", len(bits), unsigned.dtype)
    np.right_shift(unsigned, dtype.bytes * 8 - 1, out=mask)
    np.left_shift(unsigned, 1, out=turned)
    np.bitwise_or(turned, mask, out=turned)


def _rotate_back(dtype: DType, values: Ints, out: Ints) -> None:
    if not dtype.is_float:
        out[...] = values
        return
    unsigned, turned = values.view(UNSIGNED[dtype.bytes]), out.view(UNSIGNED[dtype.bytes])
    mask = SCRATCH.array("mask", len(values), unsigned.dtype)
    np.left_shift(unsigned, dtype.bytes * 8 - 1, out=mask)
    np.right_shift(unsigned, 1, out=turned)
    np.bitwise_or(turned, mask, out=turned)


# --- changed rows ---------------------------------------------------------------------------------


def _encode_rows(run: Run, bits: Ints, old: Ints) -> Section | None:
    if run.row_elements * run.dtype.bytes < _ROW_BYTES_MIN:
        return None
    rows, rest = divmod(len(bits), run.row_elements)
    if rest or rows < 2:
        return None
    if rows > 4 * _GLANCE_ROWS:
        some, before = (n.reshape(rows, -1)[:: rows // _GLANCE_ROWS] for n in (bits, old))
        if np.not_equal(some, before).any(axis=1).all():
            return None  # every one of those: no need to look at the others
    changed = np.flatnonzero(_changed_rows(bits, old, rows))
    if len(changed) > _ROWS_MAX * rows:
        return None
    new_rows = bits.reshape(rows, -1)[changed].ravel()
    old_rows = old.reshape(rows, -1)[changed].ravel()
    codec = _choose(run.dtype, new_rows, old_rows)
    if codec == CodecId.RAW:
        codec = CodecId.PLANES  # of which each is then raw
    planes = _split(run.dtype, new_rows, old_rows if codec == CodecId.DELTA else None)
    # Distances between row numbers: small ones are common and compress.
    gaps = np.diff(changed, prepend=-1).astype(np.uint32) - 1
    numbers = tuple(
        pack_plane(np.ascontiguousarray(gaps.view(np.uint8).reshape(-1, 4)[:, i])) for i in range(4)
    )
    extra = _ROWS.pack(run.row_elements, len(changed), codec)
    return Section(CodecId.ROWS, run.dtype, run.offset, run.elements, 0, extra, numbers + planes)


def _changed_rows(bits: Ints, old: Ints, rows: int) -> Any:
    row_bytes = bits.nbytes // rows
    width = next(w for w in (8, 4, 2, 1) if row_bytes % w == 0 and bits.nbytes % w == 0)
    a, b = bits.view(UNSIGNED[width]), old.view(UNSIGNED[width])
    return np.not_equal(a, b).reshape(rows, -1).any(axis=1)


def _rows_head(section: Section) -> tuple[int, int, CodecId]:
    if len(section.extra) != _ROWS.size:
        raise CodecError("an encoded chunk is malformed: a rows section without its numbers")
    row_elements, changed, codec = _ROWS.unpack(section.extra)
    if row_elements * section.dtype.bytes < _ROW_BYTES_MIN or section.elements % row_elements or changed == 0:
        raise CodecError("an encoded chunk is malformed: rows that do not fit")
    if changed > section.elements // row_elements or codec not in (CodecId.PLANES, CodecId.DELTA):
        raise CodecError("an encoded chunk is malformed: rows that do not fit")
    return row_elements, changed, CodecId(codec)


def _decode_rows(section: Section, old: Ints, out: Ints) -> None:
    row_elements, changed, codec = _rows_head(section)
    rows = section.elements // row_elements
    gaps = np.empty(changed, np.uint32)
    PlaneMerger(section.planes[:4], changed, 4).block(0, changed, gaps.view(np.int32))
    numbers = np.cumsum(gaps.astype(np.uint64) + 1) - 1
    if int(numbers[-1]) >= rows:  # the largest: 64 bits hold the sum of as many gaps as a chunk has rows
        raise CodecError("an encoded chunk is malformed: a row that is not there")
    index = numbers.astype(np.intp)
    out[...] = old
    values = np.empty(changed * row_elements, out.dtype)
    old_rows = old.reshape(rows, -1)[index].ravel() if codec == CodecId.DELTA else None
    _merge(section.dtype, section.planes[4:], old_rows, values, section.flags & REVERSED)
    out.reshape(rows, -1)[index] = values.reshape(changed, -1)
