"""What anybody could use instead: general compressors on the same bytes, chunk by chunk, one thread, no base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import blosc2
import numpy as np
import numpy.typing as npt
import zstandard

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Compressor:
    """A compressor: `compress(bytes, size of a number in them)`, `decompress(compressed, out)` into warm memory."""

    name: str
    compress: Callable[[Bytes, int], bytes]
    decompress: Callable[[bytes, Bytes], None]


def _zstd(level: int) -> Compressor:
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def compress(data: Bytes, number_bytes: int) -> bytes:
        return compressor.compress(data.data)

    def decompress(data: bytes, out: Bytes) -> None:
        with decompressor.stream_reader(data) as reader:  # its `decompress` would allocate
            assert reader.readinto(out.data) == len(out)

    return Compressor(f"zstd -{level}", compress, decompress)


def _blosc2(name: str, settings: dict[str, Any], filters: Callable[[int], dict[str, Any]]) -> Compressor:
    def compress(data: Bytes, number_bytes: int) -> bytes:
        compressed = blosc2.compress2(
            data, typesize=number_bytes, nthreads=1, **settings, **filters(number_bytes)
        )
        return bytes(compressed)

    def decompress(data: bytes, out: Bytes) -> None:
        blosc2.decompress2(data, dst=out, nthreads=1)

    return Compressor(name, compress, decompress)


def _bytedelta(number_bytes: int) -> dict[str, Any]:
    last = [blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA]
    return {"filters": [blosc2.Filter.NOFILTER] * 4 + last, "filters_meta": [0] * 5 + [number_bytes]}


COMPRESSORS = (
    _zstd(1),
    _zstd(3),
    _blosc2("blosc2", {}, lambda _: {}),
    _blosc2("blosc2 bytedelta, zstd -1", {"codec": blosc2.Codec.ZSTD, "clevel": 1}, _bytedelta),
)
