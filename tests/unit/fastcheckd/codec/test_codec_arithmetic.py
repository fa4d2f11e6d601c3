"""What prediction rests on: one rounding an operation, to nearest even, denormals kept, one NaN for all."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from codec_helpers import LOW, PARAM, SPECIALS, gaussian, mixed, run

from fastcheckd.codec import adam, sgd
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.rounded import encode_rounded, round_to

F32 = np.float32
TINY = np.float32(1e-45)


def nearest(exact: Fraction) -> np.float32:
    """The float32 next to a rational number, to even between two; no arithmetic of this machine's in it."""
    if exact == 0:
        return F32(0)
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    count = magnitude / quantum
    whole, rest = divmod(count.numerator, count.denominator)
    twice = 2 * rest - count.denominator
    whole += twice > 0 or (twice == 0 and whole % 2)
    value = whole * quantum
    if value >= Fraction(2) ** 128:
        return F32(math.copysign(math.inf, exact))
    return F32(math.copysign(float(value), exact))


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of finite float32: any bits, near ones, and denormal ones."""
    bits = mixed(6000, 3).view(np.uint32)
    bits = bits[(bits & 0x7F800000) != 0x7F800000][:6000].copy()
    bits[:1000] &= np.uint32(0x807FFFFF)  # denormal
    bits[1000:3000] = (bits[1000:3000] & np.uint32(0x83FFFFFF)) | np.uint32(0x3C000000)  # near each other
    values = bits.view(F32)
    return values[0::2].copy(), values[1::2].copy()


OPERATIONS = {
    "add": (np.add, lambda a, b: a + b),
    "subtract": (np.subtract, lambda a, b: a - b),
    "multiply": (np.multiply, lambda a, b: a * b),
    "divide": (np.divide, lambda a, b: a / b),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("scalar", [False, True])
def test_an_operation_rounds_once(name, scalar):
    operation, exact = OPERATIONS[name]
    a, b = samples()
    if name == "divide":
        b = np.where(b == 0, F32(1), b)
    if scalar:
        b[:] = b[7]
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        operation(a, b[7] if scalar else b, out=out)
    assert out.dtype == F32
    for x, y, z in zip(a, b, out, strict=True):
        wanted = nearest(exact(Fraction(float(x)), Fraction(float(y))))
        assert wanted == z, (x, y, wanted, z)


def test_a_square_root_rounds_once():
    a = np.abs(samples()[0])
    for x, z in zip(a, np.sqrt(a), strict=True):
        # z is right if x lies between the squares of the middles to its neighbours.
        low = (Fraction(float(z)) + Fraction(float(np.nextafter(z, F32(0))))) / 2
        high = (Fraction(float(z)) + Fraction(float(np.nextafter(z, F32(np.inf))))) / 2
        assert low**2 <= Fraction(float(x)) <= high**2, x


def test_doubles_become_singles_in_one_rounding():
    bits = mixed(3000, 5)
    values = ((bits >> np.uint64(12)).astype(np.float64) / 2**52 + 1) * np.float64(2) ** (
        bits % np.uint64(290)
    ).astype(int)
    values = np.concatenate(
        [values / 2.0**150, values[:100] * 0 + 1 + 2.0**-24, [1 + 3 * 2.0**-24, 2.0**-149 * 1.5]]
    )
    out = np.empty(len(values), F32)
    with np.errstate(all="ignore"):
        out[...] = values
    for x, z in zip(values, out, strict=True):
        assert nearest(Fraction(float(x))) == z


def test_denormals_are_kept():
    x = np.full(100, TINY)
    assert TINY > 0
    assert (x + x > 0).all()
    assert (np.full(100, F32(1e-38)) * F32(0.1) > 0).all()
    assert (np.full(100, F32(1e-38)) / F32(10) > 0).all()
    assert (np.sqrt(x) > 0).all()
    assert (np.full(100, 1e-45, np.float64).astype(F32) > 0).all()


@pytest.mark.parametrize("size", [1, 3, 7, 8, 15, 16, 17, 31, 33, 1000])
def test_a_prediction_has_one_nan_only(size):
    nans = [x for x in SPECIALS[DType.FLOAT32] if (x & 0x7FFFFFFF) > 0x7F800000]
    constants = adam.AdamConstants(*map(F32, (10, 0.999, 0.001, 0.001, 0.3, 1e-8, 1)))
    block, sgd_block = adam._Block(constants, size), sgd._Block(sgd.SgdConstants(0.1, -0.05), size)
    with np.errstate(all="ignore"):
        for one, two in itertools.product(nans, nans):
            a = np.full(size, one, np.uint32).view(F32)
            b = np.full(size, two, np.uint32).view(F32)
            for predicted in (
                block.next_v(a, b, a), block.previous_v(a, b, a), block.next_w(a, b, b), block.previous_w(a, b, b),
                sgd_block.next_w(a, b, a), sgd_block.previous_w(a, b, a),
            ):  # fmt: skip
                assert set(predicted.view(np.uint32).tolist()) == {0x7FC00000}
        infinite = np.full(size, np.inf, F32)
        assert set(block.previous_v(infinite, infinite, infinite).tolist()) == {0x7FC00000}
        # What is no NaN stays what it is.
        few = np.ones(size, F32)
        few[0] = np.nan
        predicted = block.next_w(few, np.zeros(size, F32), np.ones(size, F32)).view(F32)
        assert np.isnan(predicted[0])
        assert (predicted[1:] == 1).all()


def test_the_running_maximum_is_chosen_by_bits():
    patterns = np.array(SPECIALS[DType.FLOAT32], np.uint32).view(np.int32)
    new, old = np.repeat(patterns, len(patterns)), np.tile(patterns, len(patterns))
    assert (adam.next_v_max(old, new) == np.where(new > old, new, old)).all()
    a, b = np.abs(gaussian(1000, 1)), np.abs(gaussian(1000, 2))
    assert (adam.next_v_max(a.view(np.int32), b.view(np.int32)).view(F32) == np.maximum(a, b)).all()


def test_bfloat16_is_rounded_to_nearest_even():
    high = np.arange(0x7F80, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = (high << np.uint32(16)) | np.uint32(low)
        up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
        for sign in (0, 0x8000):
            found = round_to(DType.BFLOAT16, (bits | np.uint32(sign << 16)).view(np.int32)).view(np.uint16)
            assert (found == high + up + sign).all()


def test_a_copy_of_a_master_with_nans_is_never_taken_for_its_rounding_in_fp16():
    # Which NaN the conversion makes is the CPU's choice, and the other end may have another.
    n = 100
    master = gaussian(n, 1)
    for spoilt in (False, True):
        if spoilt:
            master[50] = np.nan
        chunk = master.tobytes() + master.astype(np.float16).tobytes()
        low, own = run(4 * n, n, DType.FLOAT16, LOW), run(0, n, role=PARAM)
        assert (encode_rounded(low, own, chunk) is None) == spoilt
