"""Older steps as reverse deltas: of the owner's, whose segment is needed again, and when newer steps go before them."""

from __future__ import annotations

import threading

import pytest
from store_helpers import (
    CHUNK,
    COPY,
    OWNER,
    encoded,
    files_of,
    fill,
    in_use,
    manifest_of,
    open_store,
    put,
    read,
    stage,
    thin,
    trained,
    weights,
)

from fastcheckd.counters import Counters
from fastcheckd.errors import InvalidRequestError, NotHeldError, OverBudgetError
from fastcheckd.store import draft, reverse_deltas


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "ram")
    yield store
    store.close()


def deepest(store, replica) -> int:
    """Through how many others a chunk of a replica is decoded."""
    return max(len(chunk.chain()) for chunk in replica.content) - 1


def test_an_older_step_of_the_owner_gives_its_segment_back_and_is_the_same(tmp_path):
    store = open_store(tmp_path / "ram")
    data = weights(1)
    newer = trained(data, 2, {0, 2})
    older_, newer_ = stage(store, data, 1), stage(store, newer, 2)
    thin(store, older_, newer_)
    assert len(store.free_segments("staging.gpt.0.1")) == 1
    assert older_.segment is None and read(store, older_) == data and read(store, newer_) == newer
    third = trained(newer, 3)
    third_ = stage(store, third, 3)  # in the segment of the first
    thin(store, newer_, third_)
    assert len(store.free_segments("staging.gpt.0.1")) == 1, (
        "unchanged chunks of the first step do not keep it"
    )
    store.close()
    store = open_store(tmp_path / "ram")
    assert [read(store, each) for each in store.held()] == [data, newer, third]
    assert [each.segment is None for each in store.held()] == [True, True, False]
    store.close()


def test_what_does_not_shrink_is_moved_to_slots(store):
    older, newer = stage(store, weights(1), 1), stage(store, weights(2), 2)
    thin(store, older, newer, chunks=())
    assert read(store, older) == weights(1) and older.segment is None


def test_without_room_to_thin_all_stays_as_it_was(tmp_path):
    store = open_store(tmp_path / "ram", budget_bytes=9 * CHUNK)
    older, newer = stage(store, weights(1), 1), stage(store, weights(2), 2)
    with pytest.raises(OverBudgetError):
        thin(store, older, newer, chunks=())
    assert older.segment is not None and read(store, older) == weights(1)
    assert in_use(store) == 8 * CHUNK
    store.close()


def test_deltas_are_counted(tmp_path):
    counters = Counters()
    store = open_store(tmp_path / "ram", counters=counters)
    thin(store, stage(store, weights(1), 1), stage(store, trained(weights(1), 2), 2))
    assert counters.get("deltas_made") == 4
    base = put(store, weights(1))
    put(store, trained(weights(1), 2), 2, base=base)
    assert counters.get("deltas_made") == 8
    store.close()


def test_only_deltas_that_lead_from_the_step_that_is_published_are_used(store):
    data = weights(1)
    older, newer = stage(store, data, 1), stage(store, trained(data, 2), 2)
    deltas = store.reverse_deltas(older)
    other = trained(data, 3)  # another step was sent than the one that is published
    payload = encoded(data[:CHUNK], other[:CHUNK], 1, 3)
    deltas.add(0, payload, memoryview(other)[:CHUNK])
    deltas.add(1, payload, memoryview(other)[:CHUNK])  # for another chunk
    deltas.add(2, b"not encoded at all", memoryview(other)[:CHUNK])
    deltas.publish(newer)
    assert [chunk.is_raw for chunk in older.content] == [True] * 4
    assert older.segment is None and read(store, older) == data
    assert in_use(store) == 8 * CHUNK


def test_deltas_come_from_many_threads_and_twice(store):
    data = weights(1, 16 * CHUNK)
    new = trained(data, 2)
    older, newer = stage(store, data, 1), stage(store, new, 2)
    deltas = store.reverse_deltas(older)

    def add() -> None:
        for index in range(16):
            start, stop = older.chunks.range(index)
            payload = encoded(data[start:stop], new[start:stop], 1, 2)
            deltas.add(index, payload, memoryview(new)[start:stop])

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    deltas.publish(newer)
    deltas.add(0, b"late", memoryview(new)[:CHUNK])
    assert not any(chunk.is_raw for chunk in older.content)
    assert read(store, older) == data
    for held in (older, newer):
        store.drop(held)
    assert in_use(store) == 0


def test_deltas_that_are_given_up_leave_the_older_step_alone(store):
    data = weights(1)
    older, newer = stage(store, data, 1), stage(store, trained(data, 2), 2)
    before = in_use(store)
    deltas = store.reverse_deltas(older)
    deltas.add(0, encoded(data[:CHUNK], trained(data, 2)[:CHUNK], 1, 2), memoryview(trained(data, 2))[:CHUNK])
    assert in_use(store) > before
    deltas.abandon()
    deltas.abandon()
    assert in_use(store) == before and older.segment is not None
    with pytest.raises(NotHeldError):
        store.drop(older)
        store.reverse_deltas(older)
    assert newer.segment is not None


