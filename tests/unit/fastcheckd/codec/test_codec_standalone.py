"""Encoding without a base and without a layout: smaller where bits repeat, never wrong, never larger."""

from __future__ import annotations

import numpy as np
import pytest

from fastcheckd.codec.decoder import decode, read_header
from fastcheckd.codec.standalone import encode_alone
from fastcheckd.digests import chunk_digest

ELEMENTS = 1 << 18


def normal(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=ELEMENTS) * scale).astype(np.float32)


def round_trip(data: bytes) -> int | None:
    """Encoded bytes, once they have been turned back into the same bytes."""
    encoded = encode_alone(data, step=7, digest=chunk_digest(data))
    if encoded is None:
        return None
    assert not read_header(encoded.payload).needs_base
    out = bytearray(b"\xa5" * len(data))
    decode(encoded.payload, None, out)
    assert out == data
    return len(encoded.payload)


def test_a_chunk_of_weights_and_moments_loses_a_seventh_without_being_told_what_it_is():
    data = np.concatenate([normal(1, 0.02), normal(2, 1e-4), normal(3, 1e-4) ** 2]).tobytes()
    size = round_trip(data)
    assert size is not None
    assert size < 0.88 * len(data)


def test_what_a_lossy_coding_left_zero_costs_nothing():
    moments = (normal(1).view(np.uint32) & 0xFFFE0000).view(np.float32)
    data = np.concatenate([normal(2, 0.02), moments]).tobytes()
    size = round_trip(data)
    assert size is not None
    assert size < 0.65 * len(data)


def test_numbers_of_two_bytes_are_taken_for_that():
    data = (normal(1, 0.02).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    size = round_trip(data)
    assert size is not None
    assert size < 0.85 * len(data)


@pytest.mark.parametrize("extra", [1, 2, 3])
def test_bytes_behind_the_last_whole_number_come_along(extra: int):
    assert round_trip(normal(1, 0.02).tobytes() + b"\x01\x02\x03"[:extra]) is not None


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_short_chunks_are_left_as_they_are_or_come_back(size: int):
    round_trip(bytes(range(size)))


def test_noise_is_left_as_it_is():
    assert round_trip(np.random.default_rng(0).bytes(1 << 20)) is None


def test_not_a_number_and_signed_zero_keep_their_bits():
    bits = normal(1, 0.02).view(np.uint32).copy()
    bits[::7], bits[::11], bits[::13] = 0x7FC00123, 0x80000000, 0xFF800000
    assert round_trip(bits.tobytes()) is not None
