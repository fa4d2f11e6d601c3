"""A rank is restored on an empty machine over links that bind, and something happens to one of the holders meanwhile.

Each shard has its owner and two holders; links are slow enough that a load lasts. Whatever happens, the state is
bit-identical, and nobody waits for the transfer timeout.
"""

import time

import pytest
from tests.cluster.harness import Job, assert_same, counters, make_state, process_of, until

pytestmark = pytest.mark.timeout(300)

TRANSFER_TIMEOUT_S = 60
OWNER = "node-4"
MEGABYTES = 64
MBIT_PER_S = 80


class Move:
    """A rank that goes on elsewhere: who has its state, and where nothing of it is."""

    def __init__(self, lab):
        self.lab = lab
        self.job = Job(lab, [OWNER], megabytes=MEGABYTES)
        self.job.commit(1)
        self.job.stop()
        received = {node: counters(lab, node)["shards_received"] for node in lab.node_ids}
        self.holders = [node for node in lab.node_ids if received[node] and node != OWNER]
        self.empty = next(node for node in lab.node_ids if not received[node] and node != OWNER)
        for node in (*self.holders, OWNER):
            lab.network.shape(node, MBIT_PER_S)

    def load(self, progress=None):
        """Load on the empty machine; how it went."""
        with self.job.trainer(0, node=self.empty) as trainer:
            state = make_state(99, 0, 0, MEGABYTES)
            started = time.monotonic()
            assert trainer.load(state, progress=progress) == 1
            assert time.monotonic() - started < TRANSFER_TIMEOUT_S / 2
            assert_same(state, self.job.state(1, 0))
            return dict(trainer.load_stats)


@pytest.fixture
def move(make_lab):
    return Move(make_lab(5, tolerate=2, spread=3, transfer_timeout_s=TRANSFER_TIMEOUT_S))


class OnceUnderWay:
    """A progress callback that does something once, when some bytes have come and more than half are missing."""

    def __init__(self, act):
        self.act, self.heard, self.acted = act, [], False

    def __call__(self, progress):
        self.heard.append(progress)
        if not self.acted and 0 < progress.bytes_done < progress.bytes_total / 2:
            self.acted = True
            self.act()


def test_a_slow_links_share_is_taken_by_others(move):
    slow = move.holders[0]
    move.lab.network.shape(slow, MBIT_PER_S / 10)
    stats = move.load()
    assert stats["fetched_bytes"] == stats["bytes"] and stats["bad_copies"] == 0
    # What it had queued in its sockets counts as sent; what it could not have delivered in this time came from others.
    equal_share_s = stats["bytes"] / 4 * 8 / (MBIT_PER_S / 10 * 1e6)
    assert stats["restore_s"] < equal_share_s / 2


def test_a_holder_that_is_killed_in_mid_load_leaves_its_share_to_others(move):
    victim = move.holders[0]
    callback = OnceUnderWay(lambda: move.lab.kill(victim))
    stats = move.load(callback)
    assert callback.acted, callback.heard
    assert stats["fetched_bytes"] == stats["bytes"] == callback.heard[-1].bytes_done
    assert [p.bytes_done for p in callback.heard] == sorted(p.bytes_done for p in callback.heard)


def test_a_holder_that_is_stopped_in_mid_load_costs_no_timeout(move):
    process = process_of(move.lab, move.holders[0], "data")
    callback = OnceUnderWay(process.suspend)
    try:
        stats = move.load(callback)
    finally:
        process.resume()
    assert callback.acted, callback.heard
    assert stats["fetched_bytes"] == stats["bytes"]
    until(lambda: counters(move.lab, move.empty)["restores"] == 1, "the restore to be counted")
