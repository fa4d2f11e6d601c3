"""Segments of which only some stretches have memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import open_store

from fastcheckd.errors import OverBudgetError
from fastcheckd.store.segments import PAGE_BYTES
from fastcheckd.store.sparse import filled_pages

BUDGET = 64 * PAGE_BYTES


@pytest.fixture
def store(tmp_path):
    made = open_store(tmp_path / "ram", BUDGET)
    yield made
    made.close()


@given(st.lists(st.tuples(st.integers(0, 9 * PAGE_BYTES), st.integers(0, 2 * PAGE_BYTES)), max_size=5))
@settings(deadline=None)
def test_filled_pages_are_those_with_some_of_the_bytes(stretches):
    wanted = {byte // PAGE_BYTES for low, size in stretches for byte in range(low, low + size)}
    found = filled_pages([range(low, low + size) for low, size in stretches])
    assert {byte // PAGE_BYTES for each in found for byte in each} == wanted
    assert all(not (each.start % PAGE_BYTES or each.stop % PAGE_BYTES) for each in found)
    assert all(one.stop < other.start for one, other in pairwise(found))


def test_it_counts_for_what_is_filled_and_reads_as_zeros_elsewhere(store):
    long = 1 << 40
    made = store.allocate_sparse(long, [range(10, 20), range(long - 5, long)])
    assert (made.length_bytes, made.size_bytes) == (long, 2 * PAGE_BYTES)
    assert store.usage().used_bytes == 2 * PAGE_BYTES
    found = made.path.stat()
    assert (found.st_size, found.st_blocks * 512) == (long, 2 * PAGE_BYTES)
    made.view[10:20] = b"0123456789"
    made.view[long - 5 :] = b"there"
    assert bytes(made.view[:24]) == bytes(10) + b"0123456789" + bytes(4)
    assert bytes(made.view[long - 6 :]) == b"\0there"
    store.discard(made)
    assert store.usage().used_bytes == 0
    assert not made.path.exists()


def test_without_room_nothing_stays_behind(store):
    first = store.allocate_sparse(1 << 30, [range(60 * PAGE_BYTES)])
    with pytest.raises(OverBudgetError, match="RAM budget"):
        store.allocate_sparse(1 << 30, [range(5 * PAGE_BYTES)])
    assert store.usage().used_bytes == 60 * PAGE_BYTES
    assert [path.name for path in (store.directory / "segments").iterdir()] == [first.name]
    store.discard(first)
    store.discard(store.allocate_sparse(1 << 30, [range(BUDGET)]))


def test_free_segments_give_way(store):
    store.release(store.allocate(40 * PAGE_BYTES, "copy"))
    made = store.allocate_sparse(1 << 30, [range(60 * PAGE_BYTES)])
    assert store.usage().used_bytes == 60 * PAGE_BYTES
    store.discard(made)


def test_the_next_process_removes_what_is_left(store, tmp_path):
    made = store.allocate_sparse(1 << 20, [range(100)])
    store.close()
    again = open_store(tmp_path / "ram", BUDGET)
    assert not made.path.exists()
    assert again.usage().used_bytes == 0
    again.close()
