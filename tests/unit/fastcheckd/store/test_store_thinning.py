"""An owner's older step that is had from the next one's bytes: made, refused, left half done, read, found again."""

import pytest
from store_helpers import (
    CHUNK_BYTES,
    OWNER,
    changed,
    open_store,
    payload,
    put,
    way_back,
    way_files,
)

from fastcheckd.store.segments import restored_pool, staging_pool
from fastcheckd.store.thinning import WORTH

SIZE = 20 * CHUNK_BYTES - 100
POOL = staging_pool("gpt", 0, 1)
STEPS = {1: payload(1, SIZE)}
for step in range(2, 5):
    STEPS[step] = changed(STEPS[step - 1], step)


@pytest.fixture
def store(tmp_path):
    store, _ = open_store(tmp_path / "ram")
    yield store
    store.close()


def records(older, newer: bytes, step: int):
    """The way back of every chunk that differs, by index."""
    found = {}
    for index in range(len(older.chunks)):
        start, stop = older.chunks.range(index)
        old, new = STEPS[older.key.step][start:stop], newer[start:stop]
        if old != new:
            found[index] = way_back(old, new, older.key.step, step)
    return found


def thin(store, older, step: int, *, without=()) -> bool:
    thinning = store.begin_thinning(older)
    for index, record in records(older, STEPS[step], step).items():
        if index not in without:
            thinning.add(index, record)
    return thinning.publish(step)


def put_own(store, step: int):
    return put(store, STEPS[step], step=step, kind=OWNER)


def assert_all(store, steps) -> None:
    """Exactly these are held, good, and can be had."""
    assert [s.key.step for s in store.held()] == list(steps)
    for shard in store.held():
        assert store.verify(shard)
        into = bytearray(SIZE)
        store.copy_to(shard, memoryview(into))
        assert into == STEPS[shard.key.step]


def test_the_older_ones_segment_is_free_and_its_bytes_can_be_had(store):
    older, newer = put_own(store, 1), put_own(store, 2)
    assert thin(store, older, 2)
    assert store.free_segments(POOL) == [older.segment]
    thinned = store.held()[0]
    assert (thinned.is_full, thinned.segment) == (False, newer.segment)
    assert thinned.stored_bytes < SIZE / 2
    assert_all(store, [1, 2])


def test_step_after_step_two_segments_are_enough(store):
    held = put_own(store, 1)
    for step in range(2, 5):
        newer = put_own(store, step)
        assert thin(store, held, step)
        held = newer
        assert store.count_segments(POOL) == 2
        assert {shard.segment for shard in store.held()} == {newer.segment}
    assert_all(store, [1, 2, 3, 4])
    for shard in store.held()[:-1]:
        store.drop(shard)
    assert_all(store, [4])


def test_the_next_life_finds_them(tmp_path):
    store, _ = open_store(tmp_path / "ram")
    first, second, _ = (put_own(store, step) for step in (1, 2, 3))
    assert thin(store, first, 2)
    assert thin(store, second, 3)
    store.close()
    store, counters = open_store(tmp_path / "ram")
    assert counters.get("manifests_dropped") == 0
    assert_all(store, [1, 2, 3])
    store.close()


def test_a_process_that_ends_meanwhile_leaves_the_older_step_as_it_was(tmp_path):
    store, _ = open_store(tmp_path / "ram")
    older, _ = put_own(store, 1), put_own(store, 2)
    thinning = store.begin_thinning(older)
    for index, record in records(older, STEPS[2], 2).items():
        thinning.add(index, record)
    store.close()
    store, _ = open_store(tmp_path / "ram")
    assert [s.is_full for s in store.held()] == [True, True]
    assert not way_files(store.directory)
    assert_all(store, [1, 2])
    store.close()


def test_a_chunk_without_a_record_leaves_everything_as_it_was(store):
    older, _ = put_own(store, 1), put_own(store, 2)
    used = store.usage().used_bytes
    assert not thin(store, older, 2, without={2})
    assert all(shard.is_full for shard in store.held())
    assert store.usage().used_bytes - store.usage().free_bytes == used
    assert_all(store, [1, 2])


def test_one_that_takes_as_much_as_the_step_itself_is_given_up(store):
    older = put_own(store, 1)
    other = payload(9, SIZE)
    put(store, other, step=2, kind=OWNER)
    used = store.usage().used_bytes
    thinning = store.begin_thinning(older)
    for index, record in records(older, other, 2).items():
        thinning.add(index, record)
    assert not thinning.publish(2)
    assert all(shard.is_full for shard in store.held())
    assert store.usage().used_bytes - store.usage().free_bytes == used
    assert WORTH < 1


def test_without_room_the_older_step_stays_and_nobody_is_told(tmp_path):
    store, _ = open_store(tmp_path / "ram", budget_bytes=1 << 20)
    older, _ = put_own(store, 1), put_own(store, 2)
    thinning = store.begin_thinning(older)
    usage = store.usage()
    store.allocate(usage.budget_bytes - usage.used_bytes - usage.free_bytes, "staging.b.0.1")
    long = bytes(CHUNK_BYTES)
    for index in range(len(older.chunks) - 1):  # until what was set aside is used up
        thinning.add(index, long)
    assert not thinning.publish(2)
    assert_all(store, [1, 2])
    store.close()


def test_a_newer_step_that_is_not_held_or_has_other_chunks_is_no_base(store):
    older = put_own(store, 1)
    assert not thin(store, older, 2)
    put(store, STEPS[2], step=2, kind=OWNER, lengths=[SIZE - 4096, 4096])
    assert not thin(store, older, 2)
    assert all(shard.is_full for shard in store.held())


def test_whoever_reads_the_older_step_goes_on_reading(store):
    older, _ = put_own(store, 1), put_own(store, 2)
    with store.reading(older) as full:
        assert thin(store, older, 2)
        assert store.free_segments(POOL) == []
        assert full.view == STEPS[1]
    assert store.free_segments(POOL) == [older.segment]


def test_a_thinned_step_made_full_lies_where_no_rank_copies_to(store):
    older, _ = put_own(store, 1), put_own(store, 2)
    assert thin(store, older, 2)
    full = store.full(store.held()[0])
    assert full.segment.pool == restored_pool("gpt")
    assert_all(store, [1, 2])


def test_what_was_dropped_meanwhile_is_not_brought_back(store):
    older, _ = put_own(store, 1), put_own(store, 2)
    thinning = store.begin_thinning(older)
    for index, record in records(older, STEPS[2], 2).items():
        thinning.add(index, record)
    store.drop(older)
    assert not thinning.publish(2)
    assert_all(store, [2])


def test_dropping_the_newer_one_gives_the_older_its_own_bytes(store):
    older, newer = put_own(store, 1), put_own(store, 2)
    assert thin(store, older, 2)
    store.drop(newer)
    assert_all(store, [1])
    assert store.held()[0].is_full


def test_the_newer_one_can_be_published_anew(store):
    older, _ = put_own(store, 1), put_own(store, 2)
    assert thin(store, older, 2)
    put_own(store, 2)
    assert_all(store, [1, 2])
