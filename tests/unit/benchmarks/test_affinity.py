"""Halves of a machine's cores that share nothing, and processes that are kept to them."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from tests.benchmarks.affinity import apart, halves


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({0: 0, 1: 1}, ([0], [1])),
        ({0: 0, 1: 1, 2: 0, 3: 1}, ([0, 2], [1, 3])),
        ({0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}, ([0, 3], [1, 4, 2, 5])),
        ({0: 0, 1: 1, 2: 1, 3: 1}, ([0], [1, 2, 3])),
        ({0: 0, 1: 0}, ([0], [1])),
    ],
    ids=[
        "two cores",
        "two cores with two threads each",
        "three cores with two threads each",
        "a thread of one and three of another",
        "one core",
    ],
)
def test_the_halves_share_no_core_where_there_are_two(siblings, expected):
    assert halves(siblings, siblings) == expected


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared out")
def test_every_thread_is_kept_apart_and_let_go_again():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    mine, theirs = halves(cores)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)  # one that is there before
    thread.start()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with apart([other.pid]):
            assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == set(mine)
            assert os.sched_getaffinity(other.pid) == set(theirs)
            assert torch.get_num_threads() == len(mine)
        assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == cores
        assert torch.get_num_threads() == threads
    finally:
        ended.set()
        thread.join()
        other.communicate()
