"""Making room among a shard's provisional steps while there is no registry that would say what is kept.

The committed step is mostly had from the newest one's bytes, through every step in between. Before one of those goes,
the committed step gets bytes of its own: then a chain of ways back does not grow with the length of the outage.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from fastcheck_proto.v1 import common_pb2 as pb

from ..counters import Counters
from ..errors import NotHeldError, StoreError
from .held import HeldShard
from .ram_store import RamStore
from .retention import provisional_to_drop

logger = logging.getLogger(__name__)


def drop_obsolete(
    store: RamStore,
    coming: pb.ShardManifest,
    obsolete_steps: Collection[int],
    kept_steps: Collection[int],
    counters: Counters,
) -> None:
    """Drop what `provisional_to_drop` names of the shard that is about to be put. Blocks; may copy a replica.

    Never raises for want of room or because somebody reads: then the memory is used a little longer.
    """
    here = _of_shard(store, coming)
    doomed = provisional_to_drop([held.manifest for held in here], coming, obsolete_steps, kept_steps)
    for held in [held for held in here if held.key.step in doomed]:
        older = [other for other in _of_shard(store, coming) if other.key.step < held.key.step]
        try:
            if older and not older[-1].is_full:
                store.full(older[-1])
        except StoreError as error:
            logger.info("step %d stays behind step %d: %s", held.key.step, older[-1].key.step, error)
        try:
            store.drop(held)
        except (NotHeldError, StoreError) as error:
            logger.info("provisional step %d stays for now: %s", held.key.step, error)
            continue
        counters.add("provisional_dropped")


def _of_shard(store: RamStore, manifest: pb.ShardManifest) -> list[HeldShard]:
    """This node's copies of that shard, the oldest first."""
    key = manifest.key
    found = [
        held
        for held in store.held(key.job)
        if (held.kind, held.key.rank, held.key.shard) == (pb.REPLICA_KIND_COPY, key.rank, key.shard)
    ]
    return sorted(found, key=lambda held: held.key.step)
