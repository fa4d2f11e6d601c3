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
from weakref import WeakValueDictionary

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..config import Config
from ..counters import Counters
from ..durations import Durations
from ..errors import FastCheckdError, InvalidRequestError, LostError, StepGoneError, WorldSizeError
from ..registry.client import RegistryClient
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..store.segments import Segment
from ..tasks import to_its_end
from ..transfer.client import PeerClient
from ..transfer.fetch import Fetcher
from ..view import ViewFollower
from .own_copies import Checks, OwnCopies
from .plan import plan_fetch
from .range_reader import RangeReader
from .rank_loader import RankLoader
from .shared_states import Bytes, SharedStates, is_in_parts
from .step_lookup import Candidate, StepLookup
from .tally import Tally
from .without_quorum import PeerSurvey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRank:
    """A rank's state in local memory, which stays put until it is closed."""

    ready: tpb.LoadReady
    segment: Segment
    _pins: contextlib.ExitStack

    def close(self) -> None:
        """Let go of the memory."""
        self._pins.close()


class RestoreCoordinator:
    """All loads of one data process. Owned by the event loop's thread.

    Args:
        on_brought: told what a load has brought here and keeps.
    """

    def __init__(
        self,
        *,
        config: Config,
        store: ReplicaStore,
        registry: RegistryClient,
        client: PeerClient,
        fetcher: Fetcher,
        view: ViewFollower,
        counters: Counters,
        durations: Durations,
        executor: Executor,
        on_brought: Callable[[Sequence[Replica]], None],
    ) -> None:
        self._config = config
        self._store = store
        self._counters = counters
        self._durations = durations
        self._on_brought = on_brought
        self.survey = PeerSurvey(client, view)
        self._bringer = RankLoader(config, store, registry, client, fetcher, view, counters)
        self._finder = StepLookup(registry, self.survey)
        self.reading = RangeReader(config, store, self._finder, self._bringer, counters)
        self._own_copies = OwnCopies(store, executor, self._publish)
        self._wholes = SharedStates(store)
        #: By job and rank, for as long as somebody holds or awaits one.
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        #: Loads whose bytes are being brought here.
        self._bringing = 0

    @property
    def bringing(self) -> bool:
        """Whether a load or a read is under way whose bytes are not all here. May be asked from any thread."""
        return self._bringing > 0 or self.reading.bringing

    def expect(self, job: str, rank: int) -> None:
        """A new process takes the rank's place: what is here and it will probably load begins to be checked."""
        self._own_copies.expect(job, rank)

    async def bring(self, request: tpb.LoadRequest, tally: Tally) -> LoadedRank | None:
        """Bring the asked-for step into a local segment, which stays put until `Loaded.close`; `tally` follows it.

        None when no step was asked for by number and none is committed.

        Raises:
            StepGoneError: the asked-for step is not kept; the message lists what is.
            WorldSizeError: the step was saved by another number of ranks.
            LostError: every copy of some shard is bad or gone; the message names older steps.
            NoQuorumError: no registry answers, and the request does not allow to do without.
        """
        try:
            loaded = await self._bring_newest(request, tally)
        except (InvalidRequestError, StepGoneError, WorldSizeError):
            raise  # what was asked for cannot be had
        except FastCheckdError:
            self._counters.add("restores_failed")
            raise
        if loaded is not None:
            self._durations.add("restore", loaded.ready.restore_s)
        return loaded

    async def _bring_newest(self, request: tpb.LoadRequest, tally: Tally) -> LoadedRank | None:
        started = time.monotonic()
        checks = self._own_copies.begin_checks(request, tally)
        candidates = await self._finder.find(request)
        for candidate in candidates:
            bring = self._bring_all_parts if is_in_parts(candidate.record) else self._bring_one_part
            try:
                return await bring(request, candidate, tally, checks, started)
            except LostError as error:
                step = candidate.record.step
                # A single rank may go on to an older one; several have agreed on this one.
                if candidate is candidates[-1] or request.world_size > 1:
                    raise LostError(f"{error}. {candidate.offer()}") from None
                logger.warning("step %d of job %s looked complete and is not: %s", step, request.job, error)
        return None

    async def _bring_one_part(
        self, request: tpb.LoadRequest, candidate: Candidate, tally: Tally, checks: Checks, started: float
    ) -> LoadedRank:
        """Bring the rank's own state here: all that it saved."""
        record = candidate.record
        lock = self._locks.setdefault((request.job, request.rank), asyncio.Lock())
        async with lock:  # two loads of one rank must not both fetch
            with contextlib.ExitStack() as pins:
                self._bringing += 1
                try:
                    first, segment = await self._bring(
                        request.job, record, tally, checks, pins, candidate.nodes
                    )
                finally:
                    self._bringing -= 1
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
                    provisional=candidate.provisional,
                )
                self._counters.add("restores")
                return LoadedRank(ready, segment, pins.pop_all())

    async def _bring_all_parts(
        self, request: tpb.LoadRequest, candidate: Candidate, tally: Tally, checks: Checks, started: float
    ) -> LoadedRank:
        """Bring a state here whose ranks saved a part each. Any rank of any world size may have it."""
        step, nodes = candidate.record, candidate.nodes
        if nodes is None:
            nodes = await self._bringer.nodes()

        async def bring(record: rpb.RankRecord, into: Bytes) -> pb.ShardManifest:
            plans = plan_fetch(record, nodes, self._config.node_id)
            return (
                await self._bringer.gather(request.job, step.step, record.rank, plans, into, nodes, tally)
            )[0]

        fetched_bytes = 0
        self._bringing += 1
        try:
            # The rank's own part first: it stays here as its owner's copy, and the next save's base.
            for own in [rank for rank in step.ranks if rank.rank == request.rank]:
                async with self._locks.setdefault((request.job, request.rank), asyncio.Lock()):
                    alone = rpb.StepRecord(job=request.job, step=step.step, ranks=[own])
                    with contextlib.ExitStack() as pins:
                        await self._bring(request.job, alone, tally, checks, pins, nodes)
                fetched_bytes += tally.fetched_bytes
            whole_bytes = sum(rank.state_bytes for rank in step.ranks)
            tally.begin(whole_bytes)
            tally.expect(None)
            found = await self._wholes.take(step, bring)
        finally:
            self._bringing -= 1
        fetched_bytes += tally.fetched_bytes
        with contextlib.ExitStack() as pins:
            pins.callback(self._wholes.let_go, found)
            ready = found.ready(request.rank)
            ready.step = step.step
            ready.local_bytes = max(0, whole_bytes - fetched_bytes)
            ready.fetched_bytes = fetched_bytes
            ready.holders = len(tally.holders)
            ready.bad_copies = tally.bad_copies
            ready.restore_s = time.monotonic() - started
            ready.lossy = any(rank.lossy for rank in step.ranks)
            ready.provisional = candidate.provisional
            self._counters.add("restores")
            return LoadedRank(ready, found.segment, pins.pop_all())

    async def _bring(
        self,
        job: str,
        step: rpb.StepRecord,
        tally: Tally,
        checks: Checks,
        pins: contextlib.ExitStack,
        nodes: Mapping[str, rpb.NodeRecord] | None = None,
    ) -> tuple[pb.ShardManifest, Segment]:
        """The rank's state in one segment here, which stays as it is until `pins` is closed, and a manifest of it.

        `nodes`: whom to ask, if not those of the registry's view.
        """
        record = step.ranks[0]
        tally.begin(record.state_bytes)
        own = await self._own_copies.find(job, step.step, record, tally, checks, pins)
        if own is not None:
            return own
        allocate = partial(self._store.allocate_to_restore, record.state_bytes, job)
        segment = await to_its_end(allocate, undo=self._store.release)
        pins.callback(self._store.release, segment)
        tally.expect(segment)
        if nodes is None:
            nodes = await self._bringer.nodes()
        plans = plan_fetch(record, nodes, self._config.node_id)
        manifests = await self._bringer.gather(job, step.step, record.rank, plans, segment, nodes, tally)
        # Called off or not: what is published stays, and is told of.
        publish = partial(self._publish, manifests, segment)
        self._on_brought(await to_its_end(publish, undo=self._on_brought))
        return manifests[0], segment

    def _publish(self, manifests: list[pb.ShardManifest], segment: Segment) -> list[Replica]:
        """Keep what was brought here as this node's own copy: it serves others and the next load."""
        held = []
        for source in manifests:
            manifest = pb.ShardManifest()
            manifest.CopyFrom(source)
            manifest.kind = pb.REPLICA_KIND_OWNER
            manifest.part = 0
            held.append(self._store.publish(manifest, segment, manifest.offset, verified=True))
        return held
