import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd import digests
from fastcheckd.chunks import CHUNK_LENGTH_MAX, CHUNKS_MAX, ChunkTable
from fastcheckd.errors import InvalidRequestError


def assert_tiles(table, shard_bytes):
    position = 0
    for index in range(len(table)):
        start, stop = table.range(index)
        assert start == position and stop > start
        position = stop
    assert position == table.shard_bytes == shard_bytes == sum(table.lengths)
    assert table.longest == max(table.lengths, default=0)


@given(st.integers(0, 1 << 20), st.integers(1 << 10, 1 << 16))
def test_chunks_of_one_size_tile_the_shard(shard_bytes, chunk_bytes):
    table = ChunkTable.uniform(shard_bytes, chunk_bytes)
    assert_tiles(table, shard_bytes)
    assert all(length == chunk_bytes for length in table.lengths[:-1])
    assert table == ChunkTable.of(pb.ShardManifest(bytes=shard_bytes, chunk_bytes=chunk_bytes))


@given(st.lists(st.integers(1, CHUNK_LENGTH_MAX), max_size=50))
def test_chunks_of_any_sizes_tile_the_shard(lengths):
    table = ChunkTable.of(pb.ShardManifest(bytes=sum(lengths), chunk_bytes=4096, chunk_lengths=lengths))
    assert table.lengths == lengths
    assert_tiles(table, sum(lengths))
    assert table == ChunkTable(lengths) and hash(table) == hash(ChunkTable(lengths))
    assert table != ChunkTable([*lengths, 1])


@pytest.mark.parametrize(
    "fields",
    [
        {"bytes": 10, "chunk_bytes": 0},
        {"bytes": 10, "chunk_bytes": CHUNK_LENGTH_MAX + 1},
        {"bytes": 10, "chunk_lengths": [5, 4]},
        {"bytes": 10, "chunk_lengths": [5, 5, 0]},
        {"bytes": 10, "chunk_lengths": [5, 6]},
        {"bytes": CHUNK_LENGTH_MAX + 1, "chunk_lengths": [CHUNK_LENGTH_MAX + 1]},
        {"bytes": CHUNKS_MAX + 1, "chunk_bytes": 1},
        {"bytes": 2**63, "chunk_bytes": 1},
        {"bytes": 2**63, "chunk_bytes": CHUNK_LENGTH_MAX},
    ],
)
def test_a_manifest_whose_chunks_do_not_make_its_shard_is_refused(fields):
    with pytest.raises(InvalidRequestError):
        ChunkTable.of(pb.ShardManifest(**fields))


def test_digests_are_xxh3_128_big_endian():
    assert digests.chunk_digest(b"abc") == xxhash.xxh3_128(b"abc").digest()
    assert len(digests.shard_digest(b"")) == digests.DIGEST_BYTES


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))])
def test_a_digest_of_a_view_is_that_of_the_bytes(data):
    assert digests.chunk_digest(memoryview(data)) == digests.chunk_digest(data)
