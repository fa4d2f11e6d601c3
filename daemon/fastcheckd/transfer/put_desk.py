"""The holder's side of a put: who may, where the bytes go, and when the copy counts.

BeginPut takes a replica to change in place, or reserves memory, and issues tickets; the lane brings the
chunks, FinishPut proves and publishes. Every transfer ends: by FinishPut, AbortPut, a lost connection, a
newer put of the same shard, a reader of the replica that it changes, or by lying idle. All methods block and may
be called from any thread; undoing a patch is slow and happens outside every lock.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2

from ..chunks import ChunkTable
from ..counters import Counters
from ..digests import shard_digest
from ..errors import (
    CorruptError,
    FastCheckdError,
    FencedError,
    JobBudgetError,
    NotHeldError,
    PeerError,
    StoreError,
)
from ..store.provisional import drop_obsolete
from ..store.ram_store import HeldShard, RamStore
from ..store.segments import COPY_POOL
from .incoming import IncomingShard
from .put_checks import check_life, check_put
from .targets import PatchTarget, Target, WholeTarget
from .tickets import PutGrant, TicketOffice

logger = logging.getLogger(__name__)

TRANSFERS_MAX = 128
#: A transfer without a connection is given up after so many transfer timeouts.
IDLE_TIMEOUTS = 3
#: How long a put waits for room. The owner may know sooner than this node that an older step may go.
ROOM_WAIT_S = 1.0
_Key = tuple[str, int, int, int]


@dataclass(frozen=True, eq=False)
class _Transfer:
    transfer_id: str
    key: _Key
    #: Order of the BeginPuts: of two for one shard the later one counts.
    number: int
    #: Of this node, when it began.
    incarnation: int
    incoming: IncomingShard
    grant: PutGrant
    #: Step of the replica that it changes in place.
    base_step: int | None


class PutDesk:
    """All puts under way to this node. `start` begins the watch over idle ones.

    `incarnation` gives this node's own (0: not assumed yet), `epoch` the newest one this process
    learnt from the registry. Neither is ever learnt from a peer's request: one wrong peer could then
    fence all others off. `require_lease` raises NoLeaseError while this node may not act as a holder.
    `kept_steps` gives a job's committed steps by the newest view.
    """

    def __init__(
        self,
        *,
        cluster_id: str,
        node_id: str,
        store: RamStore,
        tickets: TicketOffice,
        counters: Counters,
        incarnation: Callable[[], int],
        epoch: Callable[[], int],
        require_lease: Callable[[], None],
        kept_steps: Callable[[str], Collection[int]],
        budget_bytes: int,
        transfer_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        transfers_max: int = TRANSFERS_MAX,
    ) -> None:
        self._cluster_id = cluster_id
        self._node_id = node_id
        self._store = store
        self._tickets = tickets
        self._counters = counters
        self._incarnation = incarnation
        self._epoch = epoch
        self._require_lease = require_lease
        self._kept_steps = kept_steps
        self._budget_bytes = budget_bytes
        self._timeout_s = transfer_timeout_s
        self._clock = clock
        self._transfers_max = transfers_max
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._by_key: dict[_Key, _Transfer] = {}
        #: BeginPuts that are allocating: they count against the limit too.
        self._beginning = 0
        self._number = 0
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._expire_idle, name="put-expiry", daemon=True)

    def start(self) -> None:
        """Begin to watch for idle transfers."""
        self._watch.start()

    def close(self) -> None:
        """Refuse new puts and abort those under way."""
        with self._lock:
            self._closed.set()
            open_now = list(self._transfers)
        for transfer_id in open_now:
            self.abort(transfer_id)
        if self._watch.is_alive():
            self._watch.join(self._timeout_s)

    @property
    def transfers(self) -> int:
        """Puts under way."""
        with self._lock:
            return len(self._transfers) + self._beginning

    def begin(self, request: peer_pb2.BeginPutRequest) -> peer_pb2.BeginPutResponse:
        """Reserve memory for a copy and hand out tickets, one per stream. May be slow: fresh memory.

        Raises:
            NoLeaseError: this node has no lease, and the put is not a provisional one.
            FencedError, InvalidRequestError, OverBudgetError: see `check_put`.
            JobBudgetError: its job has as much here as it may.
            OverBudgetError, StoreFullError: no room.
            PeerError: too many transfers are under way.
        """
        try:
            return self._begin(request)
        except FastCheckdError as error:
            self._counters.add("puts_refused")
            if isinstance(error, JobBudgetError):
                self._counters.add("job_budget_refused")
            raise

    def finish(self, request: peer_pb2.FinishPutRequest) -> peer_pb2.FinishPutResponse:
        """Prove that all of it arrived, make it visible, and tell the digest of what is held.

        Whatever the outcome, the transfer is over.

        Raises:
            NotHeldError: no such transfer: aborted, expired or replaced.
            NoLeaseError: this node has no lease, and the put is not a provisional one.
            FencedError: this node has begun another life since BeginPut.
            InvalidRequestError: chunks are missing.
            CorruptError: what is here is not what the owner has.
            StoreError: the store cannot publish it.
        """
        transfer = self._take(request.transfer_id)
        if transfer is None:
            raise NotHeldError(
                f"no transfer {request.transfer_id[:40]!r} here: it was aborted, replaced by a newer one "
                "or lay idle too long; begin it again"
            )
        incoming = transfer.incoming
        try:
            check_life(transfer.incarnation, self._incarnation())
            self._check_lease(incoming.manifest)
            chunk_digests = incoming.seal()
            digest = shard_digest(chunk_digests)
            if chunk_digests != request.chunk_digests or digest != request.digest:
                raise CorruptError(
                    "the copy's digest is not the owner's: the owner's bytes changed while sent"
                )
            manifest = pb.ShardManifest()
            manifest.CopyFrom(incoming.manifest)
            manifest.chunk_digests = chunk_digests
            manifest.digest = digest
            manifest.kind = pb.REPLICA_KIND_COPY
            self._check_session(manifest)
            incoming.publish(manifest)
            # Sealing and publishing took time: what is acknowledged is acknowledged under a lease.
            self._check_lease(manifest)
        finally:
            self._give_up(transfer)
        self._counters.add("shards_received")
        return peer_pb2.FinishPutResponse(digest=digest)

    def abort(self, transfer_id: str) -> None:
        """Give a reservation back. Harmless when there is none."""
        transfer = self._take(transfer_id)
        if transfer is not None:
            self._give_up(transfer)

    def needs_lease(self, transfer_id: str) -> bool:
        """Whether FinishPut of this transfer asks for the lease; a provisional put does not."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
        return transfer is not None and not transfer.incoming.manifest.provisional

    def _check_lease(self, manifest: pb.ShardManifest) -> None:
        if not manifest.provisional:
            self._require_lease()

    def _check_session(self, manifest: pb.ShardManifest) -> None:
        """A copy from a rank's newer process is not replaced by one from its older."""
        held = self._store.find(manifest.key, pb.REPLICA_KIND_COPY)
        if held is not None:
            self._check_newer_session(held.manifest, manifest)

    def _check_rank_session(self, manifest: pb.ShardManifest) -> None:
        """Nobody has looked whether the sender's session is current: at least none of a newer one has been here."""
        for held in self._store.held(manifest.key.job):
            if held.key.rank == manifest.key.rank:
                self._check_newer_session(held.manifest, manifest)

    @staticmethod
    def _check_newer_session(here: pb.ShardManifest, coming: pb.ShardManifest) -> None:
        if here.session > coming.session:
            raise FencedError(
                f"this node has step {here.key.step} from session {here.session} of the rank; "
                f"session {coming.session} is over"
            )

    def _begin(self, request: peer_pb2.BeginPutRequest) -> peer_pb2.BeginPutResponse:
        incarnation = self._incarnation()
        table = check_put(
            request,
            cluster_id=self._cluster_id,
            node_id=self._node_id,
            incarnation=incarnation,
            epoch=self._epoch(),
            budget_bytes=self._budget_bytes,
        )
        self._check_lease(request.manifest)
        self._check_session(request.manifest)
        if request.provisional:
            self._check_rank_session(request.manifest)
            # Before anything is patched: making room may have to read the replica that would be.
            kept = self._kept_steps(request.manifest.key.job)
            drop_obsolete(self._store, request.manifest, request.obsolete_steps, kept, self._counters)
        with self._lock:
            if self._closed.is_set():
                raise PeerError(f"node {self._node_id} is shutting down: place the shard elsewhere")
            if len(self._transfers) + self._beginning >= self._transfers_max:
                raise PeerError(
                    f"node {self._node_id} already receives {self._transfers_max} shards, its limit: "
                    "try again later or place the shard elsewhere"
                )
            self._beginning += 1
            self._number += 1
            number = self._number
        transfer_id = secrets.token_hex(16)
        try:
            base, target = self._open_target(request, table, transfer_id)
            try:
                transfer = self._admit(request, transfer_id, number, incarnation, target, base)
            except BaseException:
                target.abandon()
                raise
        finally:
            with self._lock:
                self._beginning -= 1
        try:
            if isinstance(target, PatchTarget) and target.wanted:  # before it was in the books
                raise PeerError(f"a reader needs step {transfer.base_step}: try again")
            tickets = [self._tickets.issue(transfer.grant) for _ in range(request.streams)]
        except FastCheckdError:
            self.abort(transfer.transfer_id)
            raise
        return peer_pb2.BeginPutResponse(
            transfer_id=transfer.transfer_id,
            tickets=tickets,
            base_step=transfer.base_step,
            fresh_memory=isinstance(target, WholeTarget) and target.fresh_memory,
        )

    def _open_target(
        self, request: peer_pb2.BeginPutRequest, table: ChunkTable, transfer_id: str
    ) -> tuple[HeldShard | None, Target]:
        """A replica to change, if it is one that the sender offered and nobody reads it, or memory of its own."""
        step = request.manifest.key.step
        base = self._acceptable_base(request, table)
        if base is not None:

            def give_way() -> None:
                # The reader waits for the outcome, not in here; undoing may take a while.
                threading.Thread(target=self.abort, args=(transfer_id,), name="put-undo", daemon=True).start()

            try:
                patch = self._store.begin_patch(base, step, on_wanted=give_way)
                return base, PatchTarget(patch, base, self._counters, step=step)
            except StoreError as error:
                logger.info("shard %s comes whole: %s", tuple(base.id), error)
        segment = self._store.allocate(
            table.shard_bytes, COPY_POOL, job=request.manifest.key.job, wait_s=ROOM_WAIT_S
        )
        return None, WholeTarget(self._store, segment, table, step=step)

    def _acceptable_base(self, request: peer_pb2.BeginPutRequest, table: ChunkTable) -> HeldShard | None:
        """The newest replica of the shard here, if it is one of the offered steps and cut the same way."""
        coming = request.manifest
        key = coming.key
        here = [
            held
            for held in self._store.held(key.job)
            if (held.kind, held.key.rank, held.key.shard) == (pb.REPLICA_KIND_COPY, key.rank, key.shard)
        ]
        newest = max(here, key=lambda held: held.key.step, default=None)
        if newest is None or not newest.is_full or not coming.bytes or newest.key.step >= key.step:
            return None
        manifest = newest.manifest
        offered = any(
            (base.step, base.digest) == (newest.key.step, manifest.digest) for base in request.bases
        )
        same_place = (manifest.offset, manifest.bytes) == (coming.offset, coming.bytes)
        return newest if offered and same_place and newest.chunks == table else None

    def _admit(
        self,
        request: peer_pb2.BeginPutRequest,
        transfer_id: str,
        number: int,
        incarnation: int,
        target: Target,
        base: HeldShard | None,
    ) -> _Transfer:
        """Enter a transfer into the books; an older one of the same shard gives way."""
        key = request.manifest.key
        incoming = IncomingShard(request.manifest, target, streams=request.streams, clock=self._clock)
        transfer = _Transfer(
            transfer_id=transfer_id,
            key=(key.job, key.step, key.rank, key.shard),
            number=number,
            incarnation=incarnation,
            incoming=incoming,
            grant=PutGrant(incoming=incoming, streams=request.streams, fail=lambda: self.abort(transfer_id)),
            base_step=base.key.step if base is not None else None,
        )
        with self._lock:
            if self._closed.is_set():
                raise PeerError(f"node {self._node_id} is shutting down: place the shard elsewhere")
            older = self._by_key.get(transfer.key)
            if older is not None:
                self._check_newer_session(older.incoming.manifest, request.manifest)
                if older.number > number and older.incoming.manifest.session == request.manifest.session:
                    raise FencedError("a newer put of the same shard has begun meanwhile")
            if older is not None:
                del self._transfers[older.transfer_id]
            self._transfers[transfer_id] = self._by_key[transfer.key] = transfer
        if older is not None:
            self._give_up(older)
        return transfer

    def _take(self, transfer_id: str) -> _Transfer | None:
        """Strike a transfer off the books: whoever gets it ends it."""
        with self._lock:
            transfer = self._transfers.pop(transfer_id, None)
            if transfer is not None:
                del self._by_key[transfer.key]
            return transfer

    def _give_up(self, transfer: _Transfer) -> None:
        self._tickets.revoke(transfer.grant)
        transfer.incoming.abandon()

    def _expire_idle(self) -> None:
        limit_s = IDLE_TIMEOUTS * self._timeout_s
        while not self._closed.wait(self._timeout_s):
            self.expire(limit_s)

    def expire(self, idle_s: float) -> int:
        """Abort transfers that had no connection for so long; how many there were."""
        with self._lock:
            transfers = list(self._transfers.values())
        idle = [t for t in transfers if t.incoming.idle_s > idle_s]
        for transfer in idle:
            logger.warning("gave up the put of shard %s: nothing came for %g s", transfer.key, idle_s)
            self.abort(transfer.transfer_id)
        return len(idle)
