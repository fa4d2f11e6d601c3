"""Steps that an earlier life of this process staged and left uncommitted: as the manifests in the store tell."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

from fastcheck_proto.v1 import common_pb2 as pb

from ..errors import NotHeldError, StoreError
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from .content import of_manifests
from .save import Save, SaveKey

logger = logging.getLogger(__name__)


def left_over(store: ReplicaStore, node_id: str, is_over: Callable[[SaveKey, int], bool]) -> Iterator[Save]:
    """The saves to carry on with, step by step of each rank; each takes its segment again.

    The scrub runs meanwhile: what it finds corrupt is left out, and every other rank goes on.

    Args:
        is_over: whether a session's step need not be committed any more.
    """
    shards: dict[tuple[str, int, int], list[Replica]] = {}
    for held in store.held():
        # What was restored here for a rank of another node is that node's to commit.
        if held.kind == pb.REPLICA_KIND_OWNER and held.manifest.owner == node_id:
            shards.setdefault((held.key.job, held.key.rank, held.key.step), []).append(held)
    for (job, rank, step), found in sorted(shards.items(), key=lambda item: item[0]):
        key, manifests = SaveKey(job, rank, step), [held.manifest for held in found]
        if _complete(manifests) and not is_over(key, manifests[0].session):
            try:
                save = _save(key, manifests, store, found)
            except StoreError as error:
                logger.warning("%s of an earlier life is not carried on with: %s", key, error)
                continue
            yield save


def _save(
    key: SaveKey, manifests: list[pb.ShardManifest], store: ReplicaStore, shards: Sequence[Replica]
) -> Save:
    first = manifests[0]
    content = of_manifests(manifests)
    segment = store.take_again(shards[-1])
    try:
        for shard in shards:
            with store.mapped(shard) as found:  # still good
                if found is not segment or shard.offset != shard.manifest.offset:
                    raise NotHeldError(f"shard {tuple(shard.id)} does not lie with the others of its state")
    except StoreError:
        store.release(segment)
        raise
    return Save(
        key=key,
        save_id=first.save_id or secrets.token_hex(16),
        generation=first.generation,
        begun_after=max(manifest.begun_after for manifest in manifests),
        session=first.session,
        world_size=first.world_size,
        segment=segment,
        state_bytes=first.state_bytes,
        header_offset=first.header_offset,
        header_bytes=first.header_bytes,
        content=content,
        lossy=content.lossy,
        shared=first.shared if first.HasField("shared") else None,
        shared_digests=tuple(each for m in manifests for each in m.shared_digests),
        reported=True,  # perhaps, by the earlier life
        begun_at=float("-inf"),  # before this life; by how much nobody knows
    )


def _complete(manifests: Iterable[pb.ShardManifest]) -> bool:
    """Whether the shards cover the rank's whole state."""
    position = 0
    for manifest in sorted(manifests, key=lambda m: m.offset):
        if manifest.offset != position:
            return False
        position += manifest.bytes
    return position == next(iter(manifests)).state_bytes
