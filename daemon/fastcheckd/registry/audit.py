"""Asks each node once in a while what it holds, and compares that with what the records say it holds.

A node whose data process began anew, or that dropped a bad replica while no leader listened, keeps its life: nothing
else would tell. Nodes are asked in batches, so that one look at the state serves many.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from ..errors import FastCheckdError
from .model import Ref, ShardId, State, is_live
from .outward import Outward
from .raft.consensus import Consensus
from .redundancy import RecordedReplica, kept_shards, replicas_of

logger = logging.getLogger(__name__)

#: Every node is asked this often.
AUDIT_INTERVAL_S = 30.0
BATCH = 64
#: Questions under way at once.
ASKED_AT_ONCE = 8
ASK_TIMEOUT_S = 10.0

#: Digest of each replica.
Recorded = dict[RecordedReplica, bytes]


def recorded_at(state: State, lives: Iterable[Ref]) -> dict[Ref, Recorded]:
    """The replicas that records name at these lives, LOST ones included."""
    found: dict[Ref, Recorded] = {ref: {} for ref in lives}
    for shard_id, record, shard in kept_shards(state):
        for ref in replicas_of(record, shard):
            if ref in found:
                found[ref][RecordedReplica(shard_id, ref)] = shard.digest
    return found


class Auditor:
    """The rounds of one leader.

    Args:
        mark_lost, mark_held: are told of replicas that are not there, and that are.
    """

    def __init__(
        self,
        engine: Consensus,
        outward: Outward,
        mark_lost: Callable[[Iterable[RecordedReplica]], Awaitable[None]],
        mark_held: Callable[[Iterable[RecordedReplica]], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._outward = outward
        self._mark_lost = mark_lost
        self._mark_held = mark_held

    async def run(self) -> None:
        """Round after round, until cancelled."""
        while True:
            addresses = self._engine.read(
                lambda state: {
                    Ref.of(node): node.data_address for node in state.nodes.values() if is_live(node)
                }
            )
            lives = list(addresses)
            for first in range(0, len(lives), BATCH):
                batch = lives[first : first + BATCH]
                recorded = self._engine.read(lambda state, batch=batch: recorded_at(state, batch))  # type: ignore[misc]
                asking = asyncio.Semaphore(ASKED_AT_ONCE)
                await asyncio.gather(
                    *(
                        self._audit(ref.node_id, addresses[ref], recorded[ref], asking)
                        for ref in batch
                        if recorded[ref]
                    )
                )
            await asyncio.sleep(AUDIT_INTERVAL_S)

    async def _audit(
        self, node_id: str, data_address: str, recorded: Recorded, asking: asyncio.Semaphore
    ) -> None:
        async with asking:
            try:
                replicas = await self._outward.list_replicas(node_id, data_address, ASK_TIMEOUT_S)
            except FastCheckdError as error:
                logger.info("registry: cannot audit the node at %s now: %s", data_address, error)
                return
        there = {(ShardId.of(r.key), r.digest) for r in replicas}
        held = {replica for replica, digest in recorded.items() if (replica.shard, digest) in there}
        try:
            await self._mark_held(held)
            # Steps that went meanwhile are no loss: only what records name then can be LOST.
            await self._mark_lost(set(recorded) - held)
        except FastCheckdError as error:
            logger.info("registry: cannot keep what the audit found until the next one: %s", error)
