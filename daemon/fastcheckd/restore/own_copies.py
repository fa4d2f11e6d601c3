"""A rank's own bytes that lie here already. Each load checks them again: they were good some time ago only (G8)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, wait
from functools import partial

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..chunks import ChunkTable
from ..digests import DIGEST_BYTES, chunk_digest
from ..errors import CorruptError, NotHeldError
from ..store.replica import Replica
from ..store.replica_store import ReplicaStore
from ..store.segments import Segment
from ..tasks import to_its_end
from .tally import Tally

#: Of replicas here, begun during this load and perhaps over.
Checks = Mapping[Replica, asyncio.Task[bool]]

#: Chunks that one task hashes or decodes: few enough to spread over threads, many enough to cost nothing.
CHUNKS_PER_TASK = 8


class OwnCopies:
    """What a data process has of its own ranks' states. Owned by the event loop's thread.

    Args:
        executor: threads that hash and decode: one alone would take longer than the load's copy.
        publish: makes a filled segment this node's own copy.
    """

    def __init__(
        self,
        store: ReplicaStore,
        executor: Executor,
        publish: Callable[[list[pb.ShardManifest], Segment], list[Replica]],
    ) -> None:
        self._store = store
        self._executor = executor
        self._publish = publish
        #: Checks that were begun on a guess and go on. They pin what they read, and end by themselves.
        self._checking: dict[Replica, asyncio.Task[bool]] = {}

    def begin_checks(self, request: tpb.LoadRequest, tally: Tally) -> Checks:
        """Begin to check what probably will be loaded, if it is here: the registry's answer takes as long as that.

        A guess: the newest step that this node has whole of the rank, or the asked-for one. A check that was begun
        before and still goes on will do.
        """
        shards = self._in_place(request.job, request.rank, request.step if request.HasField("step") else None)
        if shards:
            tally.expect(shards[0].segment, shards[0].manifest)
        return {held: self._check(held) for held in shards}

    def expect(self, job: str, rank: int) -> None:
        """A new process takes the rank's place, and will probably load: begin to check what that would be."""
        for held in self._in_place(job, rank, None):
            self._check(held)

    def _in_place(self, job: str, rank: int, step: int | None) -> list[Replica]:
        """The shards of the newest step that this node has of the rank, or of the given one, if all are here in one
        segment; else none."""
        owned = [
            held
            for held in self._store.held(job, step)
            if held.kind == pb.REPLICA_KIND_OWNER and held.key.rank == rank
        ]
        newest = max((held.key.step for held in owned), default=0)
        shards = [held for held in owned if held.key.step == newest]
        whole = shards and len(shards) == shards[0].manifest.shard_count
        return shards if whole and _segment_of(shards) is not None else []

    def _check(self, held: Replica) -> asyncio.Task[bool]:
        check = self._checking.get(held)
        if check is None:
            check = self._checking[held] = asyncio.create_task(self._is_intact(held), name="check")
            check.add_done_callback(lambda _: self._checking.pop(held))
        return check

    async def find(
        self,
        job: str,
        step: int,
        record: rpb.RankRecord,
        tally: Tally,
        checks: Checks,
        pins: contextlib.ExitStack,
    ) -> tuple[pb.ShardManifest, Segment] | None:
        """The rank's state as this node's own bytes, checked, in one segment, which stays as it is until `pins` is
        closed, and a manifest of it; None: it is not all here, or not good."""
        shards = []
        for wanted in record.shards:
            key = pb.ShardKey(job=job, step=step, rank=record.rank, shard=wanted.shard)
            held = self._store.find(key, pb.REPLICA_KIND_OWNER)
            if (
                held is None
                or held.manifest.digest != wanted.digest
                or held.manifest.offset != wanted.offset
                or held.manifest.bytes != wanted.bytes
            ):
                return None
            shards.append(held)
        if not shards:
            return None
        with contextlib.ExitStack() as own:
            try:
                segment = own.enter_context(self._store.mapped(shards[0]))
            except NotHeldError:  # it is kept in slots, or was dropped a moment ago
                return await self._decoded(record, shards, tally, pins)
            if _segment_of(shards) is not segment:
                return await self._decoded(record, shards, tally, pins)
            tally.expect(segment, shards[0].manifest)
            begun = (
                asyncio.shield(check) if (check := checks.get(s)) else self._is_intact(s) for s in shards
            )
            if not all(await asyncio.gather(*begun)):
                return None
            pins.enter_context(own.pop_all())
        tally.local_bytes = record.state_bytes
        return shards[0].manifest, segment

    async def _decoded(
        self, record: rpb.RankRecord, shards: list[Replica], tally: Tally, pins: contextlib.ExitStack
    ) -> tuple[pb.ShardManifest, Segment] | None:
        """A step that does not lie in a segment, or not in one alone, copied and decoded into one; None: it is bad."""

        def decode(segment: Segment) -> list[Replica]:
            parts = [
                self._executor.submit(self._copy, held, first, segment)
                for held in shards
                for first in range(0, len(held.chunks), CHUNKS_PER_TASK)
            ]
            wait(parts)  # nobody may write to the segment when it is given back
            for part in parts:
                part.result()
            return self._publish([held.manifest for held in shards], segment)

        allocate = partial(self._store.allocate_to_restore, record.state_bytes, shards[0].key.job)
        segment = await to_its_end(allocate, undo=self._store.release)
        with contextlib.ExitStack() as own:
            own.callback(self._store.release, segment)
            try:
                await to_its_end(partial(decode, segment))
            except (CorruptError, NotHeldError):
                return None  # it was dropped, and counted
            pins.enter_context(own.pop_all())
        tally.expect(segment)
        tally.local_bytes = record.state_bytes
        return shards[0].manifest, segment

    def _copy(self, held: Replica, first: int, segment: Segment) -> None:
        at = held.manifest.offset
        with segment.view[at : at + held.manifest.bytes] as into:
            self._store.copy_to(held, into, range(first, min(first + CHUNKS_PER_TASK, len(held.chunks))))

    async def _is_intact(self, held: Replica) -> bool:
        """Check a replica where it lies; a bad one is dropped and counted."""
        try:
            with self._store.mapped(held) as segment:
                manifest = held.manifest
                view = segment.view[manifest.offset : manifest.offset + manifest.bytes]
                bad = await count_bad_chunks(view, manifest.chunk_digests, held.chunks, self._executor)
                if bad:
                    await asyncio.to_thread(self._store.condemn, held, f"{bad} of its chunks")
                return not bad
        except NotHeldError:
            return False  # pruned a moment ago: as good as never here


def _segment_of(shards: list[Replica]) -> Segment | None:
    """The segment in which all of a state lies, each shard at its place."""
    segments = {held.segment for held in shards}
    in_place = all(held.offset == held.manifest.offset for held in shards)
    return segments.pop() if len(segments) == 1 and in_place else None


async def count_bad_chunks(view: memoryview, digests: bytes, chunks: ChunkTable, executor: Executor) -> int:
    """Number of chunks of `view` whose xxh3-128 is not the one in `digests` (16 bytes each, in order)."""
    assert len(view) == chunks.shard_bytes
    loop = asyncio.get_running_loop()
    tasks = [
        loop.run_in_executor(
            executor, _bad_chunks, view, digests, chunks, first, min(first + CHUNKS_PER_TASK, len(chunks))
        )
        for first in range(0, len(chunks), CHUNKS_PER_TASK)
    ]
    return sum(await asyncio.gather(*tasks))


def _bad_chunks(view: memoryview, digests: bytes, chunks: ChunkTable, first: int, stop: int) -> int:
    bad = 0
    for index in range(first, stop):
        low, high = chunks.range(index)
        if chunk_digest(view[low:high]) != digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            bad += 1
    return bad
