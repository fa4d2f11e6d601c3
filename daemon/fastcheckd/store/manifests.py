"""What a manifest file says, what it is called, and when it is to be believed. Pure.

A file is one StoredReplica message and the xxh3-128 of it. Everything in it is checked before use, although this
process wrote it: a directory that outlives processes also outlives their versions.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX, check_name
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import store_pb2

from ..chunks import ChunkTable
from ..codec.format import OVERHEAD_BYTES_MAX
from ..digests import DIGEST_BYTES, chunk_digest, shard_digest
from ..errors import CorruptError, InvalidRequestError
from .chunk import Chunk, Form

VERSION = 1
#: 4 million chunks: a shard of 16 TiB at the default chunk size.
MANIFEST_BYTES_MAX = 64 << 20
#: A chunk is decoded through so many others at most: as many as a node keeps steps.
CHAIN_MAX = 128

_FILE_NAME = re.compile(r"[0-9a-f]{32}\.(slab|seg)")
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


def file_name(name: ReplicaId) -> str:
    """Name of the manifest's file within the folder of its job."""
    return f"{name.step}-{name.rank}-{name.shard}-{_KINDS[name.kind]}.replica"


def describe(
    manifest: pb.ShardManifest, content: tuple[Chunk, ...], forms: dict[Chunk, Form]
) -> store_pb2.StoredReplica:
    """The message for a replica whose chunks, and all that they are decoded against, have these forms."""
    numbers: dict[Chunk, int] = {}
    for number, chunk in enumerate(content):
        numbers.setdefault(chunk, number)
    listed = list(content)
    bases: list[int] = []
    for chunk in listed:  # it grows meanwhile
        base = forms[chunk].base
        if base is not None and base not in numbers:
            numbers[base] = len(listed)
            listed.append(base)
        bases.append(0 if base is None else 1 + numbers[base])
    places = [forms[chunk].place for chunk in listed]
    files = {name: index for index, name in enumerate(dict.fromkeys(place.file.name for place in places))}
    return store_pb2.StoredReplica(
        version=VERSION,
        manifest=manifest,
        files=files,
        places=store_pb2.ChunkPlaces(
            files=[files[place.file.name] for place in places],
            offsets=[place.offset for place in places],
            lengths=[place.length for place in places],
            bases=bases,
        ),
        base_digests=b"".join(chunk.digest for chunk in listed[len(content) :]),
    )


def encode(stored: store_pb2.StoredReplica) -> bytes:
    """The content of a manifest file.

    Raises:
        InvalidRequestError: it would be larger than a reader accepts.
    """
    body: bytes = stored.SerializeToString()
    if len(body) + DIGEST_BYTES > MANIFEST_BYTES_MAX:
        raise InvalidRequestError(f"a manifest of {len(body)} bytes is too large: use a larger chunk_bytes")
    return body + chunk_digest(body)


def decode(data: bytes) -> store_pb2.StoredReplica:
    """Read and check the content of a manifest file of at most MANIFEST_BYTES_MAX.

    Raises:
        CorruptError: it is not what `encode` made of a valid message.
    """
    if not DIGEST_BYTES <= len(data) <= MANIFEST_BYTES_MAX:
        raise CorruptError(f"has {len(data)} bytes")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if chunk_digest(body) != digest:
        raise CorruptError("does not match the digest at its end")
    stored = store_pb2.StoredReplica()
    try:
        stored.ParseFromString(body)
        if stored.version != VERSION:
            raise CorruptError(f"has version {stored.version}, this daemon reads {VERSION}")
        check_manifest(stored.manifest)
        _check_places(stored)
    except (DecodeError, InvalidRequestError) as error:
        raise CorruptError(f"is not valid: {error}") from None
    return stored


class StoredChunk(NamedTuple):
    """One chunk as a manifest describes it."""

    digest: bytes
    size: int
    file: str
    offset: int
    length: int
    #: Number of the chunk that it is decoded against; None: its own bytes are there.
    base: int | None


def chunks_of(stored: store_pb2.StoredReplica) -> list[StoredChunk]:
    """The chunks of a valid message: those of the shard, then those that deltas are decoded against."""
    digests = stored.manifest.chunk_digests + stored.base_digests
    places = stored.places
    rows = zip(places.files, places.offsets, places.lengths, places.bases, sizes(stored), strict=True)
    return [
        StoredChunk(
            digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES],
            size,
            stored.files[file],
            offset,
            length,
            base - 1 if base else None,
        )
        for number, (file, offset, length, base, size) in enumerate(rows)
    ]


def sizes(stored: store_pb2.StoredReplica) -> list[int]:
    """Size in bytes of each chunk that is listed: those of the shard, then those that deltas are decoded against.

    Raises:
        CorruptError: a delta's base is not of its own size, or nobody refers to one, or they lead in a circle.
    """
    bases = list(stored.places.bases)
    own = ChunkTable.of(stored.manifest).lengths
    found: list[int | None] = [*own, *([None] * (len(bases) - len(own)))]
    for start in range(len(own)):
        at, steps = start, 0
        while bases[at]:
            base = bases[at] - 1
            if found[base] not in {None, found[at]}:
                raise CorruptError(f"chunk {at} is decoded against one of another size")
            found[base] = found[at]
            at, steps = base, steps + 1
            if steps > CHAIN_MAX:
                raise CorruptError(f"chunk {start} is decoded through more than {CHAIN_MAX} others")
    known = [size for size in found if size is not None]
    if len(known) != len(found):
        raise CorruptError("lists chunks that none of its own needs")
    return known


def _check_places(stored: store_pb2.StoredReplica) -> None:
    if not all(_FILE_NAME.fullmatch(name) for name in stored.files):
        raise CorruptError("names a file that is neither a slab nor a segment")
    if stored.manifest.kind == pb.REPLICA_KIND_COPY and any(name.endswith(".seg") for name in stored.files):
        raise CorruptError("is of a copy, and names a segment: a copy never lies where a trainer can write")
    own, places = len(ChunkTable.of(stored.manifest)), stored.places
    listed = len(places.bases)
    if {len(places.files), len(places.offsets), len(places.lengths)} != {listed}:
        raise CorruptError("has places of which parts are missing")
    if listed < own or len(stored.base_digests) != (listed - own) * DIGEST_BYTES:
        raise CorruptError(f"has {listed} places for {own} chunks and their bases")
    if any(file >= len(stored.files) for file in places.files) or any(base > listed for base in places.bases):
        raise CorruptError("a chunk is in a file, or decoded against a chunk, that it does not list")
    for length, base, size in zip(places.lengths, places.bases, sizes(stored), strict=True):
        bound = size + OVERHEAD_BYTES_MAX if base else size
        if not 0 < length <= bound or (not base and length != size):
            raise CorruptError(f"a chunk of {size} bytes takes {length}")
