"""Making room among a shard's provisional steps while there is no registry that would say what is kept."""

from __future__ import annotations

import logging
from collections.abc import Collection

from fastcheck_proto.v1 import common_pb2 as pb

from ..counters import Counters
from ..errors import StoreError
from .replica_store import ReplicaStore
from .retention import provisional_to_drop

logger = logging.getLogger(__name__)


def drop_obsolete(
    store: ReplicaStore,
    coming: pb.ShardManifest,
    obsolete_steps: Collection[int],
    kept_steps: Collection[int],
    counters: Counters,
) -> None:
    """Drop the copies that `provisional_to_drop` names of the shard that is about to come. Blocks; older steps may be
    encoded against what stays.

    Raises nothing for want of the file system: then the memory is used a little longer.
    """
    here = store.history(coming.key, pb.REPLICA_KIND_COPY)
    doomed = provisional_to_drop([held.manifest for held in here], coming, obsolete_steps, kept_steps)
    for held in [held for held in reversed(here) if held.key.step in doomed]:
        try:
            store.drop(held)
        except StoreError as error:
            logger.info("provisional step %d stays for now: %s", held.key.step, error)
            continue
        counters.add("provisional_dropped")
