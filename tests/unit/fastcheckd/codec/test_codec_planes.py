"""Planes: any integers come back; noise is not compressed, what repeats is, and no body is believed."""

import numpy as np
import pytest
import zstandard
from codec_helpers import mixed, noise
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.codec.format import Plane, PlaneKind
from fastcheckd.codec.integers import SIGNED
from fastcheckd.codec.planes import PlaneMerger, PlaneSplitter, cost, decompress, pack_plane, unpack_plane
from fastcheckd.errors import CodecError


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    bits=st.lists(st.integers(0, 64), min_size=5, max_size=5),
)
def test_blocks_of_any_magnitude_come_back(width, sizes, bits):
    kind = np.dtype(SIGNED[width])
    blocks = []
    for size, magnitude in zip(sizes, bits, strict=False):
        numbers = mixed(size, magnitude) >> np.uint64(64 - max(1, min(magnitude, 8 * width)))
        blocks.append((numbers * np.uint64(magnitude > 0)).astype(f"u{width}").view(kind))
    n = sum(sizes)
    splitter = PlaneSplitter(np.full(n * width, 0xAA, np.uint8), n, width)
    at = 0
    for block in blocks:
        splitter.add(at, block)
        at += len(block)
    merger = PlaneMerger(splitter.planes(), n, width)
    out = np.full(n, -1, kind)
    for start in range(0, n, 100):
        merger.block(start, min(start + 100, n), out[start : start + 100])
    assert (out == np.concatenate(blocks)).all()


def test_planes_are_as_cheap_as_they_can_be():
    assert pack_plane(np.full(1000, 7, np.uint8)) == Plane(PlaneKind.CONSTANT, 7)
    assert pack_plane(np.frombuffer(noise(1000), np.uint8)).kind == PlaneKind.RAW
    skewed = np.frombuffer(noise(50_000), np.uint8) & 3
    packed = pack_plane(skewed)
    assert packed.kind == PlaneKind.ZSTD
    assert len(packed.body) < 15_000
    assert (unpack_plane(packed, 50_000) == skewed).all()
    # Same at both ends, not between.
    tricky = np.zeros(10, np.uint8)
    tricky[5] = 1
    assert pack_plane(tricky).kind == PlaneKind.RAW


def test_a_body_of_another_size_is_refused():
    body = zstandard.ZstdCompressor().compress(bytes(1000))
    assert decompress(body, 1000) == bytes(1000)
    for size in (0, 1, 999, 1001, 1 << 24):
        with pytest.raises(CodecError):
            decompress(body, size)
    for bad in (
        b"",
        b"x",
        body[:-1],
        body[:5],
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(9)),
    ):
        with pytest.raises(CodecError):
            decompress(bad, 9)
    with pytest.raises(CodecError, match="a plane of 9 bytes for 10 numbers"):
        unpack_plane(Plane(PlaneKind.RAW, 0, bytes(9)), 10)
    for count in (0, 3, 5):
        with pytest.raises(CodecError, match="planes for numbers"):
            PlaneMerger((Plane(PlaneKind.CONSTANT),) * count, 10, 4)


def test_cost_is_bytes_per_number():
    assert cost(np.zeros(1000, np.int32), 4) == 0
    assert cost(np.frombuffer(noise(4000), np.int32), 4) == 4
    assert cost(np.full(1, 1, np.int32), 4) == 0
