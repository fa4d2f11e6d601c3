"""Steps that an earlier life of this process staged and left uncommitted: as the manifests in the store tell."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator

from fastcheck_proto.v1 import common_pb2 as pb

from ..store.ram_store import HeldShard, RamStore
from .content import of_manifests
from .save import Save, SaveKey


def left_over(store: RamStore, node_id: str, is_over: Callable[[SaveKey, int], bool]) -> Iterator[Save]:
    """The saves to carry on with, step by step of each rank; each takes its segment again.

    Args:
        is_over: whether a session's step need not be committed any more.
    """
    shards: dict[tuple[str, int, int], list[HeldShard]] = {}
    for held in store.held():
        # What was restored here for a rank of another node is that node's to commit.
        if held.kind == pb.REPLICA_KIND_OWNER and held.manifest.owner == node_id:
            shards.setdefault((held.key.job, held.key.rank, held.key.step), []).append(held)
    for (job, rank, step), found in sorted(shards.items(), key=lambda item: item[0]):
        key, manifests = SaveKey(job, rank, step), [held.manifest for held in found]
        if _complete(manifests) and not is_over(key, manifests[0].session):
            yield _save(key, manifests, store, found[-1])


def _save(key: SaveKey, manifests: list[pb.ShardManifest], store: RamStore, shard: HeldShard) -> Save:
    first = manifests[0]
    content = of_manifests(manifests)
    return Save(
        key=key,
        save_id=first.save_id or secrets.token_hex(16),
        generation=first.generation,
        session=first.session,
        world_size=first.world_size,
        segment=store.take_again(shard),
        state_bytes=first.state_bytes,
        header_offset=first.header_offset,
        header_bytes=first.header_bytes,
        content=content,
        lossy=content.lossy,
        shared=first.shared if first.HasField("shared") else None,
        shared_digests=tuple(each for m in manifests for each in m.shared_digests),
        reported=True,  # perhaps, by the earlier life
    )


def _complete(manifests: Iterable[pb.ShardManifest]) -> bool:
    """Whether the shards cover the rank's whole state."""
    position = 0
    for manifest in sorted(manifests, key=lambda m: m.offset):
        if manifest.offset != position:
            return False
        position += manifest.bytes
    return position == next(iter(manifests)).state_bytes
