"""What the store's tests share: manifests that hold up, shards with known bytes, what a directory holds."""

from __future__ import annotations

import random
from pathlib import Path

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.chunk_plan import opaque
from fastcheckd.codec.decoder import raw_way_back, turn_around
from fastcheckd.codec.encoder import encode
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.store.ram_store import HeldShard, Patch, RamStore
from fastcheckd.store.segments import pool_of

OWNER = pb.REPLICA_KIND_OWNER
COPY = pb.REPLICA_KIND_COPY
CHUNK_BYTES = 4096


def payload(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def make_manifest(
    data: bytes, *, job="gpt", step=1, rank=0, shard=0, kind=COPY, chunk_bytes=CHUNK_BYTES, lengths=None
):
    table = ChunkTable.uniform(len(data), chunk_bytes) if lengths is None else ChunkTable(lengths)
    ranges = [table.range(i) for i in range(len(table))]
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
        chunk_lengths=lengths or [],
        chunk_digests=digests,
        digest=shard_digest(digests),
        kind=kind,
    )


def put(store: RamStore, data: bytes, **key) -> HeldShard:
    """Allocate, fill, publish and release, as a holder does."""
    manifest = make_manifest(data, **key)
    segment = store.allocate(len(data), pool_of(manifest), job=manifest.key.job)
    segment.view[: len(data)] = data
    held = store.publish(manifest, segment, 0, verified=True)
    store.release(segment)
    return held


def changed(data: bytes, seed: int, *, every: int = 2, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The same but for some bytes of every `every`-th chunk."""
    new, rng = bytearray(data), random.Random(seed)
    for start in range(0, len(data), chunk_bytes * every):
        stop = min(start + chunk_bytes, len(data))
        for _ in range(rng.randint(1, 8)):
            new[rng.randrange(start, stop)] ^= rng.randint(1, 255)
    return bytes(new)


def way_back(old: bytes, new: bytes, step: int, newer_step: int) -> bytes:
    """The record that turns `new` into `old`, as a holder makes it."""
    old_digest, new_digest = chunk_digest(old), chunk_digest(new)
    encoded = encode(
        memoryview(new), memoryview(old), opaque(len(old)),
        step=newer_step, base_step=step, digest=new_digest, base_digest=old_digest,
    )  # fmt: skip
    if encoded is None:
        return raw_way_back(old, step=step, newer_step=newer_step, digest=old_digest, newer_digest=new_digest)
    return turn_around(encoded.payload, memoryview(old), memoryview(new))


def refuse_nothing() -> None:
    """What a patch does that nobody takes back."""


def replace_chunks(patch: Patch, new: bytes, indexes, newer_step: int) -> None:
    """Put these chunks of the newer step in, as a holder does."""
    for index in indexes:
        start, stop = patch.chunks.range(index)
        old = bytes(patch.old(index))
        if old == new[start:stop]:
            patch.keep(index)
            continue
        with patch.slot() as slot:
            slot[: stop - start] = new[start:stop]
            patch.replace(index, slot, way_back(old, new[start:stop], patch.base.key.step, newer_step))


def newer_manifest(base: HeldShard, data: bytes, step: int) -> pb.ShardManifest:
    key = base.key
    return make_manifest(
        data, job=key.job, step=step, rank=key.rank, shard=key.shard,
        chunk_bytes=base.manifest.chunk_bytes, lengths=list(base.manifest.chunk_lengths) or None,
    )  # fmt: skip


def put_patch(store: RamStore, base: HeldShard, data: bytes, step: int) -> HeldShard:
    """Put a newer step into the base's place."""
    patch = store.begin_patch(base, step, on_wanted=refuse_nothing)
    replace_chunks(patch, data, range(len(patch.chunks)), step)
    return patch.publish(newer_manifest(base, data, step))


def open_store(
    directory: Path, budget_bytes: int = 1 << 20, job_budget_bytes: int = 0
) -> tuple[RamStore, Counters]:
    counters = Counters()
    store = RamStore.open(
        directory, budget_bytes=budget_bytes, job_budget_bytes=job_budget_bytes, counters=counters
    )
    return store, counters


def segment_files(directory: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in (directory / "segments").iterdir()}


def way_files(directory: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in (directory / "ways").iterdir()}


def manifest_files(directory: Path) -> list[Path]:
    return sorted(p for p in (directory / "manifests").glob("*/*"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
