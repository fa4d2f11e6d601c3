import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd import digests


@given(st.integers(0, 1 << 20), st.integers(1 << 10, 1 << 16))
def test_chunks_tile_the_shard(shard_bytes, chunk_bytes):
    position = 0
    for index in range(digests.chunk_count(shard_bytes, chunk_bytes)):
        start, stop = digests.chunk_range(index, shard_bytes, chunk_bytes)
        assert start == position and 0 < stop - start <= chunk_bytes
        position = stop
    assert position == shard_bytes


def test_digests_are_xxh3_128_big_endian():
    assert digests.chunk_digest(b"abc") == xxhash.xxh3_128(b"abc").digest()
    assert len(digests.shard_digest(b"")) == digests.DIGEST_BYTES


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))])
def test_a_digest_of_a_view_is_that_of_the_bytes(data):
    assert digests.chunk_digest(memoryview(data)) == digests.chunk_digest(data)
