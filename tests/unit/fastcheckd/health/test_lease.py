"""A lease: what it opens in the data process, and the clock by which the agent renews it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.errors import NoLeaseError
from fastcheckd.health.lease import LeaseHolder
from fastcheckd.health.lease_clock import LeaseClock


class Node:
    def __init__(self):
        self.incarnation = 3
        self.now_ns = 1_000
        self.lease = LeaseHolder("n", lambda: self.incarnation, lambda: self.now_ns)


def test_a_lease_ends_by_itself_with_time():
    node = Node()
    with pytest.raises(NoLeaseError, match="n has no lease"):
        node.lease.require()
    node.lease.renew(3, 2_000, has_quorum=True)
    node.lease.require()
    assert node.lease.held() and node.lease.held(1_999) and not node.lease.held(2_000)
    node.now_ns = 2_000
    with pytest.raises(NoLeaseError):
        node.lease.require()
    assert node.lease.has_quorum


def test_a_lease_of_another_life_is_none():
    node = Node()
    node.lease.renew(2, 2_000, has_quorum=True)
    assert not node.lease.held()
    node.lease.renew(3, 2_000, has_quorum=True)
    assert node.lease.held()
    node.incarnation = 4
    assert not node.lease.held()
    node.incarnation = 0
    node.lease.renew(0, 2_000, has_quorum=False)
    assert not node.lease.held(), "not registered yet"


def test_waiting_ends_with_the_renewal_or_in_time():
    async def story():
        node = Node()
        waiting = [asyncio.create_task(node.lease.until_held(20)) for _ in range(3)]
        await asyncio.sleep(0)
        node.lease.renew(2, 2_000, has_quorum=True)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "that was not the life"
        node.lease.renew(3, 2_000, has_quorum=True)
        async with asyncio.timeout(5):
            await asyncio.gather(*waiting)
        await node.lease.until_held(0)
        node.now_ns = 5_000
        with pytest.raises(NoLeaseError):
            await node.lease.until_held(0.01)

    asyncio.run(story())


VOTERS = ["v0", "v1", "v2"]
LEASE_S = 0.6


def test_a_lease_counts_from_the_sending_of_what_a_majority_answered():
    clock = LeaseClock(VOTERS, LEASE_S)
    for voter, at in (("v0", 1.00), ("v1", 1.01), ("v2", 1.02)):
        clock.sent(voter, 1, at)
    assert clock.deadline() is None
    clock.answered("v2", 1, 1.3)
    assert clock.deadline() is None, "one of three is no majority"
    clock.answered("v0", 1, 1.4)
    assert clock.deadline() == 1.00 + LEASE_S, "the older one of the two"
    clock.answered("v1", 1, 1.5)
    assert clock.deadline() == 1.01 + LEASE_S


def test_one_voter_alone_is_a_majority():
    clock = LeaseClock(["v0"], LEASE_S)
    clock.sent("v0", 1, 5.0)
    clock.answered("v0", 1, 5.1)
    assert clock.deadline() == 5.0 + LEASE_S and clock.has_quorum(5.2)


def test_a_voter_that_withholds_answers_and_renews_nothing():
    clock = LeaseClock(["v0"], LEASE_S)
    clock.sent("v0", 1, 5.0)
    clock.answered("v0", 1, 5.1)
    for seq in range(2, 30):
        clock.sent("v0", seq, 5.0 + seq / 10)
        clock.answered("v0", 0, 5.0 + seq / 10)
    assert clock.deadline() == 5.0 + LEASE_S
    assert clock.has_quorum(7.9 + LEASE_S / 2) and not clock.has_quorum(7.9 + LEASE_S + 0.1)


def test_an_answer_that_comes_late_or_names_what_was_never_sent_renews_nothing_newer():
    clock = LeaseClock(["v0"], LEASE_S)
    clock.sent("v0", 1, 1.0)
    clock.sent("v0", 2, 2.0)
    clock.answered("v0", 99, 2.1)
    assert clock.deadline() is None
    clock.sent("v0", 100, 3.0)
    clock.answered("v0", 100, 3.1)
    clock.answered("v0", 1, 3.2)
    assert clock.deadline() == 3.0 + LEASE_S
    clock.answered("stranger", 100, 9.0)
    assert clock.deadline() == 3.0 + LEASE_S


def test_heartbeats_that_nobody_answers_take_no_memory():
    clock = LeaseClock(["v0"], LEASE_S)
    for seq in range(1, 10_000):
        clock.sent("v0", seq, float(seq))
    clock.answered("v0", 17, 10_000.0)
    assert clock.deadline() is None, "forgotten long ago"
    assert len(clock._voters["v0"].sent) <= 64


@given(st.lists(st.tuples(st.sampled_from(VOTERS), st.floats(0.01, 0.5), st.booleans()), max_size=60))
def test_whoever_may_be_called_down_for_silence_has_no_lease(beats):
    """Voters hear each beat `delay` later. Whatever arrives: a silent majority and a valid lease never meet."""
    down_after_s = LEASE_S / 0.8
    clock, now = LeaseClock(VOTERS, LEASE_S), 0.0
    heard = dict.fromkeys(VOTERS, -10.0)
    for seq, (voter, delay, answers) in enumerate(beats, 1):
        clock.sent(voter, seq, now)
        now += delay
        heard[voter] = now
        if answers:
            clock.answered(voter, seq, now)
        for later in (0.0, 0.3, LEASE_S, down_after_s, 2.0):
            silent = sum(now + later - at >= down_after_s for at in heard.values())
            deadline = clock.deadline()
            if silent >= 2 and deadline is not None:
                assert deadline <= now + later
