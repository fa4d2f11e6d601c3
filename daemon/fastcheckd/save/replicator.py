"""Carries a save to its holders and through the commit.

Place → wait until the step before is replicated → hash → publish the owner's own copy → offer every shard to its
holders at once, who pull it → report until the registry decides. A holder that fails gets a rest (quarantine) and its
copy goes elsewhere; the split into shards is fixed by the first placement, later ones only supply other holders. A
registry that does not answer is done without (`without_quorum`): the step is then provisional until somebody is there
to commit it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

import psutil

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..chunks import ChunkTable
from ..codec.encoder import encode
from ..codec.fit import Fits
from ..config import Config
from ..counters import Counters
from ..errors import (
    FastCheckdError,
    FencedError,
    HolderLostError,
    JobBudgetError,
    NoQuorumError,
    NotHeldError,
    OverBudgetError,
    PeerError,
    PlacementError,
    ReplicasDisagreeError,
    StoreError,
    SupersededError,
    from_code,
)
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..store.replica_store import ReplicaStore
from ..tasks import settled, to_its_end
from ..transfer.client import PeerClient
from ..transfer.codec_pool import CodecPool
from ..transfer.encoder_cache import EncoderCache, OutgoingShard
from ..transfer.policy import SAMPLE_SHARE, ReplicationPolicy
from ..transfer.replication_pacing import ReplicationPacing
from ..view import ViewFollower
from .holders import Quarantine, pick_holders
from .placement_client import REGISTRY_TIMEOUT_S, RETRY_PAUSE_MAX_S, RETRY_PAUSE_S, Placed, PlacementClient
from .save import Save
from .save_interval import SaveIntervals
from .shards import Copy, Shard, complete_digests, uses_per_copy

logger = logging.getLogger(__name__)

#: Rounds of offers before the save fails: nodes die one by one, only a defect fails every round.
OFFER_ATTEMPTS_MAX = 30
#: How long the leader keeps a report waiting before it says for whom.
REPORT_WAIT_S = 1.0
#: An offer ends by its outcome or for want of progress, never by this; a call needs some deadline.
OFFER_TIMEOUT_S = 86400.0
#: A holder that has to touch fresh memory for the copy is given this much time for it.
FRESH_MEMORY_BYTES_PER_S = 200_000_000
#: A holder that may also pull from others than this node shows less progress here.
OTHER_SOURCES_PATIENCE = 3
_LOOK_S = 0.25


class Replicator:
    """Runs saves to their end; one instance per data process."""

    def __init__(
        self,
        *,
        config: Config,
        identity: NodeLife,
        store: ReplicaStore,
        registry: RegistryClient,
        client: PeerClient,
        view: ViewFollower,
        counters: Counters,
        codec: CodecPool,
        encoders: EncoderCache,
        policy: ReplicationPolicy,
        pacing: ReplicationPacing,
    ) -> None:
        self._config = config
        self._identity = identity
        self._store = store
        self._registry = registry
        self._client = client
        self._view = view
        self._counters = counters
        self._codec = codec
        self._encoders = encoders
        self._policy = policy
        self._pacing = pacing
        #: Shards being sent, of all saves.
        self._at_once = 0
        self.rhythm = SaveIntervals(config.commit_timeout_s / 2)
        #: Ranks for whose copies a holder had no room.
        self.short_of_room: set[tuple[str, int]] = set()
        self._quarantine = Quarantine(config.quarantine_s)
        self._placing = PlacementClient(config, identity, registry, view, self._quarantine)
        #: Whether the registry answers these saves.
        self.silence = self._placing.silence

    async def run(self, save: Save) -> None:
        """Bring a sealed save to COMMITTED; raises what stopped it."""
        placed = await self._placing.place(save)
        if save.after is not None:
            # Step by step: what is being sent now is the next one's base.
            await save.after.until_sent()
            save.after = None
            save.moved()
            placed = await self._placing.place(save)
        shards = self._split(save, placed)
        with contextlib.ExitStack() as stack:
            await to_its_end(partial(self._complete, save, shards))
            await self._publish(save, shards)
            self._prepare_sending(save, shards, stack)
            self._at_once += len(shards)
            started, idle_s = time.monotonic(), _idle_s()
            try:
                placed = await self._replicate(save, shards, placed)
            finally:
                self._at_once -= len(shards)
            self._learn(shards, time.monotonic() - started, _idle_s() - idle_s)
            sampling = asyncio.create_task(self._sample(shards), name=f"sample-{save.key}")
            try:
                await self._commit(save, shards, placed)
            finally:
                await settled({sampling})
            sampling.result()
            await to_its_end(partial(self._keep_older, shards))

    async def _commit(self, save: Save, shards: list[Shard], placed: Placed) -> None:
        """Report a step whose copies are made until it is committed; raises what stopped it."""
        while True:
            save.replicate_s = time.monotonic() - save.sealed_at
            self._account(save, shards)
            if placed.alone and not save.reported:
                save.reach(tpb.SAVE_STATE_PROVISIONAL)
                await self._placing.until_heard(save)
            save.reach(tpb.SAVE_STATE_REPLICATED)
            reported = time.monotonic()
            try:
                await self._report(save, shards, placed.response.epoch)
            except HolderLostError as error:
                logger.warning("%s: %s; placing its shards again", save.key, error)
                for shard in shards:
                    for node_id in error.node_ids:
                        shard.acknowledged.pop(node_id, None)
                placed = await self._replicate(save, shards, await self._placing.place(save))
                continue
            save.commit_s = time.monotonic() - reported
            return

    @staticmethod
    def _account(save: Save, shards: list[Shard]) -> None:
        """What the acknowledged copies took."""
        save.copies = min(len(s.acknowledged) for s in shards)
        received_bytes = sum(c.received_bytes for s in shards for c in s.acknowledged.values())
        save.encoded_bytes = received_bytes // save.copies
        save.codecs = uses_per_copy(shards, save.copies)
        save.encode_s = sum(s.outgoing.encode_s for s in shards if s.outgoing is not None)

    # --- what is sent ----------------------------------------------------------------------------

    def _split(self, save: Save, placed: Placed) -> list[Shard]:
        """Cut the state at chunk ends, one shard for each that the placement has."""
        content = save.content
        shards = []
        offset = 0
        stretches = content.cut(len(placed.response.shards))
        for index, stretch in enumerate(stretches):
            plans = content.plans[stretch.start : stretch.stop]
            table = ChunkTable([plan.bytes for plan in plans])
            manifest = pb.ShardManifest(
                key=pb.ShardKey(job=save.key.job, step=save.key.step, rank=save.key.rank, shard=index),
                shard_count=len(stretches),
                world_size=save.world_size,
                owner=self._config.node_id,
                session=save.session,
                state_bytes=save.state_bytes,
                offset=offset,
                bytes=table.shard_bytes,
                header_offset=save.header_offset,
                header_bytes=save.header_bytes,
                chunk_bytes=self._config.chunk_bytes,
                chunk_lengths=table.lengths if content.listed else (),
                lossy=save.lossy,
                kind=pb.REPLICA_KIND_OWNER,
                save_id=save.save_id,
                generation=save.generation,
                begun_after=save.begun_after,
                provisional=placed.alone,
                shared=save.shared,
                # For the next process of this node.
                shared_digests=save.shared_digests if index == 0 else (),
            )
            shard = Shard(manifest, plans, table)
            older = self._store.history(manifest.key, pb.REPLICA_KIND_OWNER)
            shard.base = next(
                (
                    replica
                    for replica in older
                    if replica.key.step < save.key.step
                    and replica.manifest.offset == offset
                    and replica.is_whole
                    and replica.chunks == table
                ),
                None,
            )
            shards.append(shard)
            offset += table.shard_bytes
        return shards

    def _complete(self, save: Save, shards: list[Shard]) -> None:
        """Hash all shards; make them lossy first, if the trainer allowed it. Blocks."""
        for shard in shards:
            offset = shard.manifest.offset
            with contextlib.ExitStack() as stack:
                view = stack.enter_context(save.segment.view[offset : offset + shard.bytes])
                base = None
                if shard.base is not None and save.content.quantise is not None:
                    try:
                        base = stack.enter_context(self._store.reading(shard.base))
                    except NotHeldError:  # retention was faster
                        shard.base = None
                threads = self._config.worker_threads
                complete_digests(shard, view, threads, save.content.quantise, base)

    async def _publish(self, save: Save, shards: list[Shard]) -> None:
        """Have the owner's copies findable: holders pull from them, and a restart of this process keeps them.

        Raises:
            FastCheckdError: this node's store could not, and the save's patience is at its end.
        """

        def publish() -> None:
            for shard in shards:
                if shard.own is None:
                    shard.own = self._store.publish(
                        shard.manifest, save.segment, shard.manifest.offset, verified=True
                    )

        while True:
            try:
                await to_its_end(publish)
            except FastCheckdError as error:
                logger.warning("%s: its own copy cannot be published here: %s", save.key, error)
                await self._placing.wait_out(save, error)
            else:
                return

    def _prepare_sending(self, save: Save, shards: list[Shard], stack: contextlib.ExitStack) -> None:
        """Say how the shards are to be sent, until `stack` ends."""
        fits = Fits()
        sharing = self._at_once + len(shards)
        for shard in shards:
            on_encoded = None
            if save.lean and shard.base is not None and self._config.keep_steps > 1:
                shard.deltas = self._store.reverse_deltas(shard.base)
                stack.callback(shard.deltas.abandon)
                on_encoded = shard.deltas.add
            course = stack.enter_context(
                self._pacing.replicating(
                    shard.bytes * self._config.tolerate,
                    lambda: self.rhythm.due((save.key.job, save.key.rank), save.sealed_at),
                )
            )
            shard.outgoing = OutgoingShard(
                shard.plans,
                fraction=self._policy.fraction(_route(shard), sharing=sharing),
                alone=self._config.codec == "always",
                lean=shard.deltas is not None,
                readers=self._config.tolerate,
                fits=fits,
                course=course,
                on_encoded=on_encoded,
            )
            stack.enter_context(
                self._encoders.outgoing(shard.manifest.key, shard.manifest.digest, shard.outgoing)
            )

    def _learn(self, shards: list[Shard], seconds: float, idle_s: float) -> None:
        """Tell the policy how the sending went."""
        encode_s = sum(shard.outgoing.encode_s for shard in shards if shard.outgoing is not None)
        idle_cores = (idle_s + encode_s) / max(seconds, 1e-6)
        for shard in shards:
            out = shard.outgoing
            if out is None or shard.troubled:
                continue
            raw_bytes, encoded_bytes, cpu_s = out.encoding
            self._policy.encoded(_route(shard), raw_bytes=raw_bytes, encoded_bytes=encoded_bytes, cpu_s=cpu_s)
            self._policy.sent(
                _route(shard), sent_bytes=out.sent_bytes, busy_s=out.busy_s, idle_cores=idle_cores
            )

    async def _sample(self, shards: list[Shard]) -> None:
        """Encode a few chunks that went raw, to know what encoding the next steps would give."""
        for shard in shards:
            if shard.base is None or shard.own is None or not self._policy.wants_sample(_route(shard)):
                continue
            try:
                await asyncio.wrap_future(self._codec.submit(self._encode_some, shard))
            except (PeerError, StoreError) as error:  # shutting down, or one of the two is not held any more
                logger.debug("no sample of shard %d: %s", shard.index, error)

    def _encode_some(self, shard: Shard) -> None:
        """In a thread of the codec pool."""
        assert shard.base is not None and shard.own is not None
        own, base = shard.own, shard.base
        count = max(1, int(SAMPLE_SHARE * len(shard.table)))
        changed = [i for i in range(len(shard.table)) if own.chunk_digest(i) != base.chunk_digest(i)]
        raw_bytes = encoded_bytes = 0
        started_s = time.thread_time()
        with self._store.reading(own) as newer, self._store.reading(base) as older:
            for index in changed[:: max(1, len(changed) // count)][:count]:
                with newer.chunk(index) as new, older.chunk(index) as old:
                    encoded = encode(
                        new,
                        old,
                        shard.plans[index],
                        step=own.key.step,
                        base_step=base.key.step,
                        digest=own.chunk_digest(index),
                        base_digest=base.chunk_digest(index),
                    )
                    raw_bytes += len(new)
                    encoded_bytes += len(new) if encoded is None else len(encoded.payload)
        cpu_s = time.thread_time() - started_s
        self._policy.encoded(_route(shard), raw_bytes=raw_bytes, encoded_bytes=encoded_bytes, cpu_s=cpu_s)

    def _keep_older(self, shards: list[Shard]) -> None:
        """Where memory is short, keep the step before as reverse deltas, so that its segment is free. Blocks."""
        for shard in shards:
            if shard.deltas is None or shard.own is None:
                continue
            try:
                shard.deltas.publish(shard.own)
            except StoreError as error:
                logger.info("shard %d of the step before stays as it is: %s", shard.index, error)

    # --- offers ----------------------------------------------------------------------------------

    async def _replicate(self, save: Save, shards: list[Shard], placed: Placed) -> Placed:
        """Get every shard to as many holders as the placement names; returns the placement that did it."""
        copies = min(len(s.holders) for s in placed.response.shards)
        for attempt in range(OFFER_ATTEMPTS_MAX):
            offers = [
                self._offer(save, shard, holder, placed)
                for shard in shards
                for holder in pick_holders(
                    shard.index, copies - len(shard.acknowledged), shard.acknowledged, placed.response
                )
            ]
            errors = [error for error in await asyncio.gather(*offers) if error is not None]
            short = [s for s in shards if len(s.acknowledged) < copies]
            if not short:
                held_by = {s.index: [c.holder for c in s.acknowledged.values()] for s in shards}
                self._placing.remember(save, placed, held_by)
                return placed
            error = errors[0] if errors else PlacementError(f"nobody is left to hold shard {short[0].index}")
            save.stalled(error)
            if attempt + 1 == OFFER_ATTEMPTS_MAX or save.idle_s() > self._config.commit_timeout_s:
                raise error
            save.resent_shards += len(short)
            self._counters.add("shards_resent", len(short))
            await asyncio.sleep(min(RETRY_PAUSE_S * attempt, RETRY_PAUSE_MAX_S))
            placed = await self._placing.place(save)
        raise AssertionError("unreachable")

    async def _offer(
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

    # --- committing ------------------------------------------------------------------------------

    async def _report(self, save: Save, shards: list[Shard], epoch: int) -> None:
        """Report until the registry commits; raises what it refuses with."""
        silent_since: float | None = None
        give_up_at = time.monotonic() + self._config.rank_wait_timeout_s
        while True:
            record = rpb.RankRecord(
                rank=save.key.rank,
                session=save.session,
                owner=self._identity.ref(),
                state_bytes=save.state_bytes,
                shards=[
                    rpb.ShardRecord(
                        shard=s.index,
                        offset=s.manifest.offset,
                        bytes=s.bytes,
                        digest=s.manifest.digest,
                        # In one order, whoever acknowledged first: the same holders are the same record.
                        holders=[s.acknowledged[node_id].node for node_id in sorted(s.acknowledged)],
                    )
                    for s in shards
                ],
                lossy=save.lossy,
                shared=save.shared,
                begun_after=save.begun_after or None,
            )
            request = rpb.ReportRequest(
                job=save.key.job,
                step=save.key.step,
                world_size=save.world_size,
                epoch=epoch,
                record=record,
                wait_s=REPORT_WAIT_S,
                shared_digests=save.shared_digests,
            )
            save.reported = True
            try:
                response = await self._registry.report(request, timeout_s=REPORT_WAIT_S + REGISTRY_TIMEOUT_S)
            except (NoQuorumError, PeerError) as error:
                now = time.monotonic()
                silent_since = now if silent_since is None else silent_since
                if isinstance(error, NoQuorumError):
                    self._placing.silence.noted()
                    if now - silent_since > self._config.provisional_after_s:
                        # Replicated, and nobody there to commit it: it waits like those that were placed without.
                        save.reach(tpb.SAVE_STATE_PROVISIONAL)
                await self._placing.wait_out(save, error)
                # The silence is not the other ranks' fault.
                give_up_at = time.monotonic() + self._config.rank_wait_timeout_s
                continue
            self._placing.silence.heard()
            silent_since = None
            if response.state == rpb.REPORT_STATE_COMMITTED:
                return
            if response.state == rpb.REPORT_STATE_WAITING:
                if response.absent_ranks:
                    ranks = ", ".join(map(str, response.absent_ranks))
                    save.stalled(
                        SupersededError(f"{save.key} is replicated, but rank {ranks} has not saved this step")
                    )
                else:
                    save.moved()
                if time.monotonic() > give_up_at:
                    raise SupersededError(
                        f"{save.key} is replicated, but other ranks did not save this step within "
                        f"{self._config.rank_wait_timeout_s:g} s; it may still be committed if they do"
                    )
                continue
            if response.error.code == pb.ERROR_CODE_HOLDER_LOST:
                lost = tuple(n.node_id for n in response.lost_holders)
                raise HolderLostError(response.error.message, lost)
            over = response.error.code == pb.ERROR_CODE_INCARNATION_OVER
            if over and await self._identity.outlives(record.owner):
                continue
            if response.error.code == pb.ERROR_CODE_REPLICAS_DISAGREE:
                self._counters.add("replicas_disagreed")
                raise ReplicasDisagreeError(response.error.message, response.disagreements)
            raise from_code(response.error.code, response.error.message)


def _route(shard: Shard) -> tuple[str, int, int]:
    """What is alike enough from step to step to be compared."""
    key = shard.manifest.key
    return key.job, key.rank, key.shard


def _idle_s() -> float:
    """Core seconds that nothing used so far on this machine."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
