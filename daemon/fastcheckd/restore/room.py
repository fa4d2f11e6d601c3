"""Brings a committed step of a rank into one local segment, checked, and keeps it there while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

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
    StepGoneError,
    WorldSizeError,
)
from ..registry.client import RegistryClient
from ..store.ram_store import HeldShard, RamStore
from ..store.segments import Segment, staging_pool
from ..transfer.peer_client import PeerClient
from ..view import ViewFollower
from .gathering import FairTurns, Gathering
from .parts import Bytes, Gatherings, is_gathered
from .plan import ShardPlan, plan_fetch
from .pulling import Puller, Shard, settled, to_its_end
from .tally import Tally
from .verify import count_bad_chunks
from .without_quorum import LOOKUP_TIMEOUT_S as PROVISIONAL_LOOKUP_TIMEOUT_S
from .without_quorum import Survey

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 20.0
LIST_TIMEOUT_S = 2.0


#: Of replicas here, begun during this load and perhaps over.
_Checks = Mapping[HeldShard, asyncio.Task[bool]]


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


@dataclass(frozen=True)
class Loaded:
    """A rank's state in local memory, which stays put until it is closed."""

    ready: tpb.LoadReady
    segment: Segment
    _pins: contextlib.ExitStack

    def close(self) -> None:
        """Let go of the memory."""
        self._pins.close()


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
        self._puller = Puller(config, store, peers, counters)
        self._turns = FairTurns()
        self._gatherings = Gatherings(store)
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        #: Checks that were begun on a guess.
        self._checking: set[asyncio.Task[bool]] = set()
        #: Loads whose bytes are being brought here.
        self._bringing = 0

    @property
    def bringing(self) -> bool:
        """Whether a load is under way whose bytes are not all here. May be asked from any thread."""
        return self._bringing > 0

    async def bring(self, request: tpb.LoadRequest, tally: Tally) -> Loaded | None:
        """Bring the asked-for step into a local segment, which stays put until `Loaded.close`; `tally` follows it.

        None when no step was asked for by number and none is committed.

        Raises:
            StepGoneError: the asked-for step is not kept; the message lists what is.
            WorldSizeError: the step was saved by another number of ranks.
            LostError: every copy of some shard is bad or gone; the message names older steps.
            NoQuorumError: no registry answers, and the request does not allow to do without.
        """
        started = time.monotonic()
        checks = self._begin_checks(request, tally)
        candidates = await self._find(request)
        if not candidates:
            return None
        if is_gathered(candidates[0].record):
            return await self._bring_all_parts(request, candidates[0], tally, started)
        candidates = [candidate for candidate in candidates if not is_gathered(candidate.record)]
        lock = self._locks.setdefault((request.job, request.rank), asyncio.Lock())
        async with lock:  # two loads of one rank must not both fetch
            self._bringing += 1
            try:
                found, shards = await self._bring_first(request.job, candidates, tally, checks)
            finally:
                self._bringing -= 1
            pins = contextlib.ExitStack()
            pins.enter_context(self._store.pinned(shards[0]))  # all lie in one segment
        record = found.record
        first, segment = shards[0].manifest, shards[0].segment
        self._counters.add("restores")
        ready = tpb.LoadReady(
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
        )
        return Loaded(ready, segment, pins)

    async def _bring_all_parts(
        self, request: tpb.LoadRequest, candidate: _Candidate, tally: Tally, started: float
    ) -> Loaded:
        """Bring a state here whose ranks saved a part each. Any rank of any world size may have it."""
        step, nodes = candidate.record, candidate.nodes
        if nodes is None:
            nodes = {n.node_id: n for n in (await self._nodes()).nodes}

        async def bring(record: rpb.RankRecord, into: Bytes) -> pb.ShardManifest:
            plans = plan_fetch(record, nodes, self._config.node_id)
            return (await self._gather(request.job, step.step, record.rank, plans, into, nodes, tally))[0]

        fetched_bytes = 0
        self._bringing += 1
        try:
            # The rank's own part first: it stays here as its owner's copy, and the next save's base.
            for own in [rank for rank in step.ranks if rank.rank == request.rank]:
                async with self._locks.setdefault((request.job, request.rank), asyncio.Lock()):
                    alone = rpb.StepRecord(job=request.job, step=step.step, ranks=[own])
                    await self._bring(request.job, alone, tally, {}, nodes)
                fetched_bytes += tally.fetched_bytes
            whole_bytes = sum(rank.state_bytes for rank in step.ranks)
            tally.begin(whole_bytes)
            tally.segment = None
            found = await self._gatherings.take(step, bring)
        except LostError as error:
            raise LostError(f"{error}. {_offer(step.step, candidate.kept)}") from None
        finally:
            self._bringing -= 1
        pins = contextlib.ExitStack()
        pins.callback(self._gatherings.let_go, found)
        self._counters.add("restores")
        fetched_bytes += tally.fetched_bytes
        ready = found.ready(request.rank)
        ready.step = step.step
        ready.local_bytes = max(0, whole_bytes - fetched_bytes)
        ready.fetched_bytes = fetched_bytes
        ready.holders = len(tally.holders)
        ready.bad_copies = tally.bad_copies
        ready.restore_s = time.monotonic() - started
        ready.lossy = any(rank.lossy for rank in step.ranks)
        ready.provisional = candidate.provisional
        return Loaded(ready, found.segment, pins)

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
        self, job: str, candidates: list[_Candidate], tally: Tally, checks: _Checks
    ) -> tuple[_Candidate, list[HeldShard]]:
        """The first step that proves good. A single rank may go on to an older one; several have agreed on one."""
        for candidate in candidates:
            try:
                return candidate, await self._bring(job, candidate.record, tally, checks, candidate.nodes)
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
        self,
        job: str,
        step: rpb.StepRecord,
        tally: Tally,
        checks: _Checks,
        nodes: Mapping[str, rpb.NodeRecord] | None = None,
    ) -> list[HeldShard]:
        """The rank's shards in one segment here; `nodes`: whom to ask, if not those of the registry's view."""
        record = step.ranks[0]
        tally.begin(record.state_bytes)
        own = await self._own(job, step.step, record, tally, checks)
        if own is not None:
            return own
        pool = staging_pool(job, record.rank)
        segment = await to_its_end(
            partial(self._store.allocate, record.state_bytes, pool), undo=self._store.release
        )
        tally.segment = segment
        try:
            if nodes is None:
                nodes = {n.node_id: n for n in (await self._nodes()).nodes}
            plans = plan_fetch(record, nodes, self._config.node_id)
            manifests = await self._gather(job, step.step, record.rank, plans, segment, nodes, tally)
            shards = await to_its_end(partial(self._publish, manifests, segment))
        finally:
            self._store.release(segment)
        self._on_brought(shards)
        return shards

    async def _gather(
        self,
        job: str,
        step: int,
        rank: int,
        plans: list[ShardPlan],
        segment: Bytes,
        nodes: Mapping[str, rpb.NodeRecord],
        tally: Tally,
    ) -> list[pb.ShardManifest]:
        """Get all shards into their places, from wherever they are."""
        sizes = {plan.record.shard: plan.record.bytes for plan in plans}
        gathering = Gathering(sizes, self._turns, tally.came)

        def shard(record: rpb.ShardRecord, plan: ShardPlan) -> Shard:
            key = pb.ShardKey(job=job, step=step, rank=rank, shard=record.shard)
            return Shard(key, plan, segment.view[record.offset : record.offset + record.bytes])

        with self._turns.taking_part():
            pulls = [
                asyncio.create_task(self._puller.pull(shard(p.record, p), nodes, gathering, tally))
                for p in plans
            ]
            try:
                return await asyncio.gather(*pulls)
            finally:
                # One that failed, or a caller that is gone, ends all: the segment is given back after this.
                for task in pulls:
                    task.cancel()
                await settled(pulls)

    async def _nodes(self) -> rpb.ClusterView:
        """The membership: the leader's if it answers, else the newest seen."""
        try:
            return await self._registry.view(timeout_s=LIST_TIMEOUT_S)
        except FastCheckdError as error:
            logger.info("using the last view seen: %s", error)
            return self._view.members()

    def _begin_checks(self, request: tpb.LoadRequest, tally: Tally) -> _Checks:
        """Begin to check what probably will be loaded, if it is here: the registry's answer takes as long as that.

        A guess: the newest step that this node has whole of the rank, or the asked-for one.
        """
        step = request.step if request.HasField("step") else None
        owned = [
            held
            for held in self._store.held(request.job, step)
            if held.kind == pb.REPLICA_KIND_OWNER and held.key.rank == request.rank
        ]
        newest = max((held.key.step for held in owned), default=0)
        shards = [held for held in owned if held.key.step == newest]
        if not shards or len(shards) != shards[0].manifest.shard_count:
            return {}
        if len({held.segment.name for held in shards}) == 1:
            tally.segment = shards[0].segment
        checks = {held: asyncio.create_task(self._is_intact(held), name="check") for held in shards}
        # They pin what they read and end by themselves, whatever becomes of the load.
        self._checking.update(checks.values())
        for check in checks.values():
            check.add_done_callback(self._checking.discard)
        return checks

    async def _own(
        self, job: str, step: int, record: rpb.RankRecord, tally: Tally, checks: _Checks
    ) -> list[HeldShard] | None:
        """The rank's shards as this node's own bytes, checked, if they all lie in one segment here."""
        shards = []
        for wanted in record.shards:
            key = pb.ShardKey(job=job, step=step, rank=record.rank, shard=wanted.shard)
            held = self._store.find(key, pb.REPLICA_KIND_OWNER)
            if held is None or held.manifest.digest != wanted.digest or held.offset != wanted.offset:
                return None
            shards.append(held)
        if any(not held.is_full for held in shards):
            return await self._own_decoded(record, shards, tally)
        if not shards or len({s.segment.name for s in shards}) != 1:
            return None
        tally.segment = shards[0].segment
        begun = (asyncio.shield(check) if (check := checks.get(s)) else self._is_intact(s) for s in shards)
        if not all(await asyncio.gather(*begun)):
            return None
        tally.local_bytes = record.state_bytes
        return shards

    async def _own_decoded(
        self, record: rpb.RankRecord, shards: list[HeldShard], tally: Tally
    ) -> list[HeldShard] | None:
        """An older step of this node's own that is kept as a way back, decoded into one segment; None: not here."""

        def decode(segment: Segment) -> list[HeldShard]:
            for held in shards:
                at = held.manifest.offset
                self._store.copy_to(held, segment.view[at : at + held.manifest.bytes])
            return self._publish([held.manifest for held in shards], segment)

        pool = staging_pool(shards[0].key.job, record.rank)
        segment = await to_its_end(
            partial(self._store.allocate, record.state_bytes, pool), undo=self._store.release
        )
        try:
            made = await to_its_end(partial(decode, segment))
        except (CorruptError, NotHeldError):
            return None  # it was dropped, and counted
        finally:
            self._store.release(segment)
        tally.segment, tally.local_bytes = segment, record.state_bytes
        return made

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


def _offer(step: int, kept: list[int]) -> str:
    older = [s for s in kept if s < step]
    if not older:
        return "No older step is kept in memory: fall back to durable storage"
    return f"Older steps: {', '.join(map(str, older))}; load one with load(state, step={older[-1]})"
