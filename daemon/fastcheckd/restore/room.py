"""Brings a committed step of a rank into one local segment, checked, and keeps it there while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..counters import Counters
from ..errors import (
    CorruptError,
    FastCheckdError,
    InvalidRequestError,
    LostError,
    NoQuorumError,
    NotHeldError,
    PeerError,
    StepGoneError,
    WorldSizeError,
)
from ..registry.client import RegistryClient
from ..store.ram_store import HeldShard, RamStore
from ..store.segments import Segment, staging_pool
from ..transfer.peer_client import PeerClient
from ..view import ViewFollower
from .gathering import Bytes, Gatherings, is_gathered
from .plan import ShardPlan, other_sources, plan_fetch
from .verify import count_bad_chunks
from .without_quorum import LOOKUP_TIMEOUT_S as PROVISIONAL_LOOKUP_TIMEOUT_S
from .without_quorum import Survey

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 20.0
LIST_TIMEOUT_S = 2.0
#: A node that is just starting refuses connections for a moment, and a channel that saw it does not try again for a
#: second. Before a shard is called lost, those that were not reached are asked once more after this pause.
ASK_AGAIN_AFTER_S = 1.5


@dataclass
class _Tally:
    """Where the bytes of one load came from."""

    local_bytes: int = 0
    fetched_bytes: int = 0
    bad_copies: int = 0
    holders: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Candidate:
    """A step that answers a load, this rank's part of it."""

    record: rpb.StepRecord
    #: Steps to name if it cannot be had.
    kept: list[int]
    #: Whom to ask, if the registry cannot say.
    nodes: Mapping[str, rpb.NodeRecord] | None = None

    @property
    def provisional(self) -> bool:
        """Found without the registry."""
        return self.nodes is not None


@dataclass
class _Hunt:
    """Who was asked for a shard in vain."""

    #: What each of them said.
    told: list[str] = field(default_factory=list)
    unreached: list[pb.Holder] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """A rank's state in local memory."""

    ready: tpb.LoadReady
    segment: Segment


