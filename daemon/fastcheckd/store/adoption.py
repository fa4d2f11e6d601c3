"""Taking over what an earlier process left in the RAM directory.

Believes nothing: every manifest is read within bounds, checked against its digest, its own name
and its segment; what does not hold up is unlinked, logged and counted. The bytes of segments are
not read here (that is a scrub's or a reader's work), so every adopted shard counts as not verified.

Runs once, under the directory's lock, before anybody else has the store.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from pathlib import Path

from fastcheck_proto.v1 import store_pb2

from ..errors import CorruptError
from .directory import discard, read_bounded
from .held import HeldShard
from .manifests import MANIFEST_BYTES_MAX, decode, file_name, replica_id
from .segments import Segment, pool_of

logger = logging.getLogger(__name__)


def adopt(manifests: Path, segments: Path) -> tuple[list[HeldShard], int]:
    """Read the directory; returns the shards that hold up and the number of manifests dropped.

    Afterwards the folders hold exactly these shards: other manifests and segments are unlinked.

    Raises:
        StoreError: the system refuses to read or remove something.
    """
    by_segment: dict[str, list[tuple[Path, store_pb2.StoredShard]]] = defaultdict(list)
    dropped = 0
    for job in sorted(manifests.iterdir()):
        if job.is_symlink() or not job.is_dir():
            dropped += _drop(job, "is not the folder of a job")
            continue
        for path in sorted(job.iterdir()):
            try:
                stored = _read(path)
            except CorruptError as error:
                dropped += _drop(path, str(error))
            else:
                by_segment[stored.segment].append((path, stored))

    shards: list[HeldShard] = []
    for name, tenants in by_segment.items():
        adopted, bad = _adopt_segment(segments / name, tenants)
        shards += adopted
        dropped += bad

    named = {shard.segment.name for shard in shards}
    for path in segments.iterdir():
        if path.name not in named:
            # Whose pages these were is not known any more, and a trainer may still write to them.
            discard(path)
    for job in manifests.iterdir():
        if not any(job.iterdir()):
            job.rmdir()
    return shards, dropped


def _read(path: Path) -> store_pb2.StoredShard:
    """One manifest file, checked by itself; raises CorruptError."""
    stored = decode(read_bounded(path, MANIFEST_BYTES_MAX))
    key = stored.manifest.key
    if (path.parent.name, path.name) != (key.job, file_name(replica_id(key, stored.manifest.kind))):
        raise CorruptError("does not have the name that its content says")
    return stored


def _adopt_segment(
    path: Path, tenants: list[tuple[Path, store_pb2.StoredShard]]
) -> tuple[list[HeldShard], int]:
    """The shards that one segment really holds, and how many of its manifests were dropped."""
    pools = {pool_of(stored.manifest) for _, stored in tenants}
    try:
        segment = Segment.adopt(path, min(pools))
    except CorruptError as error:
        return [], sum(_drop(manifest, str(error)) for manifest, _ in tenants)
    # Never made by us: then nobody knows who has it mapped, and nobody gets it next.
    segment.recyclable = len(pools) == 1
    shards = []
    dropped = 0
    for manifest, stored in tenants:
        if stored.segment_offset + stored.manifest.bytes > segment.size_bytes:
            dropped += _drop(manifest, f"goes beyond the {segment.size_bytes} bytes of its segment")
        else:
            shards.append(HeldShard(stored.manifest, segment, stored.segment_offset, verified_at_ms=0))
    return shards, dropped


def _drop(path: Path, why: str) -> int:
    """Remove something that does not hold up; returns 1, to be counted."""
    logger.warning("dropped %r at start: %s", os.fspath(path), why)
    discard(path)
    return 1
