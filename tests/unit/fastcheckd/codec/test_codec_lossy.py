"""Lossy coding: bounds hold for any input, second moments never vanish, and what is coded comes back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.bounded import standard_deviation
from fastcheckd.codec.chunk_plan import ChunkPlan, Run, Unit
from fastcheckd.codec.codebooks import BOOKS, GROUP
from fastcheckd.codec.decoder import decode, reverse
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.encoder import Encoded, encode
from fastcheckd.codec.format import CodecId, Plane, PlaneKind, Section, pack, parse
from fastcheckd.codec.lossy import quantise
from fastcheckd.codec.rounded import round_to
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import CodecError

INDEX8, INDEX4 = pb.MOMENTUM_CODING_INDEX8, pb.MOMENTUM_CODING_INDEX4
CODEC = {INDEX8: CodecId.INDEX8, INDEX4: CodecId.INDEX4}
W, M, V = pb.ROLE_PARAM, pb.ROLE_EXP_AVG, pb.ROLE_EXP_AVG_SQ

codings = st.sampled_from([INDEX8, INDEX4])
float_dtypes = st.sampled_from([DType.FLOAT32, DType.BFLOAT16])


def bits_of(kind: str, size: int, rng: Any) -> Any:
    """Float32 bits (int32) of one kind of numbers."""
    if kind == "any":
        return rng.integers(0, 2**32, size, np.uint32).view(np.int32)
    if kind == "denormal":
        return rng.integers(0, 2**23, size, np.int32)
    if kind == "wide":
        numbers = np.exp2(rng.uniform(-149, 127.99, size))
    else:
        scale = {"zero": 0.0, "small": 1e-12, "usual": 1e-2, "huge": 3e37}[kind]
        numbers = rng.standard_normal(size).clip(-10, 10) * scale
    if kind == "usual" and rng.integers(4) == 0:
        numbers[:] = numbers[0]
    return numbers.astype(np.float32).view(np.int32)


@st.composite
def numbers(draw: st.DrawFn) -> Any:
    """Float32 bits: stretches of different kinds, ragged."""
    kinds = st.sampled_from(["any", "denormal", "wide", "zero", "small", "usual", "huge"])
    stretches = draw(
        st.lists(st.tuples(kinds, st.integers(1, 400), st.integers(0, 2**32)), min_size=1, max_size=4)
    )
    return np.concatenate([bits_of(k, n, np.random.default_rng(seed)) for k, n, seed in stretches])


def chunk_of(
    runs: list[tuple[Any, DType, Any]], momentum: Any = 0, bound: float = 0.0
) -> tuple[bytearray, ChunkPlan]:
    """A chunk of one unit from (bits, dtype, role) of its runs."""
    placed, data = [], bytearray()
    for bits, dtype, role in runs:
        data += bytes(-len(data) % 64)
        placed.append(Run(len(data), len(bits), dtype, role))
        data += bits.tobytes()
    precision = pb.Precision(momentum=momentum, weights_bound=bound)
    return data, ChunkPlan(len(data), (Unit(tuple(placed)),), precision)


def narrowed(bits: Any, dtype: DType) -> Any:
    """The numbers' bits as `dtype`, by cutting."""
    return bits if dtype == DType.FLOAT32 else (bits >> 16).astype(np.int16)


def floats(data: Any, run: Run) -> Any:
    """A copy of the run as float64."""
    if run.dtype == DType.BFLOAT16:
        wide = np.frombuffer(data, np.int16, run.elements, run.offset).astype(np.int32) << 16
        with np.errstate(invalid="ignore"):
            return wide.view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.frombuffer(data, np.float32, run.elements, run.offset).astype(np.float64)


def bits_in(data: Any, run: Run) -> Any:
    """The run's bits."""
    kind = np.int32 if run.dtype == DType.FLOAT32 else np.int16
    return np.frombuffer(data, kind, run.elements, run.offset)


def quantised(data: bytearray, base: Any, plan: ChunkPlan) -> bytearray:
    """A copy, quantised."""
    result = bytearray(data)
    quantise(memoryview(result), None if base is None else memoryview(base), plan)
    return result