class RestoreRoom:
    """All loads of one data process. Owned by the event loop's thread.

    Args:
        on_brought: told what a load has brought here and keeps.
    """

    def __init__(
        self,
        *,
        config: Config,
        store: RamStore,
        registry: RegistryClient,
        peers: PeerClient,
        view: ViewFollower,
        counters: Counters,
        executor: Executor,
        on_brought: Callable[[Sequence[HeldShard]], None],
    ) -> None:
        self._config = config
        self._store = store
        self._registry = registry
        self._peers = peers
        self._view = view
        self._counters = counters
        self._executor = executor
        self._on_brought = on_brought
        self.survey = Survey(peers, view)
        self._gatherings = Gatherings(store)
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        #: Loads whose bytes are being brought here.
        self._bringing = 0

    @property
    def bringing(self) -> bool:
        """Whether a load is under way whose bytes are not all here. May be asked from any thread."""
        return self._bringing > 0

    @contextlib.asynccontextmanager
    async def load(self, request: tpb.LoadRequest) -> AsyncIterator[Loaded | None]:
        """Hold the asked-for step in a local segment for as long as the context lasts.

        Yields None when no step was asked for by number and none is committed.

        Raises:
            StepGoneError: the asked-for step is not kept; the message lists what is.
            WorldSizeError: the step was saved by another number of ranks.
            LostError: every copy of some shard is bad or gone; the message names older steps.
            NoQuorumError: no registry answers, and the request does not allow to do without.
        """
        started = time.monotonic()
        candidates = await self._find(request)
        if not candidates:
            yield None
            return
        if is_gathered(candidates[0].record):
            async with self._load_gathered(request, candidates[0], started) as loaded:
                yield loaded
            return
        candidates = [candidate for candidate in candidates if not is_gathered(candidate.record)]
        lock = self._locks.setdefault((request.job, request.rank), asyncio.Lock())
        tally = _Tally()
        async with lock:  # two loads of one rank must not both fetch
            self._bringing += 1
            try:
                found, shards = await self._bring_first(request.job, candidates, tally)
            finally:
                self._bringing -= 1
            pins = contextlib.ExitStack()
            pins.enter_context(self._store.pinned(shards[0]))  # all lie in one segment
        record = found.record
        first, segment = shards[0].manifest, shards[0].segment
        self._counters.add("restores")
        with pins:
            yield Loaded(
                tpb.LoadReady(
                    step=record.step,
                    segment=tpb.SegmentRef(path=str(segment.path), bytes=segment.size_bytes),
                    state_bytes=first.state_bytes,
                    header_offset=first.header_offset,
                    header_bytes=first.header_bytes,
                    local_bytes=tally.local_bytes,
                    fetched_bytes=tally.fetched_bytes,
                    holders=len(tally.holders),
                    bad_copies=tally.bad_copies,
                    restore_s=time.monotonic() - started,
                    lossy=record.ranks[0].lossy,
                    provisional=found.provisional,
                ),
                segment,
            )

    @contextlib.asynccontextmanager
    async def _load_gathered(
        self, request: tpb.LoadRequest, candidate: _Candidate, started: float
    ) -> AsyncIterator[Loaded]:
        """Hold a state in local memory whose ranks saved a part each. Any rank of any world size may have it."""
        step, nodes, tally = candidate.record, candidate.nodes, _Tally()
        if nodes is None:
            nodes = {n.node_id: n for n in (await self._nodes()).nodes}

        async def bring(record: rpb.RankRecord, into: Bytes) -> pb.ShardManifest:
            plans = plan_fetch(record, nodes, self._config.node_id)
            fetches = [
                self._fetch(request.job, step.step, record, plan, into, nodes, tally) for plan in plans
            ]
            return (await asyncio.gather(*fetches))[0]

        async with contextlib.AsyncExitStack() as held:
            self._bringing += 1
            try:
                # The rank's own part first: it stays here as its owner's copy, and the next save's base.
                for own in [rank for rank in step.ranks if rank.rank == request.rank]:
                    lock = self._locks.setdefault((request.job, request.rank), asyncio.Lock())
                    async with lock:
                        alone = rpb.StepRecord(job=request.job, step=step.step, ranks=[own])
                        await self._bring(request.job, alone, tally, nodes)
                found = await held.enter_async_context(self._gatherings.gathered(step, bring))
            except LostError as error:
                raise LostError(f"{error}. {_offer(step.step, candidate.kept)}") from None
            finally:
                self._bringing -= 1
            self._counters.add("restores")
            ready = found.ready(request.rank)
            ready.step = step.step
            ready.local_bytes = max(0, sum(rank.state_bytes for rank in step.ranks) - tally.fetched_bytes)
            ready.fetched_bytes = tally.fetched_bytes
            ready.holders = len(tally.holders)
            ready.bad_copies = tally.bad_copies
            ready.restore_s = time.monotonic() - started
            ready.lossy = any(rank.lossy for rank in step.ranks)
            ready.provisional = candidate.provisional
            yield Loaded(ready, found.segment)

    async def _find(self, request: tpb.LoadRequest) -> list[_Candidate]:
        """The steps to try, the best first: the registry's answer, or all that the nodes hold complete."""
        try:
            found = await self._lookup(request)
        except NoQuorumError as error:
            if not request.allow_provisional:
                raise NoQuorumError(
                    f"{error}. Without it, the newest step that the nodes hold complete can be loaded, committed or "
                    "not: load(state, allow_provisional=True)"
                ) from None
        else:
            return [] if found is None else [_Candidate(*found)]
        steps = await self.survey.candidates(request)
        nodes = self.survey.nodes()
        numbers = [step.step for step in reversed(steps)]
        return [_Candidate(s.rank_record(request.job, request.rank), numbers, nodes) for s in steps]

    async def _bring_first(
        self, job: str, candidates: list[_Candidate], tally: _Tally
    ) -> tuple[_Candidate, list[HeldShard]]:
        """The first step that proves good. A single rank may go on to an older one; several have agreed on one."""
        for candidate in candidates:
            try:
                return candidate, await self._bring(job, candidate.record, tally, candidate.nodes)
            except LostError as error:
                step = candidate.record.step
                if candidate is candidates[-1] or candidate.record.world_size > 1:
                    raise LostError(f"{error}. {_offer(step, candidate.kept)}") from None
                logger.warning("step %d of job %s looked complete and is not: %s", step, job, error)
        raise AssertionError("no candidates")

    async def _lookup(self, request: tpb.LoadRequest) -> tuple[rpb.StepRecord, list[int]] | None:
        timeout_s = PROVISIONAL_LOOKUP_TIMEOUT_S if request.allow_provisional else LOOKUP_TIMEOUT_S
        lookup = rpb.LookupRequest(job=request.job, rank=request.rank)
        if request.HasField("step"):
            lookup.step = request.step
        response = await self._registry.lookup(lookup, timeout_s=timeout_s)
        kept = list(response.kept_steps)
        if not response.HasField("record"):
            if request.HasField("step"):
                raise StepGoneError(
                    f"job {request.job!r} has no committed step {request.step} any more; "
                    f"it has {', '.join(map(str, kept)) or 'none'}"
                )
            return None
        record = response.record
        if is_gathered(record):
            return record, kept  # by any number of ranks
        if record.world_size != request.world_size:
            raise WorldSizeError(
                f"step {record.step} of job {request.job!r} was saved by {record.world_size} ranks and cannot be "
                f"loaded by {request.world_size}: start as many ranks as saved it"
            )
        if len(record.ranks) != 1 or record.ranks[0].rank != request.rank:
            raise InvalidRequestError(f"step {record.step} of job {request.job!r} has no rank {request.rank}")
        return record, kept

    # --- bringing the bytes here -----------------------------------------------------------------

    async def _bring(
        self, job: str, step: rpb.StepRecord, tally: _Tally, nodes: Mapping[str, rpb.NodeRecord] | None = None
    ) -> list[HeldShard]:
        """The rank's shards in one segment here; `nodes`: whom to ask, if not those of the registry's view."""
        record = step.ranks[0]
        own = await self._own(job, step.step, record)
        if own is not None:
            tally.local_bytes = record.state_bytes
            return own
        pool = staging_pool(job, record.rank)
        segment = await asyncio.to_thread(self._store.allocate, record.state_bytes, pool)
        try:
            if nodes is None:
                nodes = {n.node_id: n for n in (await self._nodes()).nodes}
            plans = plan_fetch(record, nodes, self._config.node_id)
            fetches = [self._fetch(job, step.step, record, plan, segment, nodes, tally) for plan in plans]
            manifests = await asyncio.gather(*fetches)
            shards = await asyncio.to_thread(self._publish, manifests, segment)
        finally:
            self._store.release(segment)
        self._on_brought(shards)
        return shards

    async def _nodes(self) -> rpb.ClusterView:
        """The membership: the leader's if it answers, else the newest seen."""
        try:
            return await self._registry.view(timeout_s=LIST_TIMEOUT_S)
        except FastCheckdError as error:
            logger.info("using the last view seen: %s", error)
            return self._view.members()

    async def _own(self, job: str, step: int, record: rpb.RankRecord) -> list[HeldShard] | None:
        """The rank's shards as this node's own bytes, checked, if they all lie in one segment here."""
        shards = []
        for wanted in record.shards:
            key = pb.ShardKey(job=job, step=step, rank=record.rank, shard=wanted.shard)
            held = self._store.find(key, pb.REPLICA_KIND_OWNER)
            if held is None or held.manifest.digest != wanted.digest or held.offset != wanted.offset:
                return None
            shards.append(held)
        if not shards or len({s.segment.name for s in shards}) != 1:
            return None
        checks = await asyncio.gather(*(self._is_intact(s) for s in shards))
        return shards if all(checks) else None

    async def _is_intact(self, held: HeldShard) -> bool:
        """Check a replica here; a bad one is dropped and counted."""
        try:
            with self._store.pinned(held):
                manifest = held.manifest
                bad = await count_bad_chunks(held.view, manifest.chunk_digests, held.chunks, self._executor)
                if bad:
                    await asyncio.to_thread(self._store.condemn, held, f"{bad} of its chunks")
                return not bad
        except NotHeldError:
            return False  # pruned a moment ago: as good as never here

    async def _fetch(
        self,
        job: str,
        step: int,
        record: rpb.RankRecord,
        plan: ShardPlan,
        segment: Bytes,
        nodes: Mapping[str, rpb.NodeRecord],
        tally: _Tally,
    ) -> pb.ShardManifest:
        """Get one shard into its place: from this node's own replicas, else from one peer after the other."""
        shard = plan.record
        key = pb.ShardKey(job=job, step=step, rank=record.rank, shard=shard.shard)
        into = segment.view[shard.offset : shard.offset + shard.bytes]
        manifest = await self._copy_local(key, shard, into)
        if manifest is not None:
            tally.local_bytes += shard.bytes
            return manifest
        hunt = _Hunt()
        for source in plan.sources:
            if (manifest := await self._pull(source, key, shard, into, tally, hunt)) is not None:
                return manifest
        for source in await self._who_else_has(
            key, shard.digest, other_sources(plan, nodes, self._config.node_id)
        ):
            if (manifest := await self._pull(source, key, shard, into, tally, hunt)) is not None:
                return manifest
        if once_more := list(hunt.unreached):
            await asyncio.sleep(ASK_AGAIN_AFTER_S)
        for source in once_more:
            if (manifest := await self._pull(source, key, shard, into, tally, hunt)) is not None:
                return manifest
        raise LostError(
            f"shard {shard.shard} of rank {record.rank}, step {step} of job {job!r}: no good copy left "
            f"({'; '.join(dict.fromkeys(hunt.told)) or 'none of its holders is known'})"
        )

    async def _copy_local(
        self, key: pb.ShardKey, shard: rpb.ShardRecord, into: memoryview
    ) -> pb.ShardManifest | None:
        for kind in (pb.REPLICA_KIND_OWNER, pb.REPLICA_KIND_COPY):
            held = self._store.find(key, kind)
            if held is None or held.manifest.digest != shard.digest:
                continue
            try:
                await asyncio.to_thread(self._store.copy_to, held, into)
            except (NotHeldError, CorruptError) as error:
                logger.info("not from this node's own memory: %s", error)
                continue
            return held.manifest
        return None

    async def _pull(
        self,
        source: pb.Holder,
        key: pb.ShardKey,
        shard: rpb.ShardRecord,
        into: memoryview,
        tally: _Tally,
        hunt: _Hunt,
    ) -> pb.ShardManifest | None:
        """Pull a shard from one peer; None, counted and noted in `hunt`, when its copy is bad or gone."""
        try:
            manifest = await self._peers.get_shard(source, key, shard.digest, into, _unwatched)
        except CorruptError as error:
            tally.bad_copies += 1
            hunt.told.append(str(error))
        except (NotHeldError, PeerError) as error:
            tally.bad_copies += 1
            self._counters.add("copies_missing")
            hunt.told.append(str(error))
            if isinstance(error, PeerError):
                hunt.unreached.append(source)
        else:
            self._counters.add("shards_fetched")
            tally.fetched_bytes += shard.bytes
            tally.holders.add(source.node.node_id)
            return manifest
        logger.warning(
            "%s/%d/%d/%d: %s; trying the next copy", key.job, key.step, key.rank, key.shard, hunt.told[-1]
        )
        return None

    async def _who_else_has(self, key: pb.ShardKey, digest: bytes, nodes: list[pb.Holder]) -> list[pb.Holder]:
        async def has(node: pb.Holder) -> bool:
            try:
                replicas = await self._peers.list_replicas(
                    node.data_address, key.job, key.step, LIST_TIMEOUT_S
                )
            except FastCheckdError:
                return False  # it was only a chance; the named holders have been reported already
            return any(
                r.key.rank == key.rank and r.key.shard == key.shard and r.digest == digest for r in replicas
            )

        answers = await asyncio.gather(*(has(n) for n in nodes))
        return [n for n, yes in zip(nodes, answers, strict=True) if yes]

    def _publish(self, manifests: list[pb.ShardManifest], segment: Segment) -> list[HeldShard]:
        """Keep what was brought here as this node's own copy: it serves others and the next load."""
        held = []
        for source in manifests:
            manifest = pb.ShardManifest()
            manifest.CopyFrom(source)
            manifest.kind = pb.REPLICA_KIND_OWNER
            manifest.part = 0
            held.append(self._store.publish(manifest, segment, manifest.offset, verified=True))
        return held


def _unwatched(_received_bytes: int) -> None:
    """Nobody follows a load byte by byte."""


def _offer(step: int, kept: list[int]) -> str:
    older = [s for s in kept if s < step]
    if not older:
        return "No older step is kept in memory: fall back to durable storage"
    return f"Older steps: {', '.join(map(str, older))}; load one with load(state, step={older[-1]})"
