"""What the store's tests share: states that change like weights do, copies that come raw or encoded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.chunk_plan import ChunkPlan, Run, Unit
from fastcheckd.codec.dtypes import BY_NAME
from fastcheckd.codec.encoder import encode
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.store.draft import Draft
from fastcheckd.store.replica import Replica
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import staging_pool

OWNER = pb.REPLICA_KIND_OWNER
COPY = pb.REPLICA_KIND_COPY
CHUNK = 16 << 10
BUDGET = 64 << 20


def open_store(
    directory: Path,
    budget_bytes: int = BUDGET,
    job_budget_bytes: int = 0,
    counters: Counters | None = None,
) -> ReplicaStore:
    return ReplicaStore.open(
        directory,
        budget_bytes=budget_bytes,
        job_budget_bytes=job_budget_bytes,
        counters=counters or Counters(),
    )


def payload(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def weights(seed: int, size: int = 4 * CHUNK) -> bytes:
    """Numbers like weights: no codec makes them much smaller by themselves."""
    return np.random.default_rng(seed).standard_normal(size // 4).astype(np.float32).tobytes()


def trained(data: bytes, seed: int, chunks: set[int] | None = None) -> bytes:
    """The next step: numbers have moved by a little, in some chunks or in all."""
    new = np.frombuffer(data, np.float32).copy()
    moves = 1 + np.random.default_rng(seed).standard_normal(new.size).astype(np.float32) * 1e-4
    moved = (new * moves).astype(np.float32)
    per_chunk = CHUNK // 4
    for number in range(-(-new.size // per_chunk)):
        if chunks is None or number in chunks:
            new[number * per_chunk : (number + 1) * per_chunk] = moved[
                number * per_chunk : (number + 1) * per_chunk
            ]
    return new.tobytes()


def manifest_of(
    data: bytes,
    step: int = 1,
    *,
    job="gpt",
    rank=0,
    shard=0,
    kind=COPY,
    session=1,
    lengths=None,
    chunk_bytes=CHUNK,
) -> pb.ShardManifest:
    table = ChunkTable.uniform(len(data), chunk_bytes) if lengths is None else ChunkTable(lengths)
    ranges = [table.range(i) for i in range(len(table))]
    digests = b"".join(chunk_digest(data[start:stop]) for start, stop in ranges)
    return pb.ShardManifest(
        key=pb.ShardKey(job=job, step=step, rank=rank, shard=shard),
        shard_count=8, world_size=4, owner="node-0", session=session, state_bytes=len(data), bytes=len(data),
        chunk_bytes=chunk_bytes, chunk_lengths=lengths or [], chunk_digests=digests, digest=shard_digest(digests),
        kind=kind,
    )  # fmt: skip


def plan(size: int) -> ChunkPlan:
    return ChunkPlan(size, (Unit((Run(0, size // 4, BY_NAME["float32"], 0),)),))


def encoded(old: bytes, new: bytes, step: int, newer: int) -> bytes | None:
    found = encode(
        memoryview(new), memoryview(old), plan(len(old)),
        step=newer, base_step=step, digest=chunk_digest(new), base_digest=chunk_digest(old),
    )  # fmt: skip
    return None if found is None else bytes(found.payload)


def fill(draft: Draft, data: bytes, *, against_base: bool = False, chunks=None) -> None:
    """What a fetch does: bring what is missing, raw or encoded against the base."""
    for index in draft.missing if chunks is None else chunks:
        start, stop = draft.chunks.range(index)
        payload = None
        if against_base and draft.base is not None:
            with draft.base_chunk(index) as old:
                payload = encoded(bytes(old), data[start:stop], draft.base.key.step, draft.manifest.key.step)
        draft.place(index)[:] = data[start:stop]
        draft.received(index, payload)


def put(
    store: ReplicaStore, data: bytes, step: int = 1, *, base: Replica | None = None, raw=False, **key
) -> Replica:
    """A copy, as a holder makes it."""
    draft = store.draft(manifest_of(data, step, **key), base=base)
    try:
        fill(draft, data, against_base=not raw)
        return draft.publish()
    finally:
        draft.abandon()


def stage(store: ReplicaStore, data: bytes, step: int = 1, *, job="gpt", rank=0, session=1, **key) -> Replica:
    """The owner's own replica, in a segment."""
    manifest = manifest_of(data, step, kind=OWNER, job=job, rank=rank, session=session, **key)
    segment = store.allocate(len(data), staging_pool(job, rank, session))
    segment.view[: len(data)] = data
    try:
        return store.publish(manifest, segment, 0, verified=True)
    finally:
        store.release(segment)


def thin(store: ReplicaStore, older: Replica, newer: Replica, *, chunks=None) -> None:
    """Turn the owner's older step into reverse deltas, as is done while the newer one is sent."""
    deltas = store.reverse_deltas(older)
    with store.reading(older) as old, store.reading(newer) as new:
        for index in range(len(older.chunks)) if chunks is None else chunks:
            with old.chunk(index) as was, new.chunk(index) as now:
                payload = encoded(bytes(was), bytes(now), older.key.step, newer.key.step)
                if payload is not None and was != now:
                    deltas.add(index, payload, now)
    try:
        deltas.publish(newer)
    finally:
        deltas.abandon()


def read(store: ReplicaStore, replica: Replica) -> bytes:
    out = bytearray(replica.manifest.bytes)
    store.copy_to(replica, memoryview(out))
    return bytes(out)


def in_use(store: ReplicaStore) -> int:
    usage = store.usage()
    return usage.used_bytes - usage.free_bytes


def files_of(directory: Path, kind: str = "") -> dict[str, int]:
    """Segments (`seg`), slabs (`slab`) or both, by name, with their sizes."""
    return {p.name: p.stat().st_size for p in (directory / "segments").iterdir() if p.name.endswith(kind)}


def manifest_files(directory: Path) -> list[Path]:
    return sorted(p for p in (directory / "manifests").glob("*/*"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
