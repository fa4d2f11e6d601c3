import pytest
import xxhash

from fastcheckd import digests


def test_digests_are_xxh3_128_big_endian():
    assert digests.chunk_digest(b"abc") == xxhash.xxh3_128(b"abc").digest()
    assert len(digests.shard_digest(b"")) == digests.DIGEST_BYTES


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))])
def test_a_digest_of_a_view_is_that_of_the_bytes(data):
    assert digests.chunk_digest(memoryview(data)) == digests.chunk_digest(data)
