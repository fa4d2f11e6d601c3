"""What a manifest file says, what it is called, and when it is to be believed. Pure.

A file is one StoredShard message and the xxh3-128 of it. Everything in it is checked before use,
although this process wrote it: a directory that outlives processes also outlives their versions.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX, check_name
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import store_pb2

from ..chunks import ChunkTable
from ..digests import DIGEST_BYTES, chunk_digest, shard_digest
from ..errors import CorruptError, InvalidRequestError

SCHEMA = 1
#: 4 million chunks: a shard of 16 TiB at the default chunk size.
MANIFEST_BYTES_MAX = 64 << 20

_SEGMENT_NAME = re.compile(r"[0-9a-f]{32}\.seg")
_WAY_NAME = re.compile(r"[0-9a-f]{32}\.way")
_KINDS: dict[int, str] = {pb.REPLICA_KIND_OWNER: "owner", pb.REPLICA_KIND_COPY: "copy"}


class ReplicaId(NamedTuple):
    """What a replica is filed under: at most one of each in a store."""

    job: str
    step: int
    rank: int
    shard: int
    kind: int


def replica_id(key: pb.ShardKey, kind: pb.ReplicaKind.ValueType) -> ReplicaId:
    """The hashable form of a shard's key and kind."""
    return ReplicaId(key.job, key.step, key.rank, key.shard, kind)


def file_name(name: ReplicaId) -> str:
    """Name of the manifest's file within the folder of its job."""
    return f"{name.step}-{name.rank}-{name.shard}-{_KINDS[name.kind]}.shard"


def check_manifest(manifest: pb.ShardManifest) -> None:
    """Check that a manifest describes one whole shard and agrees with itself.

    Raises:
        InvalidRequestError: it does not; the sentence says in what.
    """

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise InvalidRequestError(f"manifest of job {manifest.key.job[:128]!r}: {what}")

    key = manifest.key
    try:
        check_name("job", key.job)
    except ValueError as error:
        raise InvalidRequestError(f"manifest: {error}") from None
    need(key.step <= STEP_MAX, f"step {key.step} is above {STEP_MAX}")
    need(key.rank <= RANK_MAX, f"rank {key.rank} is above {RANK_MAX}")
    need(key.shard < manifest.shard_count, f"shard {key.shard} is not one of {manifest.shard_count}")
    need(manifest.kind in _KINDS, f"kind {manifest.kind} is neither owner nor copy")
    need(manifest.part == 0, f"part {manifest.part}: only whole shards are stored")
    need(
        manifest.offset + manifest.bytes <= manifest.state_bytes,
        f"bytes {manifest.offset}+{manifest.bytes} lie beyond the state's {manifest.state_bytes}",
    )
    need(
        manifest.header_offset + manifest.header_bytes <= manifest.state_bytes,
        f"header {manifest.header_offset}+{manifest.header_bytes} lies beyond the state's "
        f"{manifest.state_bytes}",
    )
    need(manifest.chunk_bytes > 0 or len(manifest.chunk_lengths) > 0, "chunk_bytes is 0")
    chunks = len(ChunkTable.of(manifest))
    need(
        len(manifest.chunk_digests) == chunks * DIGEST_BYTES,
        f"{len(manifest.chunk_digests)} bytes of chunk digests for {chunks} chunks",
    )
    need(manifest.digest == shard_digest(manifest.chunk_digests), "digest is not that of the chunk digests")


def encode(stored: store_pb2.StoredShard) -> bytes:
    """The content of a manifest file.

    Raises:
        InvalidRequestError: it would be larger than a reader accepts.
    """
    body: bytes = stored.SerializeToString()
    if len(body) + DIGEST_BYTES > MANIFEST_BYTES_MAX:
        raise InvalidRequestError(f"manifest of {len(body)} bytes is too large: use a larger chunk_bytes")
    return body + chunk_digest(body)


def decode(data: bytes) -> store_pb2.StoredShard:
    """Read and check the content of a manifest file of at most MANIFEST_BYTES_MAX.

    Raises:
        CorruptError: it is not what `encode` made of a valid manifest.
    """
    if not DIGEST_BYTES <= len(data) <= MANIFEST_BYTES_MAX:
        raise CorruptError(f"has {len(data)} bytes")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if chunk_digest(body) != digest:
        raise CorruptError("does not match the digest at its end")
    stored = store_pb2.StoredShard()
    try:
        stored.ParseFromString(body)
        if stored.schema != SCHEMA:
            raise CorruptError(f"has schema {stored.schema}, this version reads {SCHEMA}")
        check_manifest(stored.manifest)
    except (DecodeError, InvalidRequestError) as error:
        raise CorruptError(f"is not valid: {error}") from None
    if not _SEGMENT_NAME.fullmatch(stored.segment):
        raise CorruptError(f"names a segment {stored.segment[:80]!r}, which is no segment's name")
    if stored.HasField("way_back"):
        way = stored.way_back
        if not _WAY_NAME.fullmatch(way.file):
            raise CorruptError(f"names a way back {way.file[:80]!r}, which is no such file's name")
        # Steps only rise along a chain, so it cannot run in a circle.
        if not stored.manifest.key.step < way.from_step <= STEP_MAX:
            raise CorruptError(f"is step {stored.manifest.key.step} and starts from step {way.from_step}")
    return stored
