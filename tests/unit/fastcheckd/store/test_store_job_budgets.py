"""What one job may have of a store: refused early, given back whole, and nobody else's business."""

from __future__ import annotations

import threading

import pytest
from store_helpers import CHUNK, in_use, open_store, put, trained, weights

from fastcheckd.errors import JobBudgetError, OverBudgetError, StoreFullError
from fastcheckd.store.job_shares import WAITERS_MAX
from fastcheckd.store.segment_pools import SegmentPools
from fastcheckd.store.segments import SLAB_POOL, Segment, job_of_pool, restored_pool, staging_pool

PAGE = 4096
BUDGET, LIMIT = 100 * PAGE, 20 * PAGE
POOL = "gathered"
A, B = staging_pool("a", 0, 1), staging_pool("b", 0, 1)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "ram", BUDGET, LIMIT)
    yield store
    store.close()


@pytest.mark.parametrize("job", ["gpt", "a.b", "x.staging.1", "..."])
def test_a_staging_pool_says_whose_it_is_and_no_other_does(job):
    assert job_of_pool(staging_pool(job, 17, 1)) == job
    assert job_of_pool(SLAB_POOL) == job_of_pool(restored_pool(job)) == ""


def test_a_job_at_its_limit_is_refused_and_another_is_not(store):
    own = store.allocate(12 * PAGE, A)
    copy = store.allocate(8 * PAGE, POOL, job="a")
    assert store.job_bytes() == {"a": LIMIT}
    before = store.usage()
    for pool, job in ((A, ""), (staging_pool("a", 1, 1), ""), (POOL, "a")):
        with pytest.raises(
            JobBudgetError, match=rf"job 'a' has {LIMIT} of the {LIMIT} bytes.*raise job_budget"
        ):
            store.allocate(1, pool, job=job)
    with pytest.raises(JobBudgetError):
        store.allocate_sparse(1 << 30, [range(10)], "a")
    assert store.usage() == before
    for _ in range(2):
        store.allocate(LIMIT // 2, B)
    with pytest.raises(JobBudgetError, match="job 'b'"):
        store.allocate(1, B)
    store.release(own)
    assert store.job_bytes() == {"a": 8 * PAGE, "b": LIMIT}
    store.allocate(12 * PAGE, staging_pool("a", 1, 1))
    store.release(copy)


def test_the_nodes_budget_still_holds_for_all_jobs_together(store):
    for job in "abcde":
        store.allocate(LIMIT, POOL, job=job)
    with pytest.raises(OverBudgetError) as refused:
        store.allocate(PAGE, POOL, job="f")
    assert not isinstance(refused.value, JobBudgetError)


def test_what_is_free_counts_for_no_job_and_goes_for_another(store):
    for segment in [store.allocate(5 * PAGE, A) for _ in range(4)]:
        store.release(segment)
    assert store.job_bytes() == {} and store.usage().free_bytes == LIMIT
    again = store.allocate(5 * PAGE, A)
    assert again.tenants == 2 and store.job_bytes() == {"a": 5 * PAGE}
    for job in "bcde":
        store.allocate(LIMIT, POOL, job=job)
    store.allocate(15 * PAGE, POOL, job="f")  # the three that a does not use are unlinked for it


def test_a_larger_segment_is_not_recycled_into_a_job_that_may_not_have_all_of_it(store):
    store.allocate(9 * PAGE, POOL, job="a")
    large = store.allocate(12 * PAGE, POOL, job="b")
    store.release(large)
    exact = store.allocate(11 * PAGE, POOL, job="a")
    assert exact is not large and store.job_bytes() == {"a": LIMIT}


def test_an_allocation_that_fails_is_not_charged(store, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segment, "create", no_room)
    with pytest.raises(StoreFullError):
        store.allocate(PAGE, A)
    assert store.job_bytes() == {}


def test_slots_and_reverse_deltas_count_and_come_back(tmp_path):
    store = open_store(tmp_path / "ram", 4 << 20, 2 << 20)
    data = weights(1)
    base = put(store, data, job="a")
    put(store, trained(data, 2), 2, job="a", base=base)
    assert store.job_bytes() == {"a": in_use(store)}
    assert 4 * CHUNK < in_use(store) < 8 * CHUNK
    for held in store.held("a"):
        store.drop(held)
    assert store.job_bytes() == {}
    store.close()


def test_what_is_found_after_a_restart_counts(tmp_path):
    store = open_store(tmp_path / "ram", BUDGET, LIMIT)
    put(store, weights(1, 12 * PAGE), job="a")
    store.close()
    store = open_store(tmp_path / "ram", BUDGET, 10 * PAGE)
    assert store.job_bytes() == {"a": 12 * PAGE}
    with pytest.raises(JobBudgetError):  # lowered meanwhile: nothing goes, nothing new comes
        store.allocate(PAGE, A)
    store.allocate(PAGE, B)
    store.drop(store.held("a")[0])
    store.allocate(10 * PAGE, A)
    store.close()


def test_without_a_limit_jobs_are_counted_and_not_refused(tmp_path):
    store = open_store(tmp_path / "ram", BUDGET)
    store.allocate(BUDGET, A)
    assert store.job_bytes() == {"a": BUDGET}
    store.close()


def test_memory_that_comes_back_in_time_will_do(store):
    first = store.allocate(LIMIT, A)
    found = []
    waiting = threading.Thread(target=lambda: found.append(store.allocate(LIMIT, POOL, job="a", wait_s=20.0)))
    waiting.start()
    store.release(first)
    waiting.join(20)
    assert found and store.job_bytes() == {"a": LIMIT}


def test_few_wait_for_one_job_and_none_of_them_in_anothers_way(tmp_path):
    """A thread that waits is one in which no other job's put begins."""
    (tmp_path / "segments").mkdir()
    pools = SegmentPools(tmp_path / "segments", BUDGET, LIMIT)
    first = pools.allocate(LIMIT, A)
    waiting = [
        threading.Thread(target=lambda: pools.allocate(PAGE, POOL, job="a", wait_s=20.0))
        for _ in range(WAITERS_MAX)
    ]
    for thread in waiting:
        thread.start()
    patience = threading.Event()
    while sum(pools._jobs._waiters.values()) < WAITERS_MAX:
        assert not patience.wait(0.01)
    with pytest.raises(JobBudgetError):
        pools.allocate(PAGE, POOL, job="a", wait_s=20.0)
    pools.allocate(LIMIT, POOL, job="b", wait_s=20.0)
    pools.give_back(first)
    for thread in waiting:
        thread.join(20)
    assert pools.job_bytes() == {"a": WAITERS_MAX * PAGE, "b": LIMIT} and not pools._jobs._waiters
