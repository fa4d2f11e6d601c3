"""Working memory: kept between chunks, never shared between threads, never the same bytes twice in a chunk."""

import threading

import numpy as np

from fastcheckd.codec.scratch import Scratch


def test_what_is_taken_does_not_overlap():
    scratch = Scratch()
    scratch.empty_arena(1000)
    taken = [scratch.take(size) for size in (1, 63, 64, 65, 500, 500, 0)]
    for value, piece in enumerate(taken):
        piece[...] = value
    assert all((piece == value).all() for value, piece in enumerate(taken))
    assert [len(piece) for piece in taken] == [1, 63, 64, 65, 500, 500, 0]


def test_the_arena_is_kept_and_grows():
    scratch = Scratch()
    scratch.empty_arena(1000)
    first = scratch.take(10)
    scratch.empty_arena(500)
    assert np.shares_memory(first, scratch.take(10))
    scratch.empty_arena(100_000)
    assert len(scratch.take(100_000)) == 100_000


def test_names_are_arrays_of_their_own():
    scratch = Scratch()
    a, b = scratch.array("a", 10, np.int32), scratch.array("b", 10, np.int32)
    assert not np.shares_memory(a, b)
    assert np.shares_memory(a, scratch.array("a", 5, np.int64))
    assert scratch.array("a", 1000, np.int64).dtype == np.int64


def test_threads_share_nothing():
    scratch = Scratch()
    mine = scratch.bytes("a", 100)
    scratch.empty_arena(100)
    found = []

    def other():
        scratch.empty_arena(100)
        found.append((scratch.bytes("a", 100), scratch.take(10)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not np.shares_memory(found[0][0], mine)
    assert not np.shares_memory(found[0][1], scratch.take(10))
