"""The chunk store: what is published is exact, whatever becomes of other steps, of readers and of the process."""

from __future__ import annotations

import os
import time

import pytest
from store_helpers import (
    CHUNK,
    COPY,
    fill,
    in_use,
    manifest_of,
    open_store,
    put,
    read,
    stage,
    trained,
    weights,
)

from fastcheckd.errors import (
    CorruptError,
    InvalidRequestError,
    NotHeldError,
    OverBudgetError,
    StoreError,
)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "ram")
    yield store
    store.close()


def test_unchanged_chunks_take_neither_memory_nor_a_transfer(store):
    data = weights(1, 8 * CHUNK)
    put(store, data)
    before = in_use(store)
    draft = store.draft(manifest_of(trained(data, 2, {3}), 2))
    assert draft.missing == (3,)
    fill(draft, trained(data, 2, {3}))
    draft.publish()
    assert in_use(store) - before == CHUNK


def test_equal_chunks_of_one_shard_are_one(store):
    zeros = bytes(6 * CHUNK)
    held = put(store, zeros)
    assert in_use(store) == CHUNK and read(store, held) == zeros


def test_chunks_are_not_shared_with_other_jobs_ranks_or_kinds(store):
    data = weights(1)
    for key in ({}, {"job": "other"}, {"rank": 1}, {"shard": 2}):
        draft = store.draft(manifest_of(data, **key))
        assert len(draft.missing) == 4, key
        fill(draft, data)
        draft.publish()
    stage(store, data, 1)
    assert len(store.held()) == 5


def test_an_older_step_becomes_reverse_deltas_and_is_the_same(store):
    steps = [weights(1, 8 * CHUNK)]
    base = put(store, steps[0])
    for step in range(2, 6):
        steps.append(trained(steps[-1], step))
        base = put(store, steps[-1], step, base=base)
    assert [held.is_whole for held in store.held()] == [False] * 4 + [True]
    assert in_use(store) < 8 * CHUNK * 4
    for held, data in zip(store.held(), steps, strict=True):
        assert read(store, held) == data and store.verify(held)


def test_without_keep_base_no_deltas_are_made(store):
    data = weights(1)
    base = put(store, data)
    draft = store.draft(manifest_of(trained(data, 2), 2), base=base, keep_base=False)
    fill(draft, trained(data, 2), against_base=True)
    draft.publish()
    assert base.is_whole


def test_only_an_older_step_of_the_same_copies_becomes_deltas(store):
    """A copy made anew may come against a newer step, or against what this node owns: those stay as they are."""
    data = weights(1)
    newer, own = put(store, trained(data, 5), 5), stage(store, trained(data, 5), 5)
    for step, base in ((3, newer), (4, own)):
        draft = store.draft(manifest_of(trained(data, step), step), base=base)
        fill(draft, trained(data, step), against_base=True)
        assert read(store, draft.publish()) == trained(data, step)
        assert base.is_whole


def test_a_draft_waits_no_longer_than_it_may_for_all_of_its_slots(tmp_path):
    store = open_store(tmp_path / "ram", budget_bytes=20 * CHUNK)
    put(store, weights(1, 16 * CHUNK))
    began = time.monotonic()
    with pytest.raises(OverBudgetError):
        store.draft(manifest_of(weights(2, 16 * CHUNK), 2), wait_s=0.3)
    assert 0.3 <= time.monotonic() - began < 2
    store.close()


def test_a_reader_is_not_disturbed_by_a_drop_nor_by_a_change_of_form(store):
    data = weights(1)
    base = put(store, data)
    with store.reading(base) as opened, opened.chunk(0) as first:
        put(store, trained(data, 2), 2, base=base)
        store.drop(store.find(base.key, COPY))
        for seed in range(20, 40):  # whatever might lie in its slots next
            put(store, weights(seed), seed)
        assert bytes(first) == data[:CHUNK]
        with opened.chunk(1) as second:
            assert bytes(second) == data[CHUNK : 2 * CHUNK]
    with pytest.raises(NotHeldError), store.reading(base):
        pass


def test_a_draft_that_is_given_up_leaves_nothing(store):
    data = weights(1)
    base = put(store, data)
    before = in_use(store)
    draft = store.draft(manifest_of(trained(data, 2), 2), base=base)
    fill(draft, trained(data, 2), against_base=True, chunks=draft.missing[:2])
    with pytest.raises(InvalidRequestError, match="2 of 4 chunks never arrived"):
        draft.publish()
    draft.abandon()
    draft.abandon()
    assert in_use(store) == before and read(store, base) == data
    with pytest.raises(StoreError):
        draft.place(3)


