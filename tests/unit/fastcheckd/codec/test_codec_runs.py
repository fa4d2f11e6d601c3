"""Single runs: the codec that fits is found on a sample, and never costs more than the bytes."""

import numpy as np
import pytest
from codec_helpers import gaussian, noise, run
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.format import CodecId
from fastcheckd.codec.runs import decode_run, encode_run, is_same, raw, reverse_run
from fastcheckd.codec.scratch import BLOCK


def codec_of(new, base, dtype=DType.FLOAT32, rows=0):
    """Codec of a run in the middle of a chunk, after a round trip both ways."""
    n = len(new) // dtype.bytes
    pad = b"\x11" * 24
    new, base = pad + new + pad, None if base is None else pad + base + pad
    own = run(24, n, dtype, rows=rows)
    section = encode_run(own, new, base)
    assert section.encoded_bytes <= raw(own, new).encoded_bytes
    out = bytearray(b"\x11" * len(new))
    decode_run(section, base, out)
    assert out == new
    if base is not None:
        back = reverse_run(section, own, base, new)
        decode_run(back, new, out)
        assert out == base
        assert back.encoded_bytes <= section.encoded_bytes + len(new)
    return section.codec


def test_each_codec_where_it_fits():
    w = gaussian(5000, 1).tobytes()
    near = (gaussian(5000, 1) * np.float32(1.00001)).tobytes()
    assert codec_of(w, w) == CodecId.SAME
    assert codec_of(near, w) == CodecId.DELTA
    assert codec_of(w, None) == CodecId.PLANES
    assert codec_of(w, noise(20_000)) == CodecId.PLANES
    assert codec_of(noise(20_000), None) == CodecId.RAW
    assert codec_of(noise(20_000), noise(20_000, 1)) == CodecId.RAW


@pytest.mark.parametrize("changed", [1, 10, 49, 50, 51, 99, 100])
def test_rows_are_sent_one_by_one_up_to_half_of_them(changed):
    base = gaussian(100 * 64, 1)
    new = base.copy().reshape(100, 64)
    new[np.argsort(gaussian(100, 5))[:changed]] += np.float32(1e-3)
    expected = CodecId.ROWS if changed <= 50 else CodecId.DELTA
    assert codec_of(new.tobytes(), base.tobytes(), rows=64) == expected


def test_first_and_last_row():
    base = gaussian(100 * 16, 1)
    for row in (0, 99):
        new = base.copy()
        new[16 * row : 16 * row + 16] = -1
        assert codec_of(new.tobytes(), base.tobytes(), rows=16) == CodecId.ROWS


@pytest.mark.parametrize("rows", [0, 1, 7, 33, 3200, 6400, 6401, 2**32 - 1])
def test_rows_that_do_not_fit_the_run_are_no_rows(rows):
    base = gaussian(6400, 1)
    new = base.copy()
    new[5] = 3
    assert codec_of(new.tobytes(), base.tobytes(), rows=rows) in (
        [CodecId.ROWS] if rows == 3200 else [CodecId.DELTA]
    )


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("row_bytes", [32, 40, 72, 33])
def test_rows_of_any_dtype(dtype, row_bytes):
    if row_bytes % dtype.bytes:
        row_bytes = 32
    base = noise(row_bytes * 200)
    new = base[: row_bytes * 150] + noise(row_bytes, 4) + base[row_bytes * 151 :]
    assert codec_of(new, base, dtype, rows=row_bytes // dtype.bytes) == CodecId.ROWS


@given(n=st.integers(1, 40), salt=st.integers(0, 1000), dtype=st.sampled_from(list(DType)))
def test_a_small_run_never_costs_more_than_its_bytes(n, salt, dtype):
    base = noise(n * dtype.bytes, salt)
    codec_of(bytes(n * dtype.bytes), base, dtype, rows=max(1, 32 // dtype.bytes))
    codec_of(base, bytes(n * dtype.bytes), dtype)
    codec_of(base, None, dtype)


def test_sameness_is_seen_to_the_last_byte():
    n = 9 * BLOCK + 1
    a = bytearray(noise(n))
    b = bytes(a)
    assert is_same(run(0, n, DType.BYTES), a, b)
    a[-1] ^= 1
    assert not is_same(run(0, n, DType.BYTES), a, b)
    assert is_same(run(0, n - 1, DType.BYTES), a, b)
    assert is_same(run(n, 0, DType.BYTES), a, b)
