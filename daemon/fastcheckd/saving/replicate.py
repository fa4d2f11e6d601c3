"""Carries a save to its holders and through the commit; one that is not sealed yet, as far as it may go.

Place → wait until the step before is sent → put every shard to every holder at once, against the step before
where the planner says so → publish the owner's manifests → report until the registry decides. A holder that fails
gets a rest (quarantine) and its copy goes elsewhere; the split into shards is fixed by the first placement, later
ones only supply other holders. A registry that does not answer is done without (`without_quorum`): the step is then
provisional until somebody is there to commit it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import Executor

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..chunks import ChunkTable
from ..codec.fitting import Fits
from ..codec.planner import Planner, Route
from ..config import Config
from ..counters import Counters
from ..digests import shard_digest
from ..errors import (
    FastCheckdError,
    FencedError,
    HolderLostError,
    JobBudgetError,
    NoQuorumError,
    OverBudgetError,
    PeerError,
    PlacementError,
    ReplicasDisagreeError,
    StoreError,
    SupersededError,
    from_code,
)
from ..identity import Identity
from ..registry.client import RegistryClient
from ..store.ram_store import RamStore
from ..store.thinning import Thinning
from ..transfer.codec_pool import CodecPool
from ..transfer.peer_client import PeerClient
from ..transfer.shard_source import BaseSource, ShardSource
from ..view import ViewFollower
from .holders import Quarantine, pick_holders
from .placing import REGISTRY_TIMEOUT_S, RETRY_PAUSE_MAX_S, RETRY_PAUSE_S, Placed, Placing
from .rhythm import Rhythm
from .save import Save
from .shards import Bases, Copy, Preparation, Shard, uses_per_copy

logger = logging.getLogger(__name__)

#: Rounds of sending before the save fails: nodes die one by one, only a defect fails every round.
PUT_ATTEMPTS_MAX = 30
#: How long the leader keeps a report waiting before it says for whom.
REPORT_WAIT_S = 1.0


class Replicator:
    """Runs saves to their end; one instance per data process."""

    def __init__(
        self,
        *,
        config: Config,
        identity: Identity,
        store: RamStore,
        registry: RegistryClient,
        peers: PeerClient,
        view: ViewFollower,
        counters: Counters,
        executor: Executor,
        codec: CodecPool,
        planner: Planner,
    ) -> None:
        self._config = config
        self._identity = identity
        self._store = store
        self._registry = registry
        self._peers = peers
        self._view = view
        self._counters = counters
        self._executor = executor
        self._codec = codec
        self._planner = planner
        #: Shards being sent, of all saves.
        self._at_once = 0
        self.rhythm = Rhythm(config.commit_timeout_s / 2)
        #: Ranks for whose copies a holder had no room.
        self.short_of_room: set[tuple[str, int]] = set()
        self._quarantine = Quarantine(config.quarantine_s)
        self._placing = Placing(config, identity, registry, view, self._quarantine)
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
        with contextlib.ExitStack() as thinnings:
            with Bases(self._store) as bases:
                shards = self._split(save, placed, bases, thinnings)
                self._at_once += len(shards)
                try:
                    epoch = await self._replicate(save, shards, placed)
                finally:
                    self._at_once -= len(shards)
                    for shard in shards:
                        shard.source.base = (
                            None  # not pinned any more; who gets the shard later gets it whole
                        )
            self._learn(shards)
            await self._commit(save, shards, epoch)
            await asyncio.get_running_loop().run_in_executor(self._executor, self._thin, shards)

    async def _commit(self, save: Save, shards: list[Shard], epoch: int) -> None:
        """Report a step whose copies are made until it is committed; raises what stopped it."""
        while True:
            save.replicate_s = time.monotonic() - save.sealed_at
            self._account(save, shards)
            if self._alone(shards) and not save.reported:
                save.reach(tpb.SAVE_STATE_PROVISIONAL)
                await self._placing.until_heard(save)
            save.reach(tpb.SAVE_STATE_REPLICATED)
            reported = time.monotonic()
            try:
                await self._report(save, shards, epoch)
            except HolderLostError as error:
                logger.warning("%s: %s; placing its shards again", save.key, error)
                for shard in shards:
                    for node_id in error.node_ids:
                        shard.acknowledged.pop(node_id, None)
                placed = await self._placing.place(save)
                epoch = await self._replicate(save, shards, placed)
                continue
            save.commit_s = time.monotonic() - reported
            return

    def _learn(self, shards: list[Shard]) -> None:
        """Tell the planner how its plans went."""
        for shard in shards:
            self._counters.add("chunks_encoded", shard.source.encoded_chunks)
            self._counters.add("encode_cpu_ms", round(1000 * shard.source.encode_s))
            if (sent := shard.sent()) is not None:
                self._planner.learn(shard.plan, sent)

    def _thin(self, shards: list[Shard]) -> None:
        """The step before is older now: keep it as a way back from this one, if that was prepared."""
        for shard in shards:
            try:
                if shard.thinning is not None and shard.thinning.publish(shard.manifest.key.step):
                    self._counters.add("shards_thinned")
            except StoreError as error:
                logger.info("shard %d of the step before stays as it is: %s", shard.index, error)

    def _begin_thinning(self, save: Save, key: pb.ShardKey, base: BaseSource | None) -> Thinning | None:
        if base is None or self._config.keep_steps == 1:
            return None  # it will just go
        older = pb.ShardKey()
        older.CopyFrom(key)
        older.step = base.step
        held = self._store.find(older, pb.REPLICA_KIND_OWNER)
        if held is None or held.manifest.digest != base.digest:
            return None
        try:
            return self._store.begin_thinning(held)
        except StoreError as error:
            logger.info("step %d stays as it is beside step %d: %s", base.step, key.step, error)
            return None

    @staticmethod
    def _account(save: Save, shards: list[Shard]) -> None:
        """What the acknowledged copies took."""
        save.copies = min(len(s.acknowledged) for s in shards)
        sent_bytes = sum(c.outcome.sent_bytes for s in shards for c in s.acknowledged.values())
        save.encoded_bytes = sent_bytes // save.copies
        save.codecs = uses_per_copy(shards, save.copies)
        save.encode_s = sum(s.source.encode_s for s in shards)

    def _split(
        self, save: Save, placed: Placed, bases: Bases, thinnings: contextlib.ExitStack
    ) -> list[Shard]:
        """Cut the state at chunk ends, one shard for each that the placement has, and plan each.

        Thinnings that are begun are ended with `thinnings`, unless they were published.
        """
        content = save.content
        placement = placed.response
        copies = min(len(s.holders) for s in placement.shards)
        stretches = content.cut(len(placement.shards))
        fits = Fits()
        shards = []
        offset = 0
        for index, stretch in enumerate(stretches):
            plans = content.plans[stretch.start : stretch.stop]
            table = ChunkTable([plan.bytes for plan in plans])
            key = pb.ShardKey(job=save.key.job, step=save.key.step, rank=save.key.rank, shard=index)
            manifest = pb.ShardManifest(
                key=key,
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
                kind=pb.REPLICA_KIND_COPY,
                save_id=save.save_id,
                generation=save.generation,
                shared=save.shared,
            )
            base = bases.find(key, offset, table)
            holders = pick_holders(index, copies, (), placement)
            route = Route(key.job, key.rank, index, tuple(sorted(h.node.node_id for h in holders)))
            sharing = self._at_once + len(stretches)
            plan = self._planner.plan(
                route, table.lengths, has_base=base is not None, sharing=sharing, lean=save.lean
            )
            everything = plan.offer_base and plan.fraction == 1.0
            thinning = self._begin_thinning(save, key, base) if save.lean and everything else None
            if thinning is not None:
                thinnings.callback(thinning.abort)
            view = save.segment.view[offset : offset + table.shard_bytes]
            source = ShardSource(
                view,
                table,
                step=key.step,
                plans=plans,
                base=base if plan.offer_base else None,
                pool=self._codec,
                choose=plan.choose,
                fits=fits,
                prepare=content.quantise and Preparation(content.quantise, view, plans, base),
                on_way_back=None if thinning is None else thinning.add,
            )
            shards.append(Shard(index, offset, table.shard_bytes, source, manifest, plan, thinning=thinning))
            offset += table.shard_bytes
        return shards

    # --- sending ---------------------------------------------------------------------------------

    async def _replicate(self, save: Save, shards: list[Shard], placed: Placed) -> int:
        """Get every shard to as many holders as the placement names; returns the epoch placed by."""
        copies = min(len(s.holders) for s in placed.response.shards)
        for attempt in range(PUT_ATTEMPTS_MAX):
            placement = placed.response
            for shard in shards:
                shard.manifest.provisional = placed.alone
            puts = [
                self._put(save, shard, holder, placement.epoch)
                for shard in shards
                for holder in pick_holders(
                    shard.index, copies - len(shard.acknowledged), shard.acknowledged, placement
                )
            ]
            errors = [error for error in await asyncio.gather(*puts) if error is not None]
            short = [s for s in shards if len(s.acknowledged) < copies]
            if not short:
                await self._publish_rest(save, shards)
                held_by = {s.index: [c.holder for c in s.acknowledged.values()] for s in shards}
                self._placing.remember(save, placed, held_by)
                return placement.epoch
            error = errors[0] if errors else PlacementError(f"nobody is left to hold shard {short[0].index}")
            save.stalled(error)
            if attempt + 1 == PUT_ATTEMPTS_MAX or save.idle_s() > self._config.commit_timeout_s:
                raise error
            save.resent_shards += len(short)
            self._counters.add("shards_resent", len(short))
            await asyncio.sleep(min(RETRY_PAUSE_S * attempt, RETRY_PAUSE_MAX_S))
            placed = await self._placing.place(save)
        raise AssertionError("unreachable")

    @staticmethod
    def _alone(shards: list[Shard]) -> bool:
        """Whether the last placement was this node's own."""
        return any(shard.manifest.provisional for shard in shards)

    async def _put(self, save: Save, shard: Shard, holder: pb.Holder, epoch: int) -> FastCheckdError | None:
        """Send one copy; a failure is returned, and the holder rests, so that the others go on."""
        started = time.monotonic()
        put = asyncio.create_task(
            self._peers.put_shard(
                holder,
                epoch=epoch,
                owner=self._identity.ref(),
                manifest=shard.manifest,
                source=shard.source,
                progress=save.moved,
                obsolete_steps=save.obsolete() if shard.manifest.provisional else (),
                due=lambda: self.rhythm.due((save.key.job, save.key.rank), save.sealed_at),
            )
        )
        gone = asyncio.create_task(self._view.until_gone(holder.node))
        node_id = holder.node.node_id
        try:
            await asyncio.wait({put, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not put.done():
                raise PeerError(f"node {node_id} went DOWN while it was sent shard {shard.index}")
            outcome = put.result()
            seconds = time.monotonic() - started
        except FastCheckdError as error:
            shard.troubled = True
            if isinstance(error, OverBudgetError):
                self.short_of_room.add((save.key.job, save.key.rank))
            logger.warning("%s: shard %d to %s failed: %s", save.key, shard.index, node_id, error)
            # An old epoch is our lag, not the holder's fault; placed alone, it means another life of the holder.
            if shard.manifest.provisional or not isinstance(error, FencedError):
                # It has room for other jobs.
                whose = save.key.job if isinstance(error, JobBudgetError) else ""
                self._quarantine.add(node_id, whose)
                self._counters.add("peers_quarantined")
            return error
        finally:
            for task in (put, gone):
                task.cancel()
            await asyncio.gather(put, gone, return_exceptions=True)
        save.moved()
        self._counters.add("bytes_replicated", outcome.raw_bytes)
        self._counters.add("bytes_saved", max(0, outcome.raw_bytes - outcome.sent_bytes))
        shard.acknowledged[node_id] = Copy(holder, outcome, seconds)
        try:
            await self._publish_own(save, shard)
        except FastCheckdError as error:  # not the holder's fault; tried again before the step is reported
            save.stalled(error)
        return None

    async def _publish_own(self, save: Save, shard: Shard) -> None:
        """Make the owner's copy findable: from here on a restart of this process keeps it."""
        async with shard.publishing:
            if not shard.published:
                await asyncio.get_running_loop().run_in_executor(self._executor, self._publish, save, shard)
                shard.published = True

    async def _publish_rest(self, save: Save, shards: list[Shard]) -> None:
        """Have all of the owner's copies findable: without them a step would have a copy less than it says.

        Raises:
            FastCheckdError: this node's store could not, and the save's patience is at its end.
        """
        while True:
            try:
                for shard in shards:
                    await self._publish_own(save, shard)
            except FastCheckdError as error:
                logger.warning("%s: its own copy cannot be published here: %s", save.key, error)
                await self._placing.wait_out(save, error)
            else:
                return

    def _publish(self, save: Save, shard: Shard) -> None:
        manifest = pb.ShardManifest()
        manifest.CopyFrom(shard.manifest)
        manifest.kind = pb.REPLICA_KIND_OWNER
        manifest.begun_after = save.begun_after
        if shard.index == 0:  # for the next life of this process
            manifest.shared_digests.extend(save.shared_digests)
        manifest.chunk_digests = shard.source.complete()
        manifest.digest = shard_digest(manifest.chunk_digests)
        self._store.publish(manifest, save.segment, shard.offset, verified=True)

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
                        offset=s.offset,
                        bytes=s.bytes,
                        digest=shard_digest(s.source.complete()),
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
