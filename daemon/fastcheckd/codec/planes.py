"""Numbers split into planes, one for each byte of them, each stored as cheaply as it can be. Pure.

Low bytes of a float are noise and cost nothing but a copy; high bytes repeat and compress. zstd level 1
is enough: higher levels are slower and no smaller on such planes (docs/formats.md).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import zstandard

from ..errors import CodecError
from .format import Buffer, Plane, PlaneKind
from .integers import UNSIGNED, Ints
from .scratch import SCRATCH, U8

#: Level 1 that looks for long matches only, in a table that stays in the fastest cache: planes are skewed noise,
#: which Huffman coding alone serves; short matches cost a third of the time and make it larger.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, hash_log=6, min_match=7)
#: Shorter planes are not worth a compressor's header.
_COMPRESS_MIN = 64
_SAMPLE = 8192
#: A plane must shrink to this part of itself, or it is kept as it is: decoding it costs time as well.
_WORTH = 0.97


class _Zstd(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


class PlaneSplitter:
    """Collects blocks of unsigned integers and splits them into planes. One thread, one use.

    Planes above the largest value so far do not exist yet: residuals are mostly below 256 and then cost
    one plane, not four.
    """

    def __init__(self, storage: U8, elements: int, width: int) -> None:
        """`storage`: elements * width bytes for the planes; `width`: bytes of a number."""
        self._planes = storage.reshape(width, elements)
        self._width = width
        self._used = 0

    def add(self, start: int, block: Ints) -> None:
        """The block's numbers belong at `start`; blocks come in order and without gaps."""
        unsigned = block.view(UNSIGNED[self._width])
        stop = start + len(block)
        needed = (int(unsigned.max()).bit_length() + 7) // 8
        if needed > self._used:
            self._planes[self._used : needed, :start] = 0
            self._used = needed
        # Shifting and narrowing is twice as fast as picking every fourth byte.
        for index in range(needed):
            source = unsigned
            if index:
                source = SCRATCH.array("shifted", len(block), unsigned.dtype)
                np.right_shift(unsigned, 8 * index, out=source)
            np.copyto(self._planes[index, start:stop], source, casting="unsafe")
        self._planes[needed : self._used, start:stop] = 0

    def planes(self) -> tuple[Plane, ...]:
        """All of them, low bytes first. Raw ones are views of the storage."""
        used = tuple(pack_plane(self._planes[index]) for index in range(self._used))
        return used + (Plane(PlaneKind.CONSTANT),) * (self._width - self._used)


class PlaneMerger:
    """Inverse of PlaneSplitter: hands out blocks of numbers. One thread, one use."""

    def __init__(self, planes: tuple[Plane, ...], elements: int, width: int) -> None:
        """Raises CodecError when the planes are not so many, or not of so many bytes."""
        if len(planes) != width:
            raise CodecError(
                f"an encoded chunk is malformed: {len(planes)} planes for numbers of {width} bytes"
            )
        self._width = width
        self._planes = [unpack_plane(plane, elements) for plane in planes]
        #: High planes that are zero need no work; the lowest always counts.
        self._used = max(
            (i + 1 for i, p in enumerate(self._planes) if not isinstance(p, int) or p), default=1
        )

    def block(self, start: int, stop: int, out: Ints) -> None:
        """Numbers [start, stop) into `out`."""
        unsigned = out.view(UNSIGNED[self._width])
        top, *below = reversed(self._planes[: self._used])
        unsigned[...] = top if isinstance(top, int) else top[start:stop]
        for plane in below:
            np.left_shift(unsigned, 8, out=unsigned)
            np.bitwise_or(unsigned, plane if isinstance(plane, int) else plane[start:stop], out=unsigned)


def pack_plane(plane: U8) -> Plane:
    """Constant, compressed or as it is."""
    first = int(plane[0])
    if plane[-1] == first and not np.any(plane != first):
        return Plane(PlaneKind.CONSTANT, first)
    if worth_compressing(plane):
        body = _zstd.compressor.compress(plane.data)
        if len(body) < _WORTH * len(plane):
            return Plane(PlaneKind.ZSTD, 0, body)
    return Plane(PlaneKind.RAW, 0, plane.data)


def unpack_plane(plane: Plane, elements: int) -> U8 | int:
    """The plane's bytes, or the one value that all of them have.

    Raises:
        CodecError: it is not `elements` bytes.
    """
    if plane.kind == PlaneKind.CONSTANT:
        return plane.value
    if plane.kind == PlaneKind.RAW:
        body = plane.body
        if len(body) != elements:
            raise CodecError(
                f"an encoded chunk is malformed: a plane of {len(body)} bytes for {elements} numbers"
            )
        return np.frombuffer(body, np.uint8)
    return np.frombuffer(decompress(plane.body, elements), np.uint8)


def worth_compressing(plane: U8) -> bool:
    """Whether a sample from its middle shrinks."""
    if len(plane) < _COMPRESS_MIN:
        return False
    if len(plane) <= 2 * _SAMPLE:
        return True
    middle = len(plane) // 2
    sample = plane[middle : middle + _SAMPLE]
    return len(_zstd.compressor.compress(sample.data)) < _WORTH * _SAMPLE


def decompress(body: Buffer, size: int) -> bytes:
    """Exactly `size` bytes; nothing is allocated for a body that claims another size.

    Raises:
        CodecError: damaged, or of another size.
    """
    try:
        claimed = zstandard.get_frame_parameters(body).content_size
        if claimed != size:
            raise CodecError(f"an encoded chunk is malformed: a plane claims {claimed} bytes, not {size}")
        data = _zstd.decompressor.decompress(body, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CodecError(f"an encoded chunk is malformed: {error}") from None
    if len(data) != size:
        raise CodecError(f"an encoded chunk is malformed: a plane has {len(data)} bytes, not {size}")
    return data


def cost(values: Any, width: int) -> float:
    """Bytes per number that a sample of unsigned integers would take."""
    splitter = PlaneSplitter(SCRATCH.bytes("cost", len(values) * width), len(values), width)
    splitter.add(0, values)
    return sum(len(p.body) for p in splitter.planes()) / max(1, len(values))
