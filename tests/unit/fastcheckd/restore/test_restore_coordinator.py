"""Loads that are called off or meet a step that cannot be had: memory is given back, what is kept is told of."""

from __future__ import annotations

import asyncio
import functools
import threading
from types import SimpleNamespace

import pytest

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.counters import Counters
from fastcheckd.durations import DATA, Durations
from fastcheckd.errors import LostError, StepGoneError
from fastcheckd.restore.coordinator import RestoreCoordinator
from fastcheckd.restore.shared_states import SharedStates
from fastcheckd.restore.step_lookup import Candidate
from fastcheckd.restore.tally import Tally

PART_BYTES = 4096


def in_a_loop(story):
    """A test that is a coroutine."""

    @functools.wraps(story)
    def test(*args, **kwargs):
        asyncio.run(story(*args, **kwargs))

    return test


class FakeStore:
    """Counts who has which memory; publishing waits for `may_publish`."""

    def __init__(self) -> None:
        self.lent: list[object] = []
        self.publishing = threading.Event()
        self.may_publish = threading.Event()
        self.may_publish.set()

    def held(self, job, step):
        return []

    def find(self, key, kind):
        return None

    def allocate_new(self, size, pool):
        segment = SimpleNamespace(view=memoryview(bytearray(size)), path="whole", size_bytes=size)
        self.lent.append(segment)
        return segment

    allocate_to_restore = allocate_new

    def discard(self, segment):
        self.lent.remove(segment)

    release = discard

    def publish(self, manifest, segment, offset, *, verified):
        self.publishing.set()
        assert self.may_publish.wait(10)
        return SimpleNamespace(manifest=manifest, segment=segment)


def step_in_parts(number: int) -> rpb.StepRecord:
    shard = rpb.ShardRecord(bytes=PART_BYTES, digest=bytes([number]) * 16)
    shared = pb.SharedPart(shared_bytes=2 * PART_BYTES)
    ranks = [rpb.RankRecord(rank=r, state_bytes=PART_BYTES, shards=[shard], shared=shared) for r in (5, 6)]
    return rpb.StepRecord(job="j", step=number, world_size=7, ranks=ranks)


def make_room(store: FakeStore, monkeypatch, candidates, gather, told=None) -> RestoreCoordinator:
    room = RestoreCoordinator(
        config=SimpleNamespace(node_id="me"),
        store=store,
        registry=None,
        client=None,
        fetcher=None,
        view=None,
        counters=Counters(),
        durations=Durations(DATA),
        executor=None,
        on_brought=(told if told is not None else []).extend,
    )

    async def find(request):
        return candidates

    monkeypatch.setattr(room._finder, "find", find)
    monkeypatch.setattr(room._bringer, "gather", gather)
    return room


@pytest.mark.parametrize("world_size", [1, 2])
@in_a_loop
async def test_a_single_rank_goes_on_to_an_older_step_in_parts(monkeypatch, world_size):
    async def gather(job, step, *rest):
        if step == 2:
            raise LostError("no copy of shard 0 is left")
        return [pb.ShardManifest(header_bytes=1)]

    store = FakeStore()
    candidates = [Candidate(step_in_parts(n), [1, 2], {}) for n in (2, 1)]
    room = make_room(store, monkeypatch, candidates, gather)
    request = tpb.LoadRequest(job="j", rank=0, world_size=world_size)
    if world_size > 1:
        with pytest.raises(LostError, match="Older steps: 1"):
            await room.bring(request, Tally())
        assert room._counters.get("restores_failed") == 1
        assert measured(room) == 0
    else:
        loaded = await room.bring(request, Tally())
        assert loaded.ready.step == 1
        assert loaded.ready.provisional
        assert room._counters.get("restores_failed") == 0  # the trainer got a step
        assert measured(room) == 1
        loaded.close()
    assert not store.lent
    assert not room.bringing
    assert not room._locks
    assert not room._wholes._locks


@in_a_loop
async def test_a_step_that_is_not_kept_is_the_askers_failure(monkeypatch):
    room = make_room(FakeStore(), monkeypatch, [], None)

    async def find(request):
        raise StepGoneError("step 9 is not kept")

    monkeypatch.setattr(room._finder, "find", find)
    with pytest.raises(StepGoneError):
        await room.bring(tpb.LoadRequest(job="j", step=9, world_size=1), Tally())
    assert room._counters.get("restores_failed") == 0


@in_a_loop
async def test_a_load_called_off_while_it_publishes_still_tells_what_it_brought(monkeypatch):
    async def gather(*rest):
        return [pb.ShardManifest()]

    store, told = FakeStore(), []
    store.may_publish.clear()
    ranks = [rpb.RankRecord(rank=0, state_bytes=PART_BYTES)]
    candidate = Candidate(rpb.StepRecord(job="j", step=1, world_size=1, ranks=ranks), [1], {})
    room = make_room(store, monkeypatch, [candidate], gather, told)
    load = asyncio.create_task(room.bring(tpb.LoadRequest(job="j", world_size=1), Tally()))
    assert await asyncio.to_thread(store.publishing.wait, 10)
    load.cancel()
    store.may_publish.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert len(told) == 1
    assert not store.lent


@in_a_loop
async def test_a_whole_that_cannot_be_described_is_let_go(monkeypatch):
    async def gather(*rest):
        return [None]

    store = FakeStore()
    room = make_room(store, monkeypatch, [Candidate(step_in_parts(1), [1], {})], gather)
    with pytest.raises(AttributeError):
        await room.bring(tpb.LoadRequest(job="j", world_size=1), Tally())
    assert not store.lent


@in_a_loop
async def test_whoever_is_called_off_in_the_moment_the_last_part_is_here_leaves_no_memory_taken():
    store = FakeStore()
    wholes = SharedStates(store)

    async def bring(record, into):
        if record.rank == 6:
            asyncio.get_running_loop().call_soon(first.cancel)
        return pb.ShardManifest()

    first = asyncio.create_task(wholes.take(step_in_parts(1), bring))
    second = asyncio.create_task(wholes.take(step_in_parts(1), quiet_bring))
    with pytest.raises(asyncio.CancelledError):
        await first
    found = await second
    assert len(store.lent) == 1
    assert len(wholes._locks) == 0
    wholes.let_go(found)
    assert not store.lent


async def quiet_bring(record, into):
    return pb.ShardManifest()


@in_a_loop
async def test_readers_of_one_step_share_it_and_the_last_one_ends_it():
    store = FakeStore()
    wholes = SharedStates(store)
    one, other = await asyncio.gather(*(wholes.take(step_in_parts(1), quiet_bring) for _ in range(2)))
    assert one is other
    wholes.let_go(one)
    assert store.lent
    wholes.let_go(other)
    assert not store.lent


def measured(room):
    """Loads whose duration is known."""
    samples = [sample for family in room._durations.families() for sample in family.samples]
    return next(sample.value for sample in samples if sample.name == "fastcheck_restore_seconds_count")