def test_a_lean_draft_needs_a_few_slots_and_its_base_stays_readable(tmp_path):
    size = 48 * CHUNK
    store = open_store(tmp_path / "ram", budget_bytes=90 * CHUNK)
    data = weights(1, size)
    base = put(store, data)
    with pytest.raises(OverBudgetError):
        store.draft(manifest_of(weights(2, size), 2))
    newer = trained(data, 2)
    draft = store.draft(manifest_of(newer, 2), base=base)
    assert draft.lean
    half = draft.missing[:24]
    fill(draft, newer, against_base=True, chunks=half)
    assert read(store, base) == data
    fill(draft, newer, against_base=True)
    held = draft.publish()
    assert read(store, held) == newer and read(store, base) == data
    store.close()
    store = open_store(tmp_path / "ram", budget_bytes=90 * CHUNK)
    assert [read(store, each) for each in store.held()] == [data, newer]
    store.close()


def test_after_a_lean_draft_that_is_given_up_the_base_is_as_it_was_and_the_next_one_fits(tmp_path):
    size = 48 * CHUNK
    store = open_store(tmp_path / "ram", budget_bytes=90 * CHUNK)
    data = weights(1, size)
    base = put(store, data)
    for step in (2, 3, 4):
        draft = store.draft(manifest_of(trained(data, step), step), base=base)
        fill(draft, trained(data, step), against_base=True, chunks=draft.missing[: 10 * step])
        draft._flush()  # as if more had come
        draft.abandon()
        assert read(store, base) == data
    newer = trained(data, 9)
    assert read(store, put(store, newer, 9, base=base)) == newer and read(store, base) == data
    store.close()


def test_a_lean_draft_of_bytes_that_do_not_shrink_is_refused_with_the_numbers(tmp_path):
    size = 48 * CHUNK
    store = open_store(tmp_path / "ram", budget_bytes=90 * CHUNK)
    base = put(store, weights(1, size))
    draft = store.draft(manifest_of(weights(2, size), 2), base=base)
    with pytest.raises(OverBudgetError, match="RAM budget"):
        fill(draft, weights(2, size), against_base=True)
    draft.abandon()
    assert read(store, base) == weights(1, size)
    store.close()


def test_chunks_of_unlike_sizes_leave_no_memory_behind(store):
    for round_ in range(6):
        for number, lengths in enumerate(([5000, 70000, 100], [4096] * 7, [200000], [1, 2, 3])):
            data = os.urandom(sum(lengths))
            draft = store.draft(manifest_of(data, round_ + 1, rank=number, lengths=lengths))
            fill(draft, data)
            assert read(store, draft.publish()) == data
        for held in store.held()[:: round_ % 3 + 1]:
            store.drop(held)
    for held in store.held():
        store.drop(held)
    assert in_use(store) == 0


@pytest.mark.parametrize("damaged", ["raw", "delta"])
def test_bad_bytes_are_found_dropped_counted_and_their_memory_is_not_used_again(store, damaged):
    data = weights(1)
    base = put(store, data)
    newer = trained(data, 2)
    held = put(store, newer, 2, base=base)
    condemned = []
    store.on_condemned = lambda replica: condemned.append(replica.key.step)
    chunk = (held if damaged == "raw" else base).content[1]
    place = chunk.form.place
    place.view[7] ^= 1
    with pytest.raises(CorruptError):
        read(store, base)
    # What is decoded against bad bytes is bad as well; the newer step needs no delta.
    assert sorted(condemned) == ([1, 2] if damaged == "raw" else [1])
    assert store.find(base.key, COPY) is None
    for step in range(10, 30):
        put(store, weights(step), step)
        again = [c.form.place for each in store.held() for c in each.content]
        assert not any(p is not place and p.file is place.file and p.offset == place.offset for p in again)


def test_a_good_replica_that_is_called_bad_stays(store):
    held = put(store, weights(1))
    store.condemn(held, "somebody said so")
    assert store.find(held.key, COPY) is not None


@pytest.mark.parametrize(("damaged", "kept"), [(False, [0, 2]), (True, [2])])
def test_of_manifests_that_say_that_different_chunks_share_bytes_the_true_one_is_kept(
    tmp_path, damaged, kept
):
    store = open_store(tmp_path / "ram")
    one, other = put(store, weights(1)), put(store, weights(2), rank=1)
    place = one.content[2].form.place
    # As a defect might write it.
    other.content[0].form.place.offset = place.offset
    store._index.rewrite(other)
    put(store, weights(3), rank=2)
    if damaged:
        place.view[5] ^= 1
    store.close()
    store = open_store(tmp_path / "ram")
    assert [held.key.rank for held in store.held()] == kept
    assert all(store.verify(held) for held in store.held())
    store.close()