def encoded(data: Any, base: Any, plan: ChunkPlan) -> Encoded | None:
    """Encoded as step 2, against step 1."""
    digests = {"digest": chunk_digest(data)} | ({} if base is None else {"base_digest": chunk_digest(base)})
    return encode(data, base, plan, step=2, base_step=1, **digests)


def check_both_ways(data: Any, base: Any, plan: ChunkPlan) -> set[str]:
    """Encode, decode, turn around, decode: bit by bit. The codecs that were used."""
    made = encoded(data, base, plan)
    if made is None:
        return set()
    out = bytearray(len(data))
    decode(made.payload, base, out)
    assert out == data
    older = bytes(len(data)) if base is None else base
    back = reverse(made.payload, older, data)
    decode(back, data, out)
    assert out == older
    return {use.codec for use in made.uses}


def in_groups(values: Any) -> Any:
    """Padded with zeros to whole groups, one a row."""
    return np.pad(values, (0, -len(values) % GROUP)).reshape(-1, GROUP)


# --- moments --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(numbers(), codings, float_dtypes, st.sampled_from([V, pb.ROLE_MAX_EXP_AVG_SQ]))
def test_a_second_moment_never_becomes_zero_and_keeps_its_size(
    bits: Any, coding: Any, dtype: DType, role: Any
) -> None:
    data, plan = chunk_of([(narrowed(bits, dtype), dtype, role)], coding)
    run = plan.units[0].runs[0]
    coded = quantised(data, None, plan)
    before, after = floats(data, run), floats(coded, run)
    assert np.array_equal(before == 0, after == 0)
    assert np.array_equal(np.isfinite(before), np.isfinite(after))
    step = 2.0 ** -BOOKS[CODEC[coding], False].bits
    # What lies further below the largest of its group than codes reach is rounded up, and far below 1e-38
    # numbers have fewer bits than the book.
    largest = np.repeat(in_groups(np.nan_to_num(before)).max(axis=1), GROUP)[: len(before)]
    plain = (before > 1e-37) & (before > largest * 2.0 ** (-250 * step)) & np.isfinite(after)
    assert (np.abs(after - before)[plain] <= 0.57 * step * before[plain]).all()
    positive = (before > 0) & np.isfinite(before)
    assert (after[positive] >= before[positive] * 0.6).all()


@settings(deadline=None)
@given(numbers(), codings, float_dtypes, st.sampled_from([M, pb.ROLE_MOMENTUM]))
def test_a_first_moment_is_within_half_a_step_of_its_group(
    bits: Any, coding: Any, dtype: DType, role: Any
) -> None:
    data, plan = chunk_of([(narrowed(bits, dtype), dtype, role)], coding)
    run = plan.units[0].runs[0]
    coded = quantised(data, None, plan)
    before, after = in_groups(floats(data, run)), in_groups(floats(coded, run))
    exact = ~np.isfinite(before).all(axis=1)
    assert np.array_equal(before[exact], after[exact], equal_nan=True)
    before, after = before[~exact], after[~exact]
    assert not after[before == 0].any()
    # The largest itself may have been rounded up to the next power of two.
    largest = np.maximum(np.abs(before), np.abs(after)).max(axis=1, keepdims=True)
    half_step = np.maximum(largest, 2.0**-118) * 2.0 ** -(1 + BOOKS[CODEC[coding], True].bits)
    assert (np.abs(after - before) <= half_step).all()
    # Relative to sqrt(v), which keeps its size, no update grows to more than about twice what it was.
    assert (np.abs(after) <= 2 * np.abs(before)).all()


@settings(deadline=None)
@given(numbers(), numbers(), codings, float_dtypes)
def test_coding_moments_twice_is_coding_them_once(a: Any, b: Any, coding: Any, dtype: DType) -> None:
    data, plan = chunk_of([(narrowed(a, dtype), dtype, M), (narrowed(b, dtype), dtype, V)], coding)
    once = quantised(data, None, plan)
    assert quantised(once, None, plan) == once


