"""Manifest files are believed only when everything in them holds up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import COPY, OWNER, manifest_of, payload

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import store_pb2
from fastcheckd.chunks import ChunkTable
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import CorruptError, InvalidRequestError
from fastcheckd.store.chunk import Chunk, Form
from fastcheckd.store.manifests import (
    CHAIN_MAX,
    StoredChunk,
    check_manifest,
    chunks_of,
    decode,
    describe,
    encode,
    file_name,
    replica_id,
)
from fastcheckd.store.slots import Slot

SLAB = "0123456789abcdef" * 2 + ".slab"
SEGMENT = "0123456789abcdef" * 2 + ".seg"
CHUNK_BYTES = 4096
DATA = payload(1, 10_000)


def make_manifest(data=DATA, **key) -> pb.ShardManifest:
    return manifest_of(data, **{"chunk_bytes": CHUNK_BYTES} | key)


def places(count: int, **changes) -> store_pb2.ChunkPlaces:
    """Raw chunks, one behind the other; some rows are others."""
    rows = {
        "files": [0] * count,
        "offsets": [number * CHUNK_BYTES for number in range(count)],
        "lengths": [CHUNK_BYTES] * count,
        "bases": [0] * count,
    }
    return store_pb2.ChunkPlaces(**rows | changes)


#: Of the 10,000 bytes of `make_manifest`.
LENGTHS = [4096, 4096, 1808]


def stored(manifest=None, **changes) -> store_pb2.StoredReplica:
    made = {"version": 1, "manifest": manifest or make_manifest(), "files": [SLAB]}
    made["places"] = places(3, lengths=LENGTHS)
    return store_pb2.StoredReplica(**made | changes)


class File:
    def __init__(self, name: str) -> None:
        self.name = name


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=12),
    kind=st.sampled_from([OWNER, COPY]),
    step=st.integers(0, 2**62),
    chains=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    seed=st.integers(0, 9),
)
def test_what_is_described_is_read_again(lengths, kind, step, chains, seed):
    """Chunks of any lengths, each decoded through some others of which the last ones are shared."""
    data = payload(seed, sum(lengths))
    manifest = make_manifest(data, lengths=lengths, step=step, kind=kind)
    files = [File(f"{number:032x}.slab") for number in range(3)]
    if kind == OWNER:
        files[0].name = SEGMENT
    known: dict[tuple[int, int], Chunk] = {}

    def chunk(digest: bytes, size: int, depth: int) -> Chunk:
        base = (
            None if not depth else known.get((size, depth - 1)) or chunk(payload(depth, 16), size, depth - 1)
        )
        place = Slot(files[len(known) % 3], len(known) * 4096, size if base is None else 7, 0)
        made = Chunk(digest, size, Form(place, base))
        known.setdefault((size, depth), made)
        return made

    table = ChunkTable.of(manifest)
    content = tuple(
        chunk(manifest.chunk_digests[16 * number : 16 * (number + 1)], stop - start, chains[number % 12])
        for number, (start, stop) in enumerate(map(table.range, range(len(table))))
    )
    forms = {link: link.form for each in content for link in each.chain()}
    found = decode(encode(describe(manifest, content, forms)))
    assert found.manifest == manifest
    listed = chunks_of(found)
    for own, each in zip(content, listed, strict=False):
        link, at = own, each
        while True:
            form = forms[link]
            assert at == StoredChunk(
                link.digest, link.size, form.place.file.name, form.place.offset, form.place.length, at.base
            )
            if form.base is None:
                assert at.base is None
                break
            link, at = form.base, listed[at.base]


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


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_is_refused_by_name(version):
    with pytest.raises(CorruptError, match=f"version {version}"):
        decode(encode(stored(version=version)))


@pytest.mark.parametrize("name", ["", "x", "../" + SLAB, SLAB + "/", SLAB.upper(), SLAB + "\n", SLAB[1:]])
def test_a_file_name_that_we_never_make_is_refused(name):
    with pytest.raises(CorruptError, match="neither a slab nor a segment"):
        decode(encode(stored(files=[name])))


def test_a_copy_never_lies_where_a_trainer_can_write():
    decode(encode(stored(make_manifest(kind=OWNER), files=[SEGMENT])))
    with pytest.raises(CorruptError, match="a copy never lies"):
        decode(encode(stored(files=[SEGMENT])))


def deltas(bases: list[int], *, lengths=None) -> store_pb2.StoredReplica:
    """Three chunks and some others, decoded against each other."""
    others = len(bases) - 3
    return stored(
        places=places(len(bases), bases=bases, lengths=lengths or [100] * len(bases)),
        base_digests=bytes(16 * others),
    )


def test_deltas_lead_through_chunks_of_the_shard_and_others():
    decode(encode(deltas([2, 4, 5, 0, 0], lengths=[100, 100, 100, 4096, 1808])))


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("missing", stored(places=places(3, lengths=LENGTHS, files=[0, 0]))),
        ("missing", stored(places=places(3, lengths=LENGTHS[:2]))),
        ("2 places for 3 chunks", stored(places=places(2, lengths=LENGTHS[:2]))),
        ("4 places for 3 chunks", stored(places=places(4))),
        ("does not list", stored(places=places(3, lengths=LENGTHS, files=[0, 0, 1]))),
        ("does not list", deltas([4, 0, 0], lengths=LENGTHS)),
        ("takes 4095", stored(places=places(3, lengths=[4095, 4096, 1808]))),
        ("takes 0", stored(places=places(3, lengths=[4096, 4096, 0]))),
        ("takes 0", deltas([2, 0, 0], lengths=[0, 4096, 1808])),
        ("takes 6000", deltas([2, 0, 0], lengths=[6000, 4096, 1808])),
        ("another size", deltas([3, 0, 0], lengths=[100, 4096, 1808])),
        ("through more than", deltas([1, 0, 0], lengths=[100, 4096, 1808])),
        ("through more than", deltas([2, 1, 0], lengths=[100, 100, 1808])),
        ("none of its own needs", deltas([0, 0, 0, 0], lengths=[*LENGTHS, 100])),
        ("none of its own needs", deltas([0, 0, 0, 5, 4], lengths=[*LENGTHS, 100, 100])),
        ("through more than", deltas([4, 0, 0, *range(5, CHAIN_MAX + 6), 0])),
    ],
)
def test_places_that_do_not_hold_up_are_refused(what, found):
    with pytest.raises(CorruptError, match=what):
        decode(encode(found))


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
    manifest = make_manifest()
    check_manifest(manifest)
    change(manifest)
    with pytest.raises(InvalidRequestError, match=what):
        check_manifest(manifest)


def test_file_names_are_those_of_the_protocol():
    key = pb.ShardKey(job="gpt", step=7, rank=3, shard=2)
    assert file_name(replica_id(key, OWNER)) == "7-3-2-owner.replica"
    assert file_name(replica_id(key, COPY)) == "7-3-2-copy.replica"
