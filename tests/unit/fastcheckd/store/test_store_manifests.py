"""Manifest files are believed only when everything in them holds up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import COPY, OWNER, make_manifest, payload

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import store_pb2
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import CorruptError, InvalidRequestError
from fastcheckd.store.manifests import check_manifest, decode, encode, file_name, replica_id

SEGMENT = "0123456789abcdef" * 2 + ".seg"
WAY = "0123456789abcdef" * 2 + ".way"


def stored(**changes) -> store_pb2.StoredShard:
    return store_pb2.StoredShard(
        **{"schema": 1, "manifest": make_manifest(payload(1, 10_000)), "segment": SEGMENT} | changes
    )


@given(
    size=st.integers(0, 20_000),
    chunk_bytes=st.integers(1, 30_000),
    step=st.integers(0, 2**62),
    kind=st.sampled_from([OWNER, COPY]),
    offset=st.integers(0, 2**40),
)
def test_what_is_encoded_is_decoded(size, chunk_bytes, step, kind, offset):
    chunk_bytes = max(chunk_bytes, size // 50 + 1)
    manifest = make_manifest(payload(size, size), chunk_bytes=chunk_bytes, step=step, kind=kind)
    before = stored(manifest=manifest, segment_offset=offset, verified_at_ms=7)
    assert decode(encode(before)) == before


@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(at, bit):
    data = bytearray(encode(stored()))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(CorruptError, match="digest"):
        decode(bytes(data))


@given(keep=st.integers(0, 10**9))
def test_any_shortened_file_is_found(keep):
    data = encode(stored())
    with pytest.raises(CorruptError):
        decode(data[: keep % len(data)])


@given(st.binary(max_size=200))
def test_noise_is_no_manifest(noise):
    with pytest.raises(CorruptError):
        decode(noise)


def test_a_valid_digest_over_noise_is_no_manifest():
    noise = b"\xff" * 40
    with pytest.raises(CorruptError):
        decode(noise + chunk_digest(noise))


@pytest.mark.parametrize("schema", [0, 2])
def test_another_schema_is_refused_by_name(schema):
    with pytest.raises(CorruptError, match=f"schema {schema}"):
        decode(encode(stored(schema=schema)))


@pytest.mark.parametrize("name", ["", "x", "../" + SEGMENT, SEGMENT + "/", SEGMENT.upper(), SEGMENT + "\n"])
def test_a_segment_name_that_we_never_make_is_refused(name):
    with pytest.raises(CorruptError, match="names a segment"):
        decode(encode(stored(segment=name)))


def test_a_way_back_is_encoded_and_decoded():
    before = stored(way_back=store_pb2.WayBack(file=WAY, from_step=2))
    assert decode(encode(before)) == before


@pytest.mark.parametrize("name", ["", "x", "../" + WAY, WAY + "/", WAY.upper(), SEGMENT])
def test_a_way_back_name_that_we_never_make_is_refused(name):
    with pytest.raises(CorruptError, match="names a way back"):
        decode(encode(stored(way_back=store_pb2.WayBack(file=name, from_step=2))))


@pytest.mark.parametrize("from_step", [0, 1, 2**62 + 1])
def test_a_way_back_that_does_not_start_from_a_newer_step_is_refused(from_step):
    with pytest.raises(CorruptError, match="starts from step"):
        decode(encode(stored(way_back=store_pb2.WayBack(file=WAY, from_step=from_step))))


def test_an_owners_older_step_may_have_a_way_back():
    before = stored(
        manifest=make_manifest(b"x", kind=OWNER), way_back=store_pb2.WayBack(file=WAY, from_step=2)
    )
    assert decode(encode(before)) == before


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("chunk lengths", lambda m: m.chunk_lengths.extend([4096, 4096])),
        ("chunk lengths", lambda m: m.chunk_lengths.extend([10_000, 0])),
        ("chunk digests", lambda m: m.chunk_lengths.extend([5000, 5000])),
        ("job", lambda m: setattr(m.key, "job", "../x")),
        ("job", lambda m: setattr(m.key, "job", "")),
        ("job", lambda m: setattr(m.key, "job", "..")),
        ("step", lambda m: setattr(m.key, "step", 2**62 + 1)),
        ("rank", lambda m: setattr(m.key, "rank", 1_000_001)),
        ("shard 8", lambda m: setattr(m.key, "shard", 8)),
        ("kind", lambda m: setattr(m, "kind", pb.REPLICA_KIND_UNSPECIFIED)),
        ("kind", lambda m: setattr(m, "kind", 9)),
        ("part", lambda m: setattr(m, "part", 1)),
        ("beyond the state", lambda m: setattr(m, "offset", 1)),
        ("beyond the state", lambda m: setattr(m, "state_bytes", 9_999)),
        ("header", lambda m: setattr(m, "header_bytes", 10_001)),
        ("chunk_bytes", lambda m: setattr(m, "chunk_bytes", 0)),
        ("chunk digests", lambda m: setattr(m, "chunk_bytes", 8192)),
        ("chunk digests", lambda m: setattr(m, "chunk_digests", m.chunk_digests[:-1])),
        ("digest is not", lambda m: setattr(m, "digest", bytes(16))),
        ("digest is not", lambda m: setattr(m, "digest", b"")),
    ],
)
def test_a_manifest_that_disagrees_with_itself_is_refused(what, change):
    manifest = make_manifest(payload(1, 10_000))
    check_manifest(manifest)
    change(manifest)
    with pytest.raises(InvalidRequestError, match=what):
        check_manifest(manifest)


@given(st.lists(st.integers(1, 5000), max_size=20))
def test_chunks_of_any_lengths(lengths):
    manifest = make_manifest(payload(1, sum(lengths)), lengths=lengths)
    check_manifest(manifest)
    assert decode(encode(stored(manifest=manifest))).manifest == manifest


def test_file_names_are_those_of_the_protocol():
    key = pb.ShardKey(job="gpt", step=7, rank=3, shard=2)
    assert file_name(replica_id(key, OWNER)) == "7-3-2-owner.shard"
    assert file_name(replica_id(key, COPY)) == "7-3-2-copy.shard"