@settings(deadline=None)
@given(numbers(), codings, float_dtypes, st.sampled_from([M, V]))
def test_a_group_with_a_nan_or_an_infinity_stays_as_it_is(
    bits: Any, coding: Any, dtype: DType, role: Any
) -> None:
    bits = np.resize(bits, GROUP + len(bits))
    bits[GROUP // 2] = 0x7FC10000
    data, plan = chunk_of([(narrowed(bits, dtype), dtype, role)], coding)
    run = plan.units[0].runs[0]
    assert np.array_equal(bits_in(quantised(data, None, plan), run)[:GROUP], bits_in(data, run)[:GROUP])


@pytest.mark.parametrize(("coding", "m_ratio", "v_ratio"), [(INDEX8, 4.2, 4.5), (INDEX4, 7.0, 5.5)])
def test_moments_take_as_little_as_promised(coding: Any, m_ratio: float, v_ratio: float) -> None:
    rng = np.random.default_rng(1)
    m = (rng.standard_normal(100_000) * 1e-3).astype(np.float32)
    v = (rng.standard_normal(100_000) ** 2 * 1e-6).astype(np.float32)
    for numbers_, role, ratio in ((m, M, m_ratio), (v, V, v_ratio)):
        data, plan = chunk_of([(numbers_.view(np.int32), DType.FLOAT32, role)], coding)
        data = quantised(data, None, plan)
        assert check_both_ways(data, None, plan) == {CODEC[coding].label}
        made = encoded(data, None, plan)
        assert made is not None and len(data) / len(made.payload) > ratio


# --- weights --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(numbers(), numbers(), st.sampled_from([1e-6, 1e-3, 0.1, 1.0]), st.sampled_from([0.0, 1e-3, 1.0]))
def test_every_weight_is_within_the_bound_whatever_it_is(a: Any, b: Any, bound: float, share: float) -> None:
    base_bits = np.resize(b, len(a))
    with np.errstate(all="ignore"):
        mixed = base_bits.view(np.float32) + np.float32(share) * a.view(np.float32)
    data, plan = chunk_of([(mixed.view(np.int32), DType.FLOAT32, W)], bound=bound)
    base = base_bits.tobytes()
    run = plan.units[0].runs[0]
    coded = quantised(data, base, plan)
    before, after = floats(data, run), floats(coded, run)
    finite = np.isfinite(before)
    deviation = before[finite].std() if finite.any() else 0.0
    changed = bits_in(coded, run) != bits_in(data, run)
    assert finite[changed].all()
    assert (np.abs(after[changed] - before[changed]) <= bound * deviation * (1 + 1e-9)).all()
    check_both_ways(coded, base, plan)


def trained(rng: Any, size: int) -> tuple[Any, Any]:
    """Weights, and what they were some steps before."""
    base = (rng.standard_normal(size) * 0.02).astype(np.float32)
    return base + (rng.standard_normal(size) * 4e-4).astype(np.float32), base


def test_the_bound_holds_where_it_is_about_a_unit_in_the_last_place() -> None:
    # There the sum's own rounding can carry a number over the bound that the step was within.
    rng = np.random.default_rng(11)
    unit = float(np.spacing(np.float32(1000)))
    for bound_units in np.linspace(0.3, 3, 40):
        deviation = bound_units * unit / 1e-2
        w, base = ((1000 + rng.standard_normal(4000) * deviation).astype(np.float32) for _ in range(2))
        data, plan = chunk_of([(w.view(np.int32), DType.FLOAT32, W)], bound=1e-2)
        coded = quantised(data, base.tobytes(), plan)
        errors = np.abs(np.frombuffer(coded, np.float32).astype(np.float64) - w)
        assert (errors <= 1e-2 * w.astype(np.float64).std() * (1 + 1e-9)).all()
        check_both_ways(coded, base.tobytes(), plan)


def test_a_few_numbers_that_no_step_reaches_travel_beside() -> None:
    w, base = trained(np.random.default_rng(2), 70_001)
    w[[0, 33_000, 70_000]] = np.nan, np.inf, 1e30
    base[[5, 40_000]] = np.nan, -np.inf
    w[10] = -0.0
    data, plan = chunk_of([(w.view(np.int32), DType.FLOAT32, W)], bound=1e-3)
    # The one huge number makes the deviation huge; without it, the coding is an ordinary one.
    coded = quantised(data, base.tobytes(), plan)
    check_both_ways(coded, base.tobytes(), plan)
    w[70_000] = 0.5
    data, plan = chunk_of([(w.view(np.int32), DType.FLOAT32, W)], bound=1e-3)
    coded = quantised(data, base.tobytes(), plan)
    run = plan.units[0].runs[0]
    for index in (0, 33_000, 5, 40_000):
        assert bits_in(coded, run)[index] == bits_in(data, run)[index]
    assert check_both_ways(coded, base.tobytes(), plan) == {"bounded"}
    made = encoded(coded, base.tobytes(), plan)
    assert made is not None and len(coded) / len(made.payload) > 4


@pytest.mark.parametrize("value", [0.0, 0.1, np.nan, np.inf])
def test_a_run_without_deviation_stays_exact(value: float) -> None:
    w = np.full(1000, value, np.float32)
    base = np.full(1000, 0.25, np.float32)
    data, plan = chunk_of([(w.view(np.int32), DType.FLOAT32, W)], bound=1.0)
    assert standard_deviation(w) == 0
    assert quantised(data, base.tobytes(), plan) == data
    check_both_ways(data, base.tobytes(), plan)


def test_without_a_base_weights_stay_exact_this_time() -> None:
    w, _ = trained(np.random.default_rng(3), 5000)
    data, plan = chunk_of([(w.view(np.int32), DType.FLOAT32, W)], bound=1e-3)
    assert quantised(data, None, plan) == data
    check_both_ways(data, None, plan)


def test_fifty_lossy_steps_drift_no_further_than_one() -> None:
    rng = np.random.default_rng(4)
    truth = (rng.standard_normal(20_000) * 0.02).astype(np.float32)
    held: bytearray = bytearray(truth.tobytes())
    for _ in range(50):
        truth = truth + (rng.standard_normal(len(truth)) * 1e-5).astype(np.float32)
        data, plan = chunk_of([(truth.view(np.int32), DType.FLOAT32, W)], bound=1e-2)
        coded = quantised(data, held, plan)
        assert check_both_ways(coded, held, plan) <= {"bounded", "same"}
        held = coded
        error = np.abs(np.frombuffer(held, np.float32).astype(np.float64) - truth)
        assert 0 < error.max() <= 1e-2 * truth.astype(np.float64).std() * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_a_copy_that_was_its_masters_rounding_is_so_again(dtype: DType) -> None:
    w, base_w = trained(np.random.default_rng(5), 40_000)
    runs = []
    for numbers_ in (w, base_w):
        bits = numbers_.view(np.int32)
        copy = np.concatenate([round_to(dtype, bits[:30_000]).copy(), round_to(dtype, bits[30_000:]).copy()])
        runs.append([(bits, DType.FLOAT32, W), (copy, dtype, pb.ROLE_LOW_PRECISION_PARAM)])
    data, plan = chunk_of(runs[0], bound=1e-2)
    base, _ = chunk_of(runs[1])
    coded = quantised(data, base, plan)
    low = plan.units[0].runs[1]
    assert not np.array_equal(bits_in(coded, low), bits_in(data, low))
    assert check_both_ways(coded, base, plan) == {"bounded", "rounded"}

    other = runs[0][1][0].copy()
    other[7] ^= 1
    data, plan = chunk_of([runs[0][0], (other, dtype, pb.ROLE_LOW_PRECISION_PARAM)], bound=1e-2)
    coded = quantised(data, base, plan)
    assert np.array_equal(bits_in(coded, low), other), "a copy of its own is nobody's to change"
    check_both_ways(coded, base, plan)


# --- chunks ---------------------------------------------------------------------------------------


def state(
    seed: int, size: int = 5000, *, momentum: Any = INDEX8, bound: float = 1e-3
) -> tuple[bytearray, bytes, ChunkPlan]:
    """A quantised chunk of w, m, v, its base, and the plan."""
    rng = np.random.default_rng(seed)
    w, base_w = trained(rng, size)
    m = (rng.standard_normal(size) * 1e-3).astype(np.float32)
    v = (rng.standard_normal(size) ** 2 * 1e-6).astype(np.float32)
    m[300], v[700] = np.inf, np.nan
    roles = (W, M, V)
    new = [(x.view(np.int32), DType.FLOAT32, role) for x, role in zip((w, m, v), roles, strict=True)]
    old = [
        (x.view(np.int32), DType.FLOAT32, role)
        for x, role in zip((base_w, m[::-1].copy(), v), roles, strict=True)
    ]
    data, plan = chunk_of(new, momentum, bound)
    base = bytes(chunk_of(old)[0])
    return quantised(data, base, plan), base, plan


@settings(deadline=None)
@given(numbers(), numbers(), numbers(), codings, float_dtypes, st.booleans())
def test_what_was_quantised_comes_back_bit_for_bit(
    a: Any, b: Any, c: Any, coding: Any, dtype: DType, with_base: bool
) -> None:
    m, v = narrowed(np.resize(b, len(a)), dtype), narrowed(np.resize(c, len(a)), dtype)
    data, plan = chunk_of([(a, DType.FLOAT32, W), (m, dtype, M), (v, dtype, V)], coding, 1e-2)
    base = bytes(quantised(data, None, plan)[::-1]) if with_base else None
    check_both_ways(quantised(data, base, plan), base, plan)


@settings(deadline=None)
@given(numbers(), numbers(), codings)
def test_bytes_that_nobody_quantised_come_back_all_the_same(a: Any, b: Any, coding: Any) -> None:
    b = np.resize(b, len(a))
    runs = [(a, DType.FLOAT32, W), (b, DType.FLOAT32, M), (a[::-1].copy(), DType.FLOAT32, V)]
    data, plan = chunk_of(runs, coding, 1e-3)
    check_both_ways(data, bytes(len(data)), plan)
    check_both_ways(data, None, plan)


def test_only_what_was_asked_for_is_lost() -> None:
    data, _, plan = state(6)
    rng = np.random.default_rng(7)
    noise = bytearray(rng.bytes(len(data)))
    for precision in (None, pb.Precision(), pb.Precision(momentum=pb.MOMENTUM_CODING_EXACT)):
        assert quantised(noise, data, replace(plan, precision=precision)) == noise
    units = tuple(Unit((replace(run, role=pb.ROLE_UNSPECIFIED),)) for run in plan.units[0].runs)
    assert quantised(noise, data, replace(plan, units=units)) == noise
    halves = tuple(
        Unit((replace(run, dtype=DType.FLOAT16, elements=run.elements * 2),)) for run in plan.units[0].runs
    )
    assert quantised(noise, data, replace(plan, units=halves)) == noise


def test_a_lossy_unit_uses_its_codecs() -> None:
    data, base, plan = state(8)
    assert check_both_ways(data, base, plan) == {"bounded", "index8"}


def test_rows_that_did_not_change_are_not_sent() -> None:
    rng = np.random.default_rng(9)
    m = (rng.standard_normal((1000, 64)) * 1e-3).astype(np.float32)
    data, plan = chunk_of([(m.ravel().view(np.int32), DType.FLOAT32, M)], INDEX8)
    plan = replace(plan, units=(Unit((replace(plan.units[0].runs[0], row_elements=64),)),))
    base = quantised(data, None, plan)
    newer = bytearray(base)
    newer[256 * 500 : 256 * 502] = rng.standard_normal(128).astype(np.float32).tobytes()
    newer = quantised(newer, base, plan)
    assert check_both_ways(newer, base, plan) == {"rows"}


# --- malformed ------------------------------------------------------------------------------------


def lossy_sections(momentum: Any) -> tuple[Any, list[Section], bytes, int]:
    """Header and sections of an encoded chunk that has all kinds of planes, its base, the chunk's size."""
    data, base, plan = state(10, momentum=momentum)
    run = plan.units[0].runs[0]
    bits = np.frombuffer(data, np.int32, run.elements, run.offset)
    bits[[1, 4000]] = 0x7FC00000
    made = encoded(data, base, plan)
    assert made is not None
    header, sections = parse(made.payload)
    codecs = [section.codec for section in sections]
    assert codecs == [CodecId.BOUNDED, CODEC[momentum], CODEC[momentum]]
    assert [len(section.planes) for section in sections] == [12, 6, 7]
    return header, sections, base, len(data)


@st.composite
def damaged(draw: st.DrawFn, section: Section) -> Section:  # noqa: PLR0911  one damage each
    """A section that is well-formed as the format goes, but for its codec wrong in one thing."""
    what = draw(
        st.sampled_from(
            ["extra", "cut extra", "drop", "double", "plane", "dtype", "elements", "flags", "codec"]
        )
    )
    planes = list(section.planes)
    at = draw(st.integers(0, len(planes) - 1))
    if what == "extra":
        extra = bytearray(section.extra)
        extra[draw(st.integers(0, len(extra) - 1))] ^= draw(st.integers(1, 255))
        return replace(section, extra=bytes(extra))
    if what == "cut extra":
        return replace(section, extra=section.extra[: draw(st.integers(0, len(section.extra) - 1))])
    if what == "drop":
        del planes[at]
    elif what == "double":
        planes.insert(at, planes[at])
    elif what == "plane":
        body = draw(st.binary(min_size=1, max_size=64))
        constant = Plane(PlaneKind.CONSTANT, draw(st.integers(0, 255)))
        planes[at] = draw(
            st.sampled_from([Plane(PlaneKind.RAW, 0, body), Plane(PlaneKind.ZSTD, 0, body), constant])
        )
    elif what == "dtype":
        return replace(section, dtype=draw(st.sampled_from([DType.BYTES, DType.BFLOAT16, DType.INT16])))
    elif what == "elements":
        return replace(section, elements=draw(st.integers(1, section.elements - 1)))
    elif what == "flags":
        return replace(section, flags=1)
    else:
        return replace(section, codec=draw(st.sampled_from([c for c in CodecId if c != section.codec])))
    return replace(section, planes=tuple(planes))


@pytest.mark.parametrize("momentum", [INDEX8, INDEX4])
def test_a_malformed_section_is_an_error_and_nothing_else(momentum: Any) -> None:
    header, sections, base, size = lossy_sections(momentum)

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(sections) - 1))
        wrong = data.draw(damaged(sections[which]))
        payload = pack(header, [*sections[:which], wrong, *sections[which + 1 :]])
        out = bytearray(size)
        try:
            decode(payload, base, out)
        except CodecError:
            return
        # Some damage is none: what decodes is the chunk, or the digest would have told.
        assert chunk_digest(out) == header.digest

    check()


