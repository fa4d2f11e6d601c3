"""The codec's threads: below everything else, never more than asked for, and gone when closed."""

from __future__ import annotations

import os
import threading
import time

import pytest
from transfer_harness import codec_pool

from fastcheckd.errors import PeerError
from fastcheckd.transfer.codec_pool import CodecPool, call_off, outcome

WAIT_S = 5.0


def my_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def wait_until_idle(pool: CodecPool) -> None:
    deadline = time.monotonic() + WAIT_S
    while pool.busy:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_its_threads_lower_their_own_priority_and_nobody_elses() -> None:
    before = my_nice()
    with codec_pool(1) as pool:
        assert outcome(pool.submit(my_nice), lambda: None) == max(1, before)
    assert my_nice() == before


def test_it_is_busy_exactly_when_no_thread_is_idle() -> None:
    go_on = threading.Event()
    with codec_pool(2) as pool:
        assert pool.threads == 2
        assert not pool.busy
        first = pool.submit(go_on.wait, WAIT_S)
        assert not pool.busy
        second = pool.submit(go_on.wait, WAIT_S)
        assert pool.busy
        waiting = pool.submit(int)
        assert waiting.cancel()
        go_on.set()
        assert outcome(first, lambda: None)
        assert outcome(second, lambda: None)
        wait_until_idle(pool)


def test_what_a_job_raises_arrives() -> None:
    def fail() -> None:
        raise TimeoutError("the job's own")

    with codec_pool(1) as pool, pytest.raises(TimeoutError, match="own"):
        outcome(pool.submit(fail), lambda: None)


def test_waiting_ends_when_the_outcome_is_not_wanted_any_more() -> None:
    go_on = threading.Event()

    def unwanted() -> None:
        raise PeerError("the transfer is over")

    with codec_pool(1) as pool:
        running, queued = pool.submit(go_on.wait, WAIT_S), pool.submit(int)
        with pytest.raises(PeerError, match="over"):
            outcome(queued, unwanted)
        call_off(queued)
        assert queued.cancelled()
        threading.Timer(0.05, go_on.set).start()
        call_off(running)
        assert running.done()


def test_a_closed_pool_refuses_drops_what_waits_and_finishes_what_runs() -> None:
    go_on, began = threading.Event(), threading.Event()

    def job() -> bool:
        began.set()
        return go_on.wait(WAIT_S)

    pool = CodecPool(1, 1)
    running, queued = pool.submit(job), pool.submit(int)
    assert began.wait(WAIT_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(PeerError, match="shutting down"):
        outcome(queued, lambda: None)
    go_on.set()
    closing.join(WAIT_S)
    assert running.result(0)
    with pytest.raises(PeerError, match="shutting down"):
        pool.submit(int)
    assert not pool.busy
