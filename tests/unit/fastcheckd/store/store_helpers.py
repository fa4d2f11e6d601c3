"""What the store's tests share: manifests that hold up, shards with known bytes, what a directory holds."""

from __future__ import annotations

import random
from pathlib import Path

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_count, chunk_digest, chunk_range, shard_digest
from fastcheckd.store.ram_store import HeldShard, RamStore
from fastcheckd.store.segments import pool_of

OWNER = pb.REPLICA_KIND_OWNER
COPY = pb.REPLICA_KIND_COPY
CHUNK_BYTES = 4096


def payload(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def make_manifest(data: bytes, *, job="gpt", step=1, rank=0, shard=0, kind=COPY, chunk_bytes=CHUNK_BYTES):
    ranges = [chunk_range(i, len(data), chunk_bytes) for i in range(chunk_count(len(data), chunk_bytes))]
    digests = b"".join(chunk_digest(data[start:stop]) for start, stop in ranges)
    return pb.ShardManifest(
        key=pb.ShardKey(job=job, step=step, rank=rank, shard=shard),
        shard_count=8,
        world_size=4,
        owner="node-0",
        session=1,
        state_bytes=len(data),
        bytes=len(data),
        chunk_bytes=chunk_bytes,
        chunk_digests=digests,
        digest=shard_digest(digests),
        kind=kind,
    )


def put(store: RamStore, data: bytes, **key) -> HeldShard:
    """Allocate, fill, publish and release, as a holder does."""
    manifest = make_manifest(data, **key)
    segment = store.allocate(len(data), pool_of(manifest))
    segment.view[: len(data)] = data
    held = store.publish(manifest, segment, 0, verified=True)
    store.release(segment)
    return held


def open_store(directory: Path, budget_bytes: int = 1 << 20) -> tuple[RamStore, Counters]:
    counters = Counters()
    return RamStore.open(directory, budget_bytes=budget_bytes, counters=counters), counters


def segment_files(directory: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in (directory / "segments").iterdir()}


def manifest_files(directory: Path) -> list[Path]:
    return sorted(p for p in (directory / "manifests").glob("*/*"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
