"""How fast repairs may go, and that they give way: decided without a clock, then by real threads."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.errors import PeerError
from fastcheckd.transfer.pacing import Gate, Pacer


def run(
    pacer: Pacer, pieces: int, size: int, *, until_s: float, busy: tuple[float, float] = (0.0, 0.0)
) -> list[float]:
    """When the pieces of one stream passed, on a clock that jumps to where the pacer says."""
    now, passed = 0.0, []
    pacer.begin("s", now)
    while len(passed) < pieces and now < until_s:
        wait_s = pacer.wait_s("s", size, now, busy=busy[0] <= now < busy[1])
        if wait_s == 0.0:
            passed.append(now)
        now += min(wait_s, 0.05)
    return passed


@given(st.integers(1, 50), st.integers(10, 500))
def test_in_the_long_run_the_rate_holds_whatever_the_size_of_the_pieces(pieces: int, size: int) -> None:
    passed = run(Pacer(100.0, burst_bytes=100, trickle_s=math.inf), pieces, size, until_s=1e6)
    assert len(passed) == pieces
    # All but the last piece have been paid for, but for what was saved up.
    assert passed[-1] * 100.0 >= (pieces - 1) * size - 100 - 1e-6


def test_while_the_foreground_is_busy_only_a_trickle_passes() -> None:
    passed = run(Pacer(1e9, burst_bytes=10**9, trickle_s=1.0), 10, 1000, until_s=100.0, busy=(0.0, 5.5))
    assert passed[:5] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0], abs=0.06)
    assert all(5.5 <= at < 5.7 for at in passed[5:])


def test_a_stream_that_the_rate_would_hold_up_too_long_gets_a_piece() -> None:
    passed = run(Pacer(1.0, burst_bytes=1, trickle_s=2.0), 4, 1000, until_s=100.0)
    assert passed == pytest.approx([0.0, 2.0, 4.0, 6.0], abs=0.06)


def test_without_a_trickle_busy_means_nothing_at_all() -> None:
    assert run(Pacer(1e9, burst_bytes=10**9, trickle_s=math.inf), 1, 10, until_s=50, busy=(0, 1e9)) == []


def test_a_gate_lets_threads_pass_when_the_foreground_is_done_and_counts_who_waited() -> None:
    busy = threading.Event()
    busy.set()
    paused = threading.Semaphore(0)
    gate = Gate(Pacer(1e9, burst_bytes=10**9, trickle_s=3600.0), busy.is_set, paused.release)
    gate.begin("s")
    passed = threading.Event()

    def go() -> None:
        gate.wait("s", 100, lambda: None)
        passed.set()

    thread = threading.Thread(target=go)
    thread.start()
    assert paused.acquire(timeout=60)
    assert not passed.is_set()
    busy.clear()
    assert passed.wait(10)
    thread.join(10)
    assert not paused.acquire(blocking=False)  # counted once, however often it looked


def test_a_thread_at_the_gate_ends_when_its_transfer_does() -> None:
    gate = Gate(Pacer(1e9, burst_bytes=10**9, trickle_s=3600.0), lambda: True)

    def ended() -> None:
        raise PeerError("the transfer was ended")

    with pytest.raises(PeerError, match="was ended"):
        gate.wait("s", 100, ended)


def test_tasks_wait_at_a_gate_without_holding_up_the_loop() -> None:
    busy = True
    gate = Gate(Pacer(1e9, burst_bytes=10**9, trickle_s=3600.0), lambda: busy)

    async def whole() -> None:
        nonlocal busy
        gate.begin("s")
        waiting = asyncio.create_task(gate.wait_async("s", 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        busy = False
        async with asyncio.timeout(10):
            await waiting

    asyncio.run(whole())
