"""One copy of one shard: offered to a holder, which pulls it, and watched until it is acknowledged or has failed."""

from __future__ import annotations

import asyncio
import logging
import time

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2

from ..config import Config
from ..counters import Counters
from ..errors import FastCheckdError, FencedError, JobBudgetError, OverBudgetError, PeerError
from ..identity import NodeLife
from ..transfer.client import PeerClient
from ..view import ViewFollower
from .holders import Quarantine
from .placement_client import Placed
from .save import Save
from .shards import Copy, Shard

logger = logging.getLogger(__name__)

#: An offer ends by its outcome or for want of progress, never by this; a call needs some deadline.
OFFER_TIMEOUT_S = 86400.0
#: A holder that has to touch fresh memory for the copy is given this much time for it.
FRESH_MEMORY_BYTES_PER_S = 200_000_000
#: A holder that may also pull from others than this node shows less progress here.
OTHER_SOURCES_PATIENCE = 3
_LOOK_S = 0.25


class Offers:
    """Made to holders by one data process."""

    def __init__(
        self,
        config: Config,
        identity: NodeLife,
        client: PeerClient,
        view: ViewFollower,
        counters: Counters,
        quarantine: Quarantine,
    ) -> None:
        self._config = config
        self._identity = identity
        self._client = client
        self._view = view
        self._counters = counters
        self._quarantine = quarantine
        #: Ranks for whose copies a holder had no room.
        self.short_of_room: set[tuple[str, int]] = set()

    async def offer(
        self, save: Save, shard: Shard, holder: pb.Holder, placed: Placed
    ) -> FastCheckdError | None:
        """Have one copy made; a failure is returned, and the holder rests, so that the others go on."""
        node_id = holder.node.node_id
        request = peer_pb2.ReplicateRequest(
            cluster_id=self._config.cluster_id,
            epoch=placed.response.epoch,
            holder_incarnation=holder.node.incarnation,
            key=shard.manifest.key,
            digest=shard.manifest.digest,
            bytes=shard.bytes,
            sources=[self._self_as_source(), *(copy.holder for copy in shard.acknowledged.values())],
            provisional=placed.alone,
            obsolete_steps=save.obsolete() if placed.alone else (),
        )
        offer = asyncio.create_task(self._client.replicate(holder, request, OFFER_TIMEOUT_S))
        gone = asyncio.create_task(self._view.until_gone(holder.node))
        idle = asyncio.create_task(self._until_idle(save, shard, node_id, len(request.sources)))
        try:
            await asyncio.wait({offer, gone, idle}, return_when=asyncio.FIRST_COMPLETED)
            if not offer.done():
                raise PeerError(
                    f"node {node_id} went DOWN while it fetched shard {shard.index}"
                    if gone.done()
                    else f"node {node_id} has fetched nothing of shard {shard.index} for {idle.result():g} s"
                )
            answer = offer.result()
        except FastCheckdError as error:
            shard.troubled = True
            if isinstance(error, OverBudgetError):
                self.short_of_room.add((save.key.job, save.key.rank))
            logger.warning("%s: shard %d to %s failed: %s", save.key, shard.index, node_id, error)
            # An old epoch is our lag, not the holder's fault; placed alone, it means another life of the holder.
            if placed.alone or not isinstance(error, FencedError):
                # It has room for other jobs.
                whose = save.key.job if isinstance(error, JobBudgetError) else ""
                self._quarantine.add(node_id, whose)
                self._counters.add("peers_quarantined")
            return error
        finally:
            for task in (offer, gone, idle):
                task.cancel()
            await asyncio.gather(offer, gone, idle, return_exceptions=True)
        save.moved()
        self._counters.add("bytes_replicated", shard.bytes)
        self._counters.add("bytes_saved", max(0, shard.bytes - answer.received_bytes))
        shard.acknowledged[node_id] = Copy(holder, answer.received_bytes, tuple(answer.codecs))
        return None

    def _self_as_source(self) -> pb.Holder:
        return pb.Holder(
            node=self._identity.ref(),
            data_address=self._config.data_address,
            lane_address=self._config.lane_address,
        )

    async def _until_idle(self, save: Save, shard: Shard, node_id: str, sources: int) -> float:
        """Return when a holder has fetched nothing for too long: that long, in seconds."""
        assert shard.outgoing is not None
        begun_at = seen_at = time.monotonic()
        patience_s = self._config.transfer_timeout_s * (1 if sources == 1 else OTHER_SOURCES_PATIENCE)
        first_s = patience_s + shard.bytes / FRESH_MEMORY_BYTES_PER_S
        while True:
            await asyncio.sleep(_LOOK_S)
            moved_at = shard.outgoing.moved_at(node_id)
            if moved_at > seen_at:
                seen_at = moved_at
                save.moved()
            allowed_s = patience_s if seen_at > begun_at else first_s
            if time.monotonic() - seen_at > allowed_s:
                return allowed_s
