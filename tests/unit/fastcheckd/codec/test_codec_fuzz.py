"""The decoder trusts nothing: damage and forgery are our errors, in bounded memory and time, or do no harm."""

import random
import struct
import time
import tracemalloc
from dataclasses import replace

import pytest
from codec_helpers import noise
from fuzz import Fuzzer, attempt, bomb, repaired, seeds
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.codec.decoder import decode, decode_range, reverse
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.format import (
    SECTIONS_MAX,
    CodecId,
    Header,
    Plane,
    PlaneKind,
    Section,
    pack,
    parse,
)  # fmt: skip
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import CodecError, MispredictedError

MIB = 1 << 20


def test_twenty_thousand_damaged_and_forged_payloads():
    fuzzer = Fuzzer(seed=1)
    for index in range(20_000):
        fuzzer.check(index)
    # Forgeries must get past the parser, or the codecs behind it have not been tried at all.
    assert fuzzer.outcomes["refused"] > 2000
    assert fuzzer.outcomes["mispredicted"] > 2000
    assert fuzzer.outcomes["harmless"] > 100


def test_every_single_bit_matters():
    by_size = sorted(seeds(), key=lambda seed: len(seed.payload))
    for seed in by_size[:2]:
        for at in range(len(seed.payload)):
            for bit in range(8):
                data = bytearray(seed.payload)
                data[at] ^= 1 << bit
                with pytest.raises(CodecError):
                    decode(data, seed.base, bytearray(len(seed.new)))


@pytest.mark.parametrize("seed", seeds(), ids=lambda seed: seed.name)
def test_every_single_byte_matters_in_every_codec(seed):
    out = bytearray(len(seed.new))
    for at in range(len(seed.payload)):
        data = bytearray(seed.payload)
        data[at] ^= 0xFF
        assert isinstance(attempt(decode, data, seed.base, out), CodecError)
    for size in range(len(seed.payload)):
        assert isinstance(attempt(decode, seed.payload[:size], seed.base, out), CodecError)


@pytest.mark.parametrize("seed", [s for s in seeds() if s.base], ids=lambda seed: seed.name)
def test_another_base_is_refused_or_found_out(seed):
    other = noise(len(seed.base), 5)
    with pytest.raises(CodecError, match="other bytes"):
        decode(seed.payload, other, bytearray(len(seed.new)), base_digest=chunk_digest(other))
    if seed.name != "raw" and "rows back" not in seed.name:  # which copy nothing from it
        with pytest.raises(MispredictedError):
            decode(seed.payload, other, bytearray(len(seed.new)))
    for wrong in (None, seed.base[:-1], seed.base + b"x", b""):
        with pytest.raises(CodecError):
            decode(seed.payload, wrong, bytearray(len(seed.new)))
    for size in (0, len(seed.new) - 1, len(seed.new) + 1):
        with pytest.raises(CodecError):
            decode(seed.payload, seed.base, bytearray(size))


@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(data):
    for payload in (data, repaired(data), repaired(b"FCEC\x01\x00" + data)):
        with pytest.raises(CodecError):
            decode(payload, None, bytearray(64))
        with pytest.raises(CodecError):
            reverse(payload, bytes(64), bytes(64))


# --- memory and time ------------------------------------------------------------------------------


