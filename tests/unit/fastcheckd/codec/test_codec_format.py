"""Encoded chunks as bytes: what is packed is parsed, and no claim is believed."""

import struct

import pytest
from fuzz import repaired, seeds
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.chunks import CHUNK_LENGTH_MAX
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.format import (
    EXTRA_BYTES_MAX,
    HEADER_BYTES,
    OVERHEAD_BYTES_MAX,
    PLANES_MAX,
    SECTION_BYTES,
    CodecId,
    Header,
    Plane,
    PlaneKind,
    Section,
    pack,
    parse,
    parse_header,
)  # fmt: skip
from fastcheckd.errors import CodecError

DIGESTS = st.binary(min_size=16, max_size=16)
PLANES = st.one_of(
    st.builds(Plane, st.just(PlaneKind.CONSTANT), st.integers(0, 255)),
    st.builds(
        Plane,
        st.sampled_from([PlaneKind.RAW, PlaneKind.ZSTD]),
        st.just(0),
        st.binary(min_size=1, max_size=20),
    ),
)
SECTIONS = st.builds(
    Section,
    st.sampled_from(CodecId),
    st.sampled_from(DType),
    st.integers(0, 99).map(lambda n: 8 * n),
    st.integers(1, 100),
    st.integers(0, 1),
    st.binary(max_size=EXTRA_BYTES_MAX),
    st.lists(PLANES, max_size=PLANES_MAX).map(tuple),
)


@given(
    sections=st.lists(SECTIONS, max_size=5),
    steps=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    digests=st.tuples(DIGESTS, DIGESTS),
)
def test_what_is_packed_is_parsed(sections, steps, digests):
    header = Header(100_000, True, *steps, *digests)
    payload = pack(header, sections)
    assert len(payload) == HEADER_BYTES + sum(section.encoded_bytes for section in sections)
    assert parse(payload) == (header, sections)
    assert parse_header(payload) == (header, len(sections))


def patched(*changes):
    """A payload of one section with fields (place, format, value) changed, the checksum right."""
    section = Section(
        CodecId.PLANES, DType.INT16, 8, 10, 0, b"extra", (Plane(PlaneKind.RAW, 0, bytes(10)),) * 2
    )
    data = bytearray(pack(Header(1000, False, 2, 1, bytes(16), bytes(16)), [section]))
    for at, kind, value in changes:
        struct.pack_into("<" + kind, data, at, value)
    return repaired(data)


TABLE = HEADER_BYTES + SECTION_BYTES + 5
REFUSED = {
    "magic": (0, "B", 0),
    "version": (4, "B", 2),
    "unknown flag": (5, "B", 2),
    "too many sections": (6, "H", 4097),
    "one section too many": (6, "H", 2),
    "one section too few": (6, "H", 0),
    "empty chunk": (8, "I", 0),
    "chunk too large": (8, "I", CHUNK_LENGTH_MAX + 1),
    "base digest without a base": (48, "B", 1),
    "reserved": (64, "B", 1),
    "codec": (HEADER_BYTES, "B", 11),
    "dtype": (HEADER_BYTES + 1, "B", 9),
    "section flag": (HEADER_BYTES + 2, "B", 2),
    "planes too few": (HEADER_BYTES + 3, "B", 1),
    "planes too many": (HEADER_BYTES + 3, "B", 33),
    "offset not aligned": (HEADER_BYTES + 4, "I", 7),
    "offset outside": (HEADER_BYTES + 4, "I", 982),
    "offset far outside": (HEADER_BYTES + 4, "I", 0xFFFFFFFE),
    "no elements": (HEADER_BYTES + 8, "I", 0),
    "elements": (HEADER_BYTES + 8, "I", 497),
    "elements that wrap around": (HEADER_BYTES + 8, "I", 0x80000001),
    "body": (HEADER_BYTES + 12, "I", 21),
    "huge body": (HEADER_BYTES + 12, "I", 0xFFFFFFFF),
    "extra": (HEADER_BYTES + 16, "I", 6),
    "huge extra": (HEADER_BYTES + 16, "I", 0xFFFFFFFF),
    "section reserved": (HEADER_BYTES + 20, "I", 1),
    "plane kind": (TABLE, "B", 3),
    "constant with a body": (TABLE, "B", 0),
    "value of a raw plane": (TABLE + 1, "B", 1),
    "plane reserved": (TABLE + 2, "H", 1),
    "plane without a body": (TABLE + 4, "I", 0),
    "plane body": (TABLE + 4, "I", 11),
    "huge plane body": (TABLE + 4, "I", 0xFFFFFFFF),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_out_of_bounds_is_refused(name):
    parse(patched())
    with pytest.raises(CodecError, match="malformed"):
        parse(patched(REFUSED[name]))


def test_size_and_checksum_are_checked_first():
    payload = bytearray(patched())
    for at in (12, 88):
        broken = payload.copy()
        broken[at] ^= 1
        with pytest.raises(CodecError, match="bytes and has|checksum"):
            parse_header(broken)
    for size in (0, HEADER_BYTES - 1):
        with pytest.raises(CodecError, match=f"{size} bytes"):
            parse_header(payload[:size])
    with pytest.raises(CodecError, match="bytes"):
        parse_header(bytes(CHUNK_LENGTH_MAX + OVERHEAD_BYTES_MAX + 1))


def test_a_payload_much_larger_than_its_chunk_is_refused():
    section = Section(CodecId.RAW, DType.BYTES, 0, 10, planes=(Plane(PlaneKind.RAW, 0, bytes(2000)),))
    with pytest.raises(CodecError, match="out of bounds"):
        parse(pack(Header(10, False, 2, 1, bytes(16), bytes(16)), [section]))


def test_numbers_of_codecs_never_change():
    labels = [codec.label for codec in CodecId]
    assert labels == [
        "raw", "same", "planes", "delta", "rows", "rounded", "adam", "sgd", "index8", "index4", "bounded",
    ]  # fmt: skip


def test_bodies_are_views_of_the_payload():
    payload = next(seed.payload for seed in seeds() if seed.name == "raw")
    (section,) = parse(payload)[1]
    assert section.planes[0].body.obj is payload
