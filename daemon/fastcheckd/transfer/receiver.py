"""Offers to this node: a copy that it is to make, for a save that is being replicated or in place of a lost one.

    check → draft (what is here already is taken by digest) → fetch the rest → check again → publish → acknowledge

The acknowledgement is the digest of what is published. A copy that is here already is acknowledged at once, so asking
twice costs nothing. An offer that is repeated while it is worked on joins the work; the work ends when nobody waits for
it any more, except a repair, which the next leader finds done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2

from ..chunks import ChunkTable
from ..config import Config
from ..counters import Counters
from ..errors import (
    FastCheckdError,
    FencedError,
    JobBudgetError,
    NoLeaseError,
    NotHeldError,
    PeerError,
)
from ..health.lease import LeaseHolder
from ..identity import NodeLife
from ..store.draft import Draft
from ..store.provisional import drop_obsolete
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..tasks import to_its_end
from .checks import BASES_MAX, check_copy, check_life, check_offer
from .fetch import Failures, Fetcher
from .pacing import ChunkGate
from .reader import FairTurns, FetchProgress
from .target import CopyTarget

logger = logging.getLogger(__name__)

#: Copies that are made at the same time, and repairs among them.
COPIES_MAX = 128
REPAIRS_MAX = 2
#: How long a copy waits for room. The owner may know sooner than this node that an older step may go.
ROOM_WAIT_S = 1.0
#: One connection: repairs give way.
REPAIR_STREAMS = 1
_Key = tuple[str, int, int, int]


@dataclass(eq=False)
class _Copy:
    """An offer that is being worked on."""

    request: peer_pb2.ReplicateRequest
    task: asyncio.Task[peer_pb2.ReplicateResponse] | None = None
    waiting: int = 0
    #: Of the rank's process that saved it; 0: not known yet.
    session: int = 0
    #: It is about to end: whoever comes now begins anew.
    over: bool = False

    def end(self) -> None:
        """Give it up."""
        self.over = True
        if self.task is not None:
            self.task.cancel()


class _WantedCopy:
    """The shard of an offer, see `Wanted`."""

    def __init__(self, receiver: Receiver, request: peer_pb2.ReplicateRequest, copy: _Copy) -> None:
        self.key = request.key
        self.digest = request.digest
        self.bytes = request.bytes
        self.purpose = peer_pb2.PURPOSE_REPAIR if request.repair else peer_pb2.PURPOSE_REPLICATE
        self.made: CopyTarget | None = None
        self._receiver = receiver
        self._request = request
        self._copy = copy
        self._making = asyncio.Lock()

    @property
    def chunk_count(self) -> int:
        return -(-self.bytes // self._receiver.chunk_bytes)

    def bases(self) -> list[peer_pb2.Base]:
        if self.made is not None:
            base = self.made.draft.base
            return [] if base is None else [_base(base)]
        return [_base(replica) for replica in self._receiver.bases(self.key)]

    async def target(
        self, manifest: pb.ShardManifest, table: ChunkTable, base_step: int | None
    ) -> CopyTarget:
        async with self._making:
            if self.made is None:
                self._copy.session = manifest.session
                draft = await self._receiver.draft(self._request, manifest, table, base_step)
                self.made = CopyTarget(draft)
            return self.made

    def missing(self) -> Sequence[int] | None:
        return None if self.made is None else self.made.draft.missing


class Receiver:
    """The copies that this data process makes. Owned by the event loop's thread.

    Args:
        kept_steps: a job's committed steps by the newest view.
        is_short: whether memory is short for a job's copies, so that they should come encoded.
        gate: paces the chunks of repairs.
        incoming: holds up the chunks of other copies while loads go first.
    """

    def __init__(
        self,
        config: Config,
        identity: NodeLife,
        lease: LeaseHolder,
        store: ReplicaStore,
        fetcher: Fetcher,
        counters: Counters,
        *,
        kept_steps: Callable[[str], Collection[int]],
        is_short: Callable[[str], bool] = lambda _: False,
        gate: ChunkGate,
        incoming: ChunkGate,
    ) -> None:
        self.chunk_bytes = config.chunk_bytes
        self._config = config
        self._identity = identity
        self._lease = lease
        self._store = store
        self._fetcher = fetcher
        self._counters = counters
        self._kept_steps = kept_steps
        self._is_short = is_short
        self._gate = gate
        self._incoming = incoming
        self._turns = FairTurns()
        self._running: dict[_Key, _Copy] = {}

    @property
    def arriving(self) -> int:
        """Copies that are being made for saves. May be asked from any thread."""
        return sum(not copy.request.repair for copy in list(self._running.values()))

    async def replicate(self, request: peer_pb2.ReplicateRequest) -> peer_pb2.ReplicateResponse:
        """Hold the shard as a checked copy when this returns.

        Raises:
            FencedError, InvalidRequestError, OverBudgetError: see `check_offer`; FencedError, too, when a copy from a
                newer process of the rank is here.
            NoLeaseError: this node may have been declared DOWN, and the offer is not a provisional one.
            JobBudgetError, OverBudgetError, StoreFullError, StoreError: no room.
            PeerError: none of the sources gave it, or enough copies are being made already.
        """
        try:
            return await self._replicate(request)
        except FastCheckdError as error:
            self._counters.add("offers_refused")
            if isinstance(error, JobBudgetError):
                self._counters.add("job_budget_refused")
            raise

    async def stop(self) -> None:
        """End the copies under way; nobody writes to the store's memory for them afterwards."""
        running = list(self._running.values())
        for copy in running:
            copy.end()
        await asyncio.gather(
            *(copy.task for copy in running if copy.task is not None), return_exceptions=True
        )

    async def _replicate(self, request: peer_pb2.ReplicateRequest) -> peer_pb2.ReplicateResponse:
        check_offer(
            request,
            cluster_id=self._config.cluster_id,
            incarnation=self._identity.incarnation,
            epoch=self._identity.epoch,
            budget_bytes=self._config.ram_budget_bytes,
        )
        await self._require_lease(request)
        copy = await self._join_or_begin(request)
        assert copy.task is not None
        copy.waiting += 1
        try:
            return await asyncio.shield(copy.task)
        except asyncio.CancelledError:
            if copy.task.cancelled() and not _is_cancelled():
                raise FencedError(
                    "a later offer of the same step of the shard took this one's place"
                ) from None
            raise
        finally:
            copy.waiting -= 1
            if not copy.waiting and not request.repair and not copy.task.done():
                copy.end()

    async def _join_or_begin(self, request: peer_pb2.ReplicateRequest) -> _Copy:
        key = _key(request.key)
        while (running := self._running.get(key)) is not None:
            assert running.task is not None
            same = running.request.digest == request.digest and running.request.repair == request.repair
            if same and not running.over:
                return running
            if not same and running.session:
                # Two states of one step: the later offer counts, unless the one under way is of a newer process.
                _check_newer_session(running.request.key, running.session, await self._session(request))
            running.end()
            await asyncio.wait({running.task})
        repairs = sum(copy.request.repair for copy in self._running.values())
        if len(self._running) >= COPIES_MAX or (request.repair and repairs >= REPAIRS_MAX):
            most = REPAIRS_MAX if request.repair else COPIES_MAX
            raise PeerError(
                f"node {self._config.node_id} is making {most} copies already: try again later, or place the shard "
                "elsewhere"
            )
        copy = self._running[key] = _Copy(request)
        copy.task = asyncio.create_task(self._make(request, copy), name="copy")
        copy.task.add_done_callback(partial(self._ended, key, copy))
        return copy

    async def _session(self, request: peer_pb2.ReplicateRequest) -> int:
        """The session that a shard was saved by, as its sources say.

        Raises:
            FastCheckdError: what the last of them failed with.
        """
        failed: FastCheckdError = PeerError("the offer names no other node")
        for source in request.sources:
            if source.node.node_id == self._config.node_id:
                continue
            try:
                manifest, _ = await self._fetcher.describe(source, request.key, request.digest, request.bytes)
            except FastCheckdError as error:
                failed = error
            else:
                return manifest.session
        raise failed

    def _ended(self, key: _Key, copy: _Copy, task: asyncio.Task[peer_pb2.ReplicateResponse]) -> None:
        if self._running.get(key) is copy:
            del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("no copy of %s made: %s", key, error)

    async def _make(self, request: peer_pb2.ReplicateRequest, copy: _Copy) -> peer_pb2.ReplicateResponse:
        if await asyncio.to_thread(self._is_here, request):
            await self._require_lease(request)
            return peer_pb2.ReplicateResponse(digest=request.digest, was_here=True)
        wanted = _WantedCopy(self, request, copy)
        progress, failures = FetchProgress([request.key.shard], self._turns), Failures()
        sources = [s for s in request.sources if s.node.node_id != self._config.node_id]
        try:
            with self._turns.taking_part():
                manifest = await self._fetcher.fetch(
                    wanted,
                    sources,
                    progress,
                    failures,
                    streams=REPAIR_STREAMS if request.repair else None,
                    gate=self._gate if request.repair else self._incoming,
                )
            if manifest is None or wanted.made is None:
                raise PeerError(
                    f"node {self._config.node_id} got the shard from none of its sources "
                    f"({'; '.join(dict.fromkeys(failures.told)) or 'no other node was named'})"
                )
            # What was true when it began may not be any more.
            await self._require_lease(request)
            self._check_session(wanted.made.draft.manifest)
            codecs = wanted.made.codecs()
            wanted.made.draft.manifest.codecs.extend(codecs)
            await to_its_end(wanted.made.draft.publish)
            # Publishing took time: what is acknowledged is acknowledged under a lease, and by this life.
            await self._require_lease(request)
        finally:
            if wanted.made is not None:
                await to_its_end(wanted.made.draft.abandon)
        self._counters.add("replicas_repaired" if request.repair else "shards_received")
        self._counters.add("repair_bytes", request.bytes if request.repair else 0)
        return peer_pb2.ReplicateResponse(
            digest=manifest.digest, received_bytes=progress.received_bytes, codecs=codecs
        )

    def bases(self, key: pb.ShardKey) -> list[Replica]:
        """Older copies of the shard here, the newest first; of the others only those whose chunks lie as they are.

        The newest may have reverse deltas, too: of a copy that was being made with little memory, and was given up.
        """
        copies = (r for r in self._store.history(key, pb.REPLICA_KIND_COPY) if r.manifest.bytes)
        older = [replica for replica in copies if replica.key.step < key.step]
        return [*older[:1], *(replica for replica in older[1:] if replica.is_whole)][:BASES_MAX]

    async def draft(
        self,
        request: peer_pb2.ReplicateRequest,
        source: pb.ShardManifest,
        table: ChunkTable,
        base_step: int | None,
    ) -> Draft:
        """A place for the shard that a source describes.

        Raises:
            FencedError, CorruptError, InvalidRequestError: it may not be held here.
            JobBudgetError, OverBudgetError, StoreFullError, StoreError: no room.
        """
        manifest = pb.ShardManifest()
        manifest.CopyFrom(source)
        manifest.kind = pb.REPLICA_KIND_COPY
        manifest.part = 0
        manifest.provisional = request.provisional
        for name in ("codecs", "begun_after", "shared_digests"):
            manifest.ClearField(name)
        check_copy(manifest, self._config.node_id)
        self._check_session(manifest)
        if request.provisional:
            self._check_rank_session(manifest)
        base = next((r for r in self.bases(manifest.key) if r.key.step == base_step), None)
        if base is not None and base.chunks != table:
            base = None

        def make() -> Draft:
            if request.provisional:
                kept = self._kept_steps(manifest.key.job)
                drop_obsolete(self._store, manifest, request.obsolete_steps, kept, self._counters)
            return self._store.draft(
                manifest,
                base=base,
                keep_base=self._config.keep_steps > 1,
                lean=self._is_short(manifest.key.job),
                wait_s=ROOM_WAIT_S,
            )

        return await to_its_end(make, undo=lambda draft: draft.abandon())

    def _is_here(self, request: peer_pb2.ReplicateRequest) -> bool:
        """Whether the shard is here and good. A copy that was not checked by this process is checked now."""
        kinds = [pb.REPLICA_KIND_COPY] + [pb.REPLICA_KIND_OWNER] * request.repair
        for kind in kinds:
            held = self._store.find(request.key, kind)
            if held is None or held.manifest.digest != request.digest:
                continue
            with contextlib.suppress(NotHeldError):
                if held.verified_at_ms or self._store.verify(held):
                    return True
        return False

    async def _require_lease(self, request: peer_pb2.ReplicateRequest) -> None:
        """Raise unless this node may act as a holder, still in the life that the offer is for.

        A lease that is on its way is waited for a moment; it may be that of the next life.

        Raises:
            NoLeaseError: it has none.
            FencedError: it has registered anew.
        """
        check_life(request.holder_incarnation, self._identity.incarnation)
        if request.provisional:
            return
        with contextlib.suppress(NoLeaseError):
            await self._lease.until_held()
        self._lease.require()
        check_life(request.holder_incarnation, self._identity.incarnation)

    def _check_session(self, manifest: pb.ShardManifest) -> None:
        """A copy from a rank's newer process is not replaced by one from its older."""
        held = self._store.find(manifest.key, pb.REPLICA_KIND_COPY)
        if held is not None:
            _check_newer_session(held.key, held.manifest.session, manifest.session)

    def _check_rank_session(self, manifest: pb.ShardManifest) -> None:
        """Nobody has looked whether the sender's session is current: at least none of a newer one has been here."""
        for held in self._store.held(manifest.key.job):
            if held.key.rank == manifest.key.rank:
                _check_newer_session(held.key, held.manifest.session, manifest.session)


def _check_newer_session(key: pb.ShardKey, here: int, coming: int) -> None:
    if here > coming:
        raise FencedError(
            f"this node has step {key.step} from session {here} of the rank; session {coming} is over"
        )


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that asks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _key(key: pb.ShardKey) -> _Key:
    return key.job, key.step, key.rank, key.shard


def _base(replica: Replica) -> peer_pb2.Base:
    return peer_pb2.Base(step=replica.key.step, digest=replica.manifest.digest)
