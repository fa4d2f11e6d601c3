"""Dtypes, and numbers as integers: every bit pattern comes back, close floats are close integers."""

import numpy as np
import pytest
from codec_helpers import SPECIALS, noise

from fastcheckd.codec.dtypes import BY_NAME, DType
from fastcheckd.codec.integers import SIGNED, UNSIGNED, signed, to_ordered, unzigzag, zigzag


def test_every_name_has_a_format_of_its_size():
    torch = pytest.importorskip("torch")
    for name, dtype in BY_NAME.items():
        kind = getattr(torch, name)
        assert torch.empty(0, dtype=kind).element_size() == dtype.bytes
        assert dtype.is_float == kind.is_floating_point


def test_numbers_of_formats_never_change():
    assert [(d.name, d.value) for d in DType] == [
        ("BYTES", 0), ("FLOAT32", 1), ("BFLOAT16", 2), ("FLOAT16", 3), ("FLOAT64", 4),
        ("INT8", 5), ("INT16", 6), ("INT32", 7), ("INT64", 8),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_zigzag_and_order_come_back_for_all_bits(width):
    bits = np.frombuffer(noise(8000) + bytes(16) + b"\xff" * 16 + b"\x80" * 16, SIGNED[width])
    if width <= 2:
        bits = np.arange(1 << 8 * width).astype(UNSIGNED[width]).view(SIGNED[width])
    mask, values = np.empty_like(bits), bits.copy()
    zigzag(values, mask)
    unzigzag(values, mask)
    assert (values == bits).all()
    out = np.empty_like(bits)
    to_ordered(bits, out, mask)
    to_ordered(out, out, mask)
    assert (out == bits).all()


def test_zigzag_makes_small_of_either_sign_small():
    values = np.array([0, -1, 1, -2, 2, -128, 127], np.int8)
    zigzag(values, np.empty_like(values))
    assert values.view(np.uint8).tolist() == [0, 1, 2, 3, 4, 255, 254]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.FLOAT64])
def test_ordered_integers_are_ordered_as_the_floats(dtype):
    kind = np.dtype(f"f{dtype.bytes}")
    floats = np.array(SPECIALS[dtype], UNSIGNED[dtype.bytes]).view(kind)
    floats = np.sort(floats[~np.isnan(floats)])
    bits = floats.view(SIGNED[dtype.bytes])
    ordered = np.empty_like(bits)
    to_ordered(bits, ordered, np.empty_like(bits))
    zero = floats == 0  # which of the two zeros comes first, sorting floats does not say
    assert (np.diff(ordered[~zero].astype(object)) > 0).all()


def test_a_run_is_a_view_of_its_chunk():
    chunk = bytearray(range(64))
    view = signed(chunk, DType.INT16, 10, 3)
    view[0] = -1
    assert chunk[10:12] == b"\xff\xff"
    assert signed(b"", DType.BYTES, 0, 0).size == 0
