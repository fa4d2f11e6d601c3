"""Makes a copy of a committed shard for this node, because the registry's leader asks for it.

The checks are those of a put: cluster, life, epoch, lease, room. A copy that is there already is said to be there, so
asking twice, or a second leader asking, costs nothing. A fetch goes on when its asker is gone: the next one finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2

from ..config import Config
from ..counters import Counters
from ..digests import DIGEST_BYTES
from ..errors import CorruptError, FencedError, InvalidRequestError, NotHeldError, OverBudgetError, PeerError
from ..identity import Identity
from ..store.ram_store import HeldShard, RamStore
from ..store.segments import COPY_POOL, Segment
from ..transfer.pacing import Gate
from ..transfer.peer_client import PeerClient
from ..transfer.put_checks import check_cluster, check_key, check_life
from .check import Checker

logger = logging.getLogger(__name__)

FETCHES_MAX = 2
SOURCES_MAX = 16
#: One connection: repairs take the back seat.
STREAMS = 1
_Key = tuple[str, int, int, int, bytes]
R = TypeVar("R")


class CopyMaker:
    """The copies that this data process makes for itself. Owned by the event loop's thread.

    Args:
        require_lease: raises NoLeaseError when this node may have been declared DOWN.
        gate: paces the chunks.
    """

    def __init__(
        self,
        *,
        config: Config,
        identity: Identity,
        store: RamStore,
        peers: PeerClient,
        counters: Counters,
        checker: Checker,
        gate: Gate,
        require_lease: Callable[[], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._store = store
        self._peers = peers
        self._counters = counters
        self._checker = checker
        self._gate = gate
        self._require_lease = require_lease
        self._running: dict[_Key, asyncio.Task[peer_pb2.FetchReplicaResponse]] = {}

    async def fetch(self, request: peer_pb2.FetchReplicaRequest) -> peer_pb2.FetchReplicaResponse:
        """Hold the shard as a checked copy when this returns.

        Raises:
            FencedError: asked for another life of this node, or by an older membership.
            InvalidRequestError: malformed, or for another cluster.
            NoLeaseError: this node may have been declared DOWN.
            OverBudgetError, StoreFullError, StoreError: no room.
            PeerError: none of the sources gave it; or enough copies are being made already.
        """
        self._check(request)
        name = request.key
        key = (name.job, name.step, name.rank, name.shard, request.digest)
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= FETCHES_MAX:
                raise PeerError(
                    f"node {self._config.node_id} is making {FETCHES_MAX} copies already: try again later"
                )
            running = self._running[key] = asyncio.create_task(self._fetch(request), name="fetch")
            running.add_done_callback(lambda task: self._ended(key, task))
        return await asyncio.shield(running)

    async def stop(self) -> None:
        """End the fetches under way; nobody writes to the store's memory for them afterwards."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, key: _Key, task: asyncio.Task[peer_pb2.FetchReplicaResponse]) -> None:
        del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("no copy of %s made: %s", key[:4], error)

    def _check(self, request: peer_pb2.FetchReplicaRequest) -> None:
        check_cluster(request.cluster_id, self._config.cluster_id)
        check_key(request.key)
        if len(request.digest) != DIGEST_BYTES or len(request.sources) > SOURCES_MAX:
            raise InvalidRequestError(
                f"a fetch names a digest of {DIGEST_BYTES} bytes and at most {SOURCES_MAX} sources"
            )
        check_life(request.holder_incarnation, self._identity.incarnation)
        if request.epoch < self._identity.epoch:
            raise FencedError(
                f"the copy was ordered in epoch {request.epoch}, this node knows of {self._identity.epoch}: "
                "decide again"
            )
        if request.bytes > self._config.ram_budget_bytes:
            raise OverBudgetError(
                f"a shard of {request.bytes} bytes is more than this node's whole RAM budget of "
                f"{self._config.ram_budget_bytes} bytes"
            )
        self._require_lease()

    async def _fetch(self, request: peer_pb2.FetchReplicaRequest) -> peer_pb2.FetchReplicaResponse:
        if await self._is_here(request):
            return peer_pb2.FetchReplicaResponse(digest=request.digest, was_here=True)
        segment = await _finished(
            asyncio.to_thread(self._store.allocate, request.bytes, COPY_POOL, job=request.key.job)
        )
        try:
            manifest = await self._pull(request, segment)
            # What was true when it began may not be any more.
            check_life(request.holder_incarnation, self._identity.incarnation)
            self._require_lease()
            await _finished(asyncio.to_thread(self._publish, manifest, segment))
        finally:
            self._store.release(segment)
        self._counters.add("replicas_repaired")
        self._counters.add("repair_bytes", request.bytes)
        return peer_pb2.FetchReplicaResponse(digest=manifest.digest)

    async def _is_here(self, request: peer_pb2.FetchReplicaRequest) -> bool:
        for kind in (pb.REPLICA_KIND_COPY, pb.REPLICA_KIND_OWNER):
            held = self._store.find(request.key, kind)
            if held is None or held.manifest.digest != request.digest:
                continue
            if held.verified_at_ms or await self._checker.check(held):
                return True
        return False

    async def _pull(self, request: peer_pb2.FetchReplicaRequest, segment: Segment) -> pb.ShardManifest:
        """Get the bytes from one source after the other."""
        tried: list[str] = []
        with segment.view[: request.bytes] as into:
            for source in request.sources:
                if source.node.node_id == self._config.node_id:
                    continue
                try:
                    return await self._peers.get_shard(
                        source,
                        request.key,
                        request.digest,
                        into,
                        _unwatched,
                        streams=STREAMS,
                        gate=self._gate,
                    )
                except (CorruptError, NotHeldError, PeerError) as error:
                    tried.append(str(error))
        raise PeerError(
            f"node {self._config.node_id} got the shard from none of its holders "
            f"({'; '.join(tried) or 'none was named'})"
        )

    def _publish(self, source: pb.ShardManifest, segment: Segment) -> HeldShard:
        manifest = pb.ShardManifest()
        manifest.CopyFrom(source)
        manifest.kind = pb.REPLICA_KIND_COPY
        manifest.part = 0
        manifest.ClearField("codecs")  # they tell how the bytes went to the one that gave them
        manifest.provisional = False
        return self._store.publish(manifest, segment, 0, verified=True)


async def _finished(work: Coroutine[Any, Any, R]) -> R:
    """Wait for a thread's work even when cancelled: memory must not change hands behind its back."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _unwatched(_received_bytes: int) -> None:
    """Nobody follows a repair byte by byte."""
