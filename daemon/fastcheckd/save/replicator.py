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
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..chunks import ChunkTable
from ..codec.encoder import encode
from ..codec.fit import Fits
from ..config import Config
from ..counters import Counters
from ..errors import (
    FastCheckdError,
    HolderLostError,
    NotHeldError,
    PeerError,
    PlacementError,
    StoreError,
)
from ..identity import NodeLife
from ..registry.client import RegistryClient
from ..store.replica_store import ReplicaStore
from ..tasks import settled, to_its_end
from ..transfer.client import PeerClient
from ..transfer.codec_pool import CodecPool
from ..transfer.encoder_cache import EncoderCache
from ..transfer.outgoing import OutgoingShard
from ..transfer.policy import SAMPLE_SHARE, ReplicationPolicy
from ..transfer.replication_pacing import ReplicationPacing
from ..view import ViewFollower
from .holders import Quarantine, pick_holders
from .offers import Offers
from .placement_client import RETRY_PAUSE_MAX_S, RETRY_PAUSE_S, Placed, PlacementClient
from .save import Save
from .save_interval import SaveIntervals
from .shards import Shard, complete_digests, uses_per_copy
from .step_report import StepReporter

logger = logging.getLogger(__name__)

#: Rounds of offers before the save fails: nodes die one by one, only a defect fails every round.
OFFER_ATTEMPTS_MAX = 30


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
        quarantine = Quarantine(config.quarantine_s)
        self._offers = Offers(config, identity, client, view, counters, quarantine)
        #: Ranks for whose copies a holder had no room.
        self.short_of_room = self._offers.short_of_room
        self._placing = PlacementClient(config, identity, registry, view, quarantine)
        self._reporter = StepReporter(config, identity, registry, counters, self._placing)
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
                await self._reporter.report(save, shards, placed.response.epoch)
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
                _route(shard),
                sent_bytes=out.sent_bytes,
                busy_s=out.busy_s,
                seconds=seconds,
                idle_cores=idle_cores,
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
                self._offers.offer(save, shard, holder, placed)
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


def _route(shard: Shard) -> tuple[str, int, int]:
    """What is alike enough from step to step to be compared."""
    key = shard.manifest.key
    return key.job, key.rank, key.shard


def _idle_s() -> float:
    """Core seconds that nothing used so far on this machine."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