def test_claims_of_exact_numbers_are_checked() -> None:
    header, sections, base, size = lossy_sections(INDEX8)
    bounded, m, v = sections
    far = Plane(PlaneKind.CONSTANT, 255)
    for wrong in (
        replace(bounded, planes=(*bounded.planes[:7], far, *bounded.planes[8:])),
        replace(bounded, planes=bounded.planes[:4]),
        replace(bounded, extra=b"\0\0\xc0\x7f" + bounded.extra[4:]),
        replace(bounded, extra=bounded.extra[:4] + b"\xff\xff\xff\x7f"),
        replace(m, extra=b"\x02" + m.extra[1:]),
        replace(m, extra=m.extra[:4] + b"\x02\0\0\0"),
        replace(m, extra=m.extra[:4] + bytes(4), planes=m.planes[:2]),
        replace(v, planes=(v.planes[0], far, far, *v.planes[3:])),
    ):
        others = [s for s in (bounded, m, v) if s.offset != wrong.offset]
        with pytest.raises(CodecError, match="malformed"):
            decode(pack(header, [*others, wrong]), base, bytearray(size))


def test_a_bounded_section_needs_its_base() -> None:
    header, sections, _, size = lossy_sections(INDEX8)
    alone = replace(header, needs_base=False, base_digest=bytes(16))
    with pytest.raises(CodecError, match="needs a base"):
        decode(pack(alone, sections), None, bytearray(size))