@pytest.mark.parametrize(
    "key", [{"step": 1}, {"step": 3, "shard": 1}, {"step": 3, "lengths": [5, 4 * CHUNK - 5]}]
)
def test_only_a_newer_step_that_is_cut_alike_leads_back(store, key):
    older, other = stage(store, weights(1), 2), stage(store, weights(2), **key)
    with pytest.raises(InvalidRequestError):
        store.reverse_deltas(older).publish(other)
    assert older.segment is not None


# --- newer steps that go first -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [COPY, OWNER])
def test_a_kept_step_needs_no_memory_for_steps_that_came_and_went(store, kind):
    data = weights(1, 16 * CHUNK)
    kept = before = put(store, data) if kind == COPY else stage(store, data, 1)
    size = []
    for step in range(2, 14):
        new = trained(data, step)
        if kind == COPY:
            newer = put(store, new, step, base=before)
        else:
            newer = stage(store, new, step)
            thin(store, before, newer)
        if before is not kept:
            store.drop(before)
        before = newer
        size.append(in_use(store))
        assert read(store, kept) == data and deepest(store, kept) == 1
    assert max(size) - min(size) <= 2 * CHUNK and size[0] <= 1.5 * 16 * CHUNK


def test_a_step_that_fails_lets_go_of_its_segment_although_an_older_one_led_to_it(store):
    data = weights(1)
    older, newer = stage(store, data, 1), stage(store, trained(data, 2, {0, 1}), 2)
    thin(store, older, newer)
    segment = newer.segment
    store.drop(newer)
    assert segment in store.free_segments("staging.gpt.0.1")
    assert older.is_whole and read(store, older) == data
    third = stage(store, trained(data, 3), 3)
    thin(store, older, third)  # from slots
    assert read(store, older) == data


def test_without_room_an_older_step_keeps_what_it_needs_until_the_next_one_goes(tmp_path):
    store = open_store(tmp_path / "ram", budget_bytes=10 * CHUNK)
    data = weights(1)
    older, newer = stage(store, data, 1), stage(store, trained(data, 2, {0}), 2)
    thin(store, older, newer)
    segment = newer.segment
    filled = store.allocate(4 * CHUNK, "staging.gpt.0.1")
    store.drop(newer)
    assert read(store, older) == data and not older.is_whole
    assert store.free_segments("staging.gpt.0.1") == []
    store.release(filled)
    store.drop(stage(store, data, 3))
    assert read(store, older) == data and older.is_whole
    assert segment.name not in files_of(tmp_path / "ram") or segment in store.free_segments("staging.gpt.0.1")
    store.drop(older)
    assert in_use(store) == 0
    store.close()


def test_what_leads_to_chunks_of_a_draft_under_way_is_left_alone(tmp_path):
    size = 48 * CHUNK
    store = open_store(tmp_path / "ram", budget_bytes=90 * CHUNK)
    data = weights(1, size)
    base = put(store, data)
    newer = trained(data, 2)
    other = put(store, weights(5), 0, rank=0)
    coming = store.draft(manifest_of(newer, 2), base=base)
    fill(coming, newer, against_base=True, chunks=coming.missing[:24])
    coming._flush()
    forms = [chunk.form for chunk in base.content]
    store.drop(other)
    assert [chunk.form for chunk in base.content] == forms
    fill(coming, newer, against_base=True)
    assert read(store, coming.publish()) == newer and read(store, base) == data
    store.close()


def test_a_chain_does_not_grow_beyond_what_a_restart_takes(store, monkeypatch):
    monkeypatch.setattr(draft, "CHAIN_LIMIT", 3)
    monkeypatch.setattr(reverse_deltas, "CHAIN_LIMIT", 3)
    data = weights(1)
    before = put(store, data)
    own = stage(store, data, 1)
    for step in range(2, 9):
        before = put(store, trained(data, step), step, base=before)
        newer = stage(store, trained(data, step), step)
        thin(store, own, newer)
        own = newer
    for held in store.held():
        assert deepest(store, held) <= 3
        assert read(store, held) == (data if held.key.step == 1 else trained(data, held.key.step))


def test_what_is_loaded_takes_the_place_of_a_delta_and_older_steps_lead_to_it(store):
    steps = [weights(1), trained(weights(1), 2), trained(weights(1), 3)]
    own = [stage(store, data, step) for step, data in enumerate(steps, 1)]
    thin(store, own[0], own[1])
    thin(store, own[1], own[2])
    segment = store.allocate_to_restore(4 * CHUNK, "gpt")
    segment.view[: 4 * CHUNK] = steps[1]
    store.publish(manifest_of(steps[1], 2, kind=OWNER), segment, 0, verified=True)
    store.release(segment)
    third = own[2].segment
    store.drop(own[2])
    assert third in store.free_segments("staging.gpt.0.1")
    assert [read(store, held) for held in store.held()] == steps[:2]
    assert deepest(store, own[0]) == 1
