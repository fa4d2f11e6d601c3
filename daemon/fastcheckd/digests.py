"""Digests of chunks and shards. Pure.

A chunk's digest is the xxh3-128 of its bytes. A shard's digest is the xxh3-128 of its chunk digests
in order, so chunks may be checked in any order, by many threads, in one pass, and the list of chunk
digests is itself proved by the 16 bytes that the registry commits. xxh3 finds accidents, not
attackers: whoever can forge bytes inside the cluster already holds its keys (docs/formats.md).
"""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16


def chunk_digest(data: memoryview | bytes) -> bytes:
    """16-byte digest of one chunk. Releases the GIL."""
    return xxhash.xxh3_128_digest(data)


def shard_digest(chunk_digests: bytes) -> bytes:
    """16-byte digest of a shard from its concatenated chunk digests."""
    return xxhash.xxh3_128_digest(chunk_digests)
