"""What lies here of a rank's own: checked by each load, where it is or in a segment that it is decoded into."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.fastcheckd.store.store_helpers import (
    CHUNK,
    OWNER,
    in_use,
    manifest_of,
    open_store,
    read,
    thin,
    trained,
    weights,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.restore import own_copies
from fastcheckd.restore.own_copies import OwnCopies
from fastcheckd.restore.tally import Tally
from fastcheckd.store.replica import Replica
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import Segment, staging_pool

REQUEST = tpb.LoadRequest(job="gpt", rank=0, world_size=1)
#: A state of two shards.
SHARD = 4 * CHUNK
STATE = 2 * SHARD


@pytest.fixture
def store(tmp_path) -> Iterator[ReplicaStore]:
    store = open_store(tmp_path / "ram")
    yield store
    store.close()


@pytest.fixture
def copies(store) -> Iterator[OwnCopies]:
    def publish(manifests: list[pb.ShardManifest], segment: Segment) -> list[Replica]:
        return [store.publish(each, segment, each.offset, verified=True) for each in manifests]

    with ThreadPoolExecutor(2) as executor:
        yield OwnCopies(store, executor, publish)


def manifests(state: bytes, step: int) -> list[pb.ShardManifest]:
    found = []
    for shard in range(2):
        part = state[shard * SHARD : (shard + 1) * SHARD]
        manifest = manifest_of(part, step, shard=shard, kind=OWNER)
        manifest.shard_count, manifest.offset, manifest.state_bytes = 2, shard * SHARD, STATE
        manifest.header_offset, manifest.header_bytes = 4096, 7
        found.append(manifest)
    return found


def staged(store: ReplicaStore, state: bytes, step: int) -> list[Replica]:
    segment = store.allocate(STATE, staging_pool("gpt", 0, 1))
    segment.view[:STATE] = state
    held = [store.publish(each, segment, each.offset, verified=True) for each in manifests(state, step)]
    store.release(segment)
    return held


def record(state: bytes, step: int) -> rpb.RankRecord:
    shards = [
        rpb.ShardRecord(shard=m.key.shard, offset=m.offset, bytes=m.bytes, digest=m.digest)
        for m in manifests(state, step)
    ]
    return rpb.RankRecord(rank=0, state_bytes=STATE, shards=shards)


def find(copies: OwnCopies, state: bytes, step: int, pins: contextlib.ExitStack):
    tally = Tally()
    found = asyncio.run(copies.find("gpt", step, record(state, step), tally, {}, pins))
    assert tally.local_bytes == (STATE if found else 0)
    return found


def test_a_state_that_lies_in_its_segment_is_read_where_it_is(store, copies):
    state = weights(1, STATE)
    held = staged(store, state, 1)
    before = in_use(store)
    with contextlib.ExitStack() as pins:
        manifest, segment = find(copies, state, 1, pins)
        assert manifest == held[0].manifest and segment is held[0].segment
        assert in_use(store) == before
        for each in held:
            store.drop(each)
        assert segment.view[:STATE] == state and in_use(store) == before
    assert in_use(store) == 0


def test_a_step_that_is_kept_in_slots_is_decoded_into_a_segment_and_stays_there(store, copies):
    state = weights(1, STATE)
    newer = trained(state, 2, {0, 1, 5})
    old, new = staged(store, state, 1), staged(store, newer, 2)
    thin(store, old[0], new[0])
    thin(store, old[1], new[1], chunks=())
    with contextlib.ExitStack() as pins:
        manifest, segment = find(copies, state, 1, pins)
        assert segment.view[:STATE] == state and manifest.state_bytes == STATE
        assert segment not in {each.segment for each in new}
        assert [held.segment for held in store.held("gpt", 1)] == [segment] * 2
        for each in store.held():
            store.drop(each)
        assert segment.view[:STATE] == state
    assert in_use(store) == 0 and not segment.path.exists(), "what a trainer has mapped is not used again"


def test_shards_that_do_not_lie_together_are_brought_together(store, copies):
    state = weights(1, STATE)
    held = staged(store, state, 1)
    thin(store, held[0], staged(store, trained(state, 2), 2)[0])
    with contextlib.ExitStack() as pins:
        assert find(copies, state, 1, pins)[1].view[:STATE] == state
    assert b"".join(read(store, each) for each in store.held("gpt", 1)) == state


@pytest.mark.parametrize("in_slots", [False, True])
def test_bad_bytes_are_not_served_and_what_was_taken_comes_back(store, copies, in_slots):
    state = weights(1, STATE)
    held = staged(store, state, 1)
    if in_slots:
        for older, newer in zip(held, staged(store, trained(state, 2), 2), strict=True):
            thin(store, older, newer)
    held[1].content[2].form.place.view[50] ^= 1
    before = in_use(store)
    with contextlib.ExitStack() as pins:
        assert find(copies, state, 1, pins) is None
    assert store.find(held[1].key, OWNER) is None and store.find(held[0].key, OWNER) is held[0]
    assert in_use(store) <= before


def test_another_state_than_the_committed_one_is_not_served(store, copies):
    held = staged(store, weights(1, STATE), 1)
    with contextlib.ExitStack() as pins:
        assert find(copies, weights(2, STATE), 1, pins) is None
        store.drop(held[0])
        assert find(copies, weights(1, STATE), 1, pins) is None, "a shard is missing"


def counted(monkeypatch, going_on: asyncio.Event) -> list[int]:
    """Checks go on until the event is set; one entry for each that was begun."""
    begun: list[int] = []

    async def count_bad_chunks(view, digests, chunks, executor):
        begun.append(1)
        await going_on.wait()
        return 0

    monkeypatch.setattr(own_copies, "count_bad_chunks", count_bad_chunks)
    return begun


def test_a_load_takes_over_the_checks_that_the_session_began_and_a_later_one_checks_again(
    store, copies, monkeypatch
):
    async def story() -> None:
        going_on = asyncio.Event()
        begun = counted(monkeypatch, going_on)
        staged(store, weights(1, STATE), 1)
        newest = staged(store, weights(2, STATE), 2)
        copies.expect("gpt", 0)
        await asyncio.sleep(0)
        assert len(begun) == 2
        tally = Tally()
        checks = copies.begin_checks(REQUEST, tally)
        assert list(checks) == newest
        going_on.set()
        assert all(await asyncio.gather(*checks.values()))
        await asyncio.sleep(0)
        assert len(begun) == 2, "checked twice at once"
        again = copies.begin_checks(REQUEST, Tally())
        assert all(await asyncio.gather(*again.values()))
        assert len(begun) == 4, "what was good a while ago is no proof (G8)"
        where = tally.where()
        assert (where.segment.path, where.state_bytes, where.header_offset, where.header_bytes) == (
            str(newest[0].segment.path), STATE, 4096, 7
        )  # fmt: skip

    asyncio.run(story())


@pytest.mark.parametrize("left", [0, 1, 2])
def test_nothing_is_begun_where_no_step_is_whole_and_in_place(store, copies, monkeypatch, left):
    held = staged(store, weights(1, STATE), 1)
    for each in held[left:]:
        store.drop(each)
    if left == 2:
        newer = staged(store, trained(weights(1, STATE), 2), 2)
        thin(store, held[0], newer[0])
        for each in newer:
            store.drop(each)

    async def story() -> None:
        begun = counted(monkeypatch, asyncio.Event())
        copies.expect("gpt", 0)
        tally = Tally()
        assert not copies.begin_checks(REQUEST, tally)
        await asyncio.sleep(0)
        assert not begun
        assert tally.where() is None

    asyncio.run(story())
