"""The data process' gate."""

import asyncio

import pytest

from fastcheckd.errors import NoLeaseError
from fastcheckd.health.lease import LeaseHolder


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