def peak_bytes(function, *arguments):
    attempt(function, *arguments)  # once before: working memory is kept
    tracemalloc.start()
    try:
        attempt(function, *arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forged(raw_bytes, *sections, needs_base=True):
    return pack(Header(raw_bytes, needs_base, 8, 7, bytes(16), bytes(16)), sections)


ZERO = Plane(PlaneKind.CONSTANT)


def test_a_plane_that_claims_gigabytes_costs_nothing():
    n = 1000
    for seed in range(60):
        plane = bomb(random.Random(seed), n)
        payload = forged(
            n * 4, Section(CodecId.PLANES, DType.FLOAT32, 0, n, planes=(plane, ZERO, ZERO, ZERO))
        )
        if len(payload) > n * 4:
            continue
        out = bytearray(n * 4)
        assert isinstance(attempt(decode, payload, bytes(n * 4), out), CodecError)
        assert peak_bytes(decode, payload, bytes(n * 4), out) < 256 << 10


def test_rows_of_next_to_nothing_are_refused_before_their_numbers_are_made():
    size = 4 * MIB
    for width in (1, 2, 31):
        extra = struct.pack("<IIB3x", width, size // width, CodecId.PLANES)
        section = Section(CodecId.ROWS, DType.BYTES, 0, size - size % width, 0, extra, (ZERO,) * 5)
        payload = forged(size, section)
        assert peak_bytes(decode, payload, bytes(size), bytearray(size)) < MIB
    extra = struct.pack("<IIB3x", 32, size // 32, CodecId.PLANES)
    payload = forged(size, Section(CodecId.ROWS, DType.BYTES, 0, size, 0, extra, (ZERO,) * 5))
    assert peak_bytes(decode, payload, bytes(size), bytearray(size)) < 4 * size


def test_row_numbers_that_wrap_around_are_refused():
    n, width = 6400, 64
    for gap in (0xFFFFFFFF, 0x80000000, 99, 100, 50):
        extra = struct.pack("<IIB3x", width, 3, CodecId.PLANES)
        numbers = tuple(Plane(PlaneKind.CONSTANT, b) for b in gap.to_bytes(4, "little"))
        payload = forged(n, Section(CodecId.ROWS, DType.BYTES, 0, n, 0, extra, (*numbers, ZERO)))
        with pytest.raises(CodecError, match="a row that is not there"):
            decode(payload, bytes(n), bytearray(n))


@pytest.mark.parametrize(
    "offsets",
    [(0, 400, 800), (400, 400, 800), (402, 800, 1200), (400, 800, 804), (400, 804, 1204), (400, 800, 1600)],
)
def test_a_unit_that_lies_over_itself_or_outside_is_refused(offsets):
    m, v, v_max = offsets
    extra = struct.pack("<III4x7f", m, v, v_max, *[1.0] * 7)
    payload = forged(1600, Section(CodecId.ADAM, DType.FLOAT32, 0, 100, 0, extra, (ZERO,) * 16))
    for function in (decode, reverse):
        with pytest.raises(CodecError, match="of a unit do not fit"):
            function(payload, bytes(1600), bytearray(1600))


def test_many_sections_on_one_place_cost_no_work():
    size = MIB
    section = Section(CodecId.SAME, DType.BYTES, 0, size)
    payload = forged(size, *[section] * SECTIONS_MAX)
    base, out = noise(size), bytearray(size)
    calls = [(decode, (base, out)), (decode_range, (base, out, 0, size)), (reverse, (base, base))]
    for function, arguments in calls:
        began = time.monotonic()
        with pytest.raises(CodecError, match="overlap"):
            function(payload, *arguments)
        assert time.monotonic() - began < 5


def test_many_sections_and_planes_take_a_few_chunks_of_memory():
    size = 4 * MIB
    sections = [
        Section(CodecId.SAME, DType.BYTES, i, 1, planes=(ZERO,) * 32) for i in range(SECTIONS_MAX + 1)
    ]
    out, base = bytearray(size), bytes(size)
    tracemalloc.start()
    try:
        payload = forged(size, *sections[: SECTIONS_MAX // 4])
        assert isinstance(attempt(decode, payload, base, out), MispredictedError)
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()
    with pytest.raises(CodecError, match="out of bounds"):
        decode(forged(size, *sections), base, out)


def test_forgeries_stay_within_a_few_chunks_of_memory():
    fuzzer = Fuzzer(seed=2)
    for index in range(300):
        fuzzer.check(index)
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        worst = 0
        for index in range(1000):
            tracemalloc.reset_peak()
            fuzzer.check(index)
            worst = max(worst, tracemalloc.get_traced_memory()[1] - began)
    finally:
        tracemalloc.stop()
    assert worst < 16 * MIB  # of which the bombs themselves, when they are built, take half


# --- single claims --------------------------------------------------------------------------------


def test_a_section_may_not_use_a_base_that_the_header_denies():
    for codec in (CodecId.SAME, CodecId.DELTA):
        section = Section(codec, DType.FLOAT32, 0, 100, planes=(ZERO,) * 4)
        payload = forged(400, section, needs_base=False)
        for base in (None, bytes(3), bytes(400)):
            with pytest.raises(CodecError, match="needs a base"):
                decode(payload, base, bytearray(400))


def test_a_master_outside_of_the_chunk_or_over_its_copy_is_refused():
    for offset in (0, 100, 199, 398, 400, 404, 0xFFFFFFFC):
        section = Section(CodecId.ROUNDED, DType.BFLOAT16, 0, 100, 0, struct.pack("<I4x", offset))
        payload = forged(600, section)
        for function, arguments in [(decode, (bytearray(600),)), (reverse, (bytes(600),))]:
            with pytest.raises(CodecError, match="malformed"):
                function(payload, bytes(600), *arguments)


def test_a_master_that_no_section_holds_is_no_part_of_a_range():
    section = Section(CodecId.ROUNDED, DType.BFLOAT16, 0, 100, 0, struct.pack("<I4x", 200))
    with pytest.raises(CodecError, match="no section holds"):
        decode_range(forged(600, section), bytes(600), bytearray(600), 0, 10)


def test_an_unknown_codec_of_a_later_version_is_refused():
    for codec in (CodecId.INDEX8, CodecId.INDEX4, CodecId.BOUNDED):
        payload = forged(400, Section(codec, DType.FLOAT32, 0, 100))
        with pytest.raises(CodecError):
            decode(payload, bytes(400), bytearray(400))


@pytest.mark.parametrize("seed", [s for s in seeds() if s.name.endswith("back")], ids=lambda seed: seed.name)
def test_a_range_of_a_reverse_delta_is_that_of_the_older_chunk(seed):
    out = bytearray(len(seed.new))
    decode_range(seed.payload, seed.base, out, 10, 90)
    assert out[10:90] == seed.new[10:90]


def test_repaired_payloads_are_what_the_parser_takes():
    for seed in seeds():
        assert repaired(seed.payload) == seed.payload
        header, sections = parse(seed.payload)
        assert pack(replace(header), sections) == seed.payload
