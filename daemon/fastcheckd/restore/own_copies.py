"""A rank's own bytes that lie here already. Each load checks them again: they were good some time ago only (G8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import CorruptError, NotHeldError
from ..store.ram_store import HeldShard, RamStore
from ..store.segments import Segment
from ..tasks import to_its_end
from .tally import Tally
from .verify import count_bad_chunks

#: Of replicas here, begun during this load and perhaps over.
Checks = Mapping[HeldShard, asyncio.Task[bool]]


class OwnCopies:
    """What a data process has of its own ranks' states. Owned by the event loop's thread.

    Args:
        publish: makes a filled segment this node's own copy.
    """

    def __init__(
        self,
        store: RamStore,
        executor: Executor,
        publish: Callable[[list[pb.ShardManifest], Segment], list[HeldShard]],
    ) -> None:
        self._store = store
        self._executor = executor
        self._publish = publish
        #: Checks that were begun on a guess and go on. They pin what they read, and end by themselves.
        self._checking: dict[HeldShard, asyncio.Task[bool]] = {}

    def begin_checks(self, request: tpb.LoadRequest, tally: Tally) -> Checks:
        """Begin to check what probably will be loaded, if it is here: the registry's answer takes as long as that.

        A guess: the newest step that this node has whole of the rank, or the asked-for one. A check that was begun
        before and still goes on will do.
        """
        shards = self._whole(request.job, request.rank, request.step if request.HasField("step") else None)
        if len({held.segment.name for held in shards}) == 1:
            tally.expect(shards[0].segment, shards[0].manifest)
        return {held: self._check(held) for held in shards}

    def expect(self, job: str, rank: int) -> None:
        """A new process takes the rank's place, and will probably load: begin to check what that would be."""
        for held in self._whole(job, rank, None):
            self._check(held)

    def _whole(self, job: str, rank: int, step: int | None) -> list[HeldShard]:
        """The shards of the newest step that this node has whole of the rank, or of the given one; empty if none is."""
        owned = [
            held
            for held in self._store.held(job, step)
            if held.kind == pb.REPLICA_KIND_OWNER and held.key.rank == rank
        ]
        newest = max((held.key.step for held in owned), default=0)
        shards = [held for held in owned if held.key.step == newest]
        return shards if shards and len(shards) == shards[0].manifest.shard_count else []

    def _check(self, held: HeldShard) -> asyncio.Task[bool]:
        check = self._checking.get(held)
        if check is None:
            check = self._checking[held] = asyncio.create_task(self._is_intact(held), name="check")
            check.add_done_callback(lambda _: self._checking.pop(held))
        return check

    async def find(
        self, job: str, step: int, record: rpb.RankRecord, tally: Tally, checks: Checks
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
            return await self._decoded(record, shards, tally)
        if not shards or len({s.segment.name for s in shards}) != 1:
            return None
        tally.expect(shards[0].segment, shards[0].manifest)
        begun = (asyncio.shield(check) if (check := checks.get(s)) else self._is_intact(s) for s in shards)
        if not all(await asyncio.gather(*begun)):
            return None
        tally.local_bytes = record.state_bytes
        return shards

    async def _decoded(
        self, record: rpb.RankRecord, shards: list[HeldShard], tally: Tally
    ) -> list[HeldShard] | None:
        """An older step that is kept as a way back, decoded into one segment; None: it is not here."""

        def decode(segment: Segment) -> list[HeldShard]:
            for held in shards:
                at = held.manifest.offset
                self._store.copy_to(held, segment.view[at : at + held.manifest.bytes])
            return self._publish([held.manifest for held in shards], segment)

        allocate = partial(self._store.allocate_to_restore, record.state_bytes, shards[0].key.job)
        segment = await to_its_end(allocate, undo=self._store.release)
        try:
            made = await to_its_end(partial(decode, segment))
        except (CorruptError, NotHeldError):
            return None  # it was dropped, and counted
        finally:
            self._store.release(segment)
        tally.expect(segment)
        tally.local_bytes = record.state_bytes
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
