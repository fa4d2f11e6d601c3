"""Segments: recycled within their pool, within the budget, and never a byte without memory behind it."""

import errno
import os
import random
import subprocess
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import OWNER, files_of, manifest_of, open_store, payload, read, stage

from fastcheckd.errors import InvalidRequestError, OverBudgetError, StoreError, StoreFullError
from fastcheckd.store.replica_store import UNUSED_TRIMS
from fastcheckd.store.segment_pools import FREE_SEGMENTS_MIN, best_fit, pick_victim
from fastcheckd.store.segments import Segment, rounded, staging_pool

KIB = 1 << 10
MIB = 1 << 20
POOL = "gathered.gpt"
OWN = staging_pool("gpt", 0, 1)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "ram", budget_bytes=256 * KIB)
    yield store
    store.close()


@given(st.integers(0, 2**50))
def test_sizes_are_whole_pages_and_at_least_one(size):
    assert rounded(size) % 4096 == 0
    assert max(size, 1) <= rounded(size) < max(size, 1) + 4096


@given(sizes=st.lists(st.integers(1, 2000).map(lambda pages: pages * 4096)), size=st.integers(1, 2000))
def test_the_best_fit_is_the_smallest_that_is_not_wasteful(sizes, size):
    size *= 4096
    free = [Segment(None, s, "") for s in sizes]
    found = best_fit(free, size)
    good = [s for s in sizes if size <= s <= size * 1.25 + MIB]
    assert (found.size_bytes if found else None) == min(good, default=None)


def test_the_victim_is_the_smallest_that_suffices_else_the_largest():
    small, large, other = (Segment(None, s, "") for s in (4096, 16384, 16384))
    assert pick_victim([small, large, other], 4096) is small
    assert pick_victim([small, large, other], 8192) is large
    assert pick_victim([small, large, other], 99999) is large


def test_a_segment_is_a_private_allocated_file(store):
    segment = store.allocate(5000, POOL)
    found = segment.path.stat()
    assert segment.size_bytes == found.st_size == 8192
    assert found.st_blocks * 512 >= 8192
    assert found.st_mode & 0o777 == 0o600
    assert segment.path.parent == store.directory / "segments"
    segment.view[8191] = 7
    assert segment.path.read_bytes()[8191] == 7
    assert segment.view is segment.view


def test_zero_bytes_still_get_a_segment(store):
    assert len(store.allocate(0, POOL).view) == 4096
    with pytest.raises(InvalidRequestError):
        store.allocate(-1, POOL)


def test_a_released_segment_is_recycled_for_its_own_pool_only(store):
    mine, yours = staging_pool("gpt", 0, 1), staging_pool("gpt", 1, 1)
    first = store.allocate(8192, mine)
    assert store.free_segments(mine) == []
    store.release(first)
    assert store.free_segments(mine) == [first]
    assert store.free_segments(yours) == []
    assert store.allocate(8192, yours) is not first
    assert store.allocate(8192, POOL) is not first
    assert store.allocate(8192, mine) is first
    assert store.free_segments(mine) == []


def test_a_segment_given_back_twice_is_an_error(store):
    segment = store.allocate(1, POOL)
    store.release(segment)
    with pytest.raises(StoreError, match="released twice"):
        store.release(segment)
    assert store.allocate(1, POOL) is segment


def test_free_segments_count_and_go_when_it_gets_tight(store):
    for segment in [store.allocate(64 * KIB, POOL) for _ in range(3)]:
        store.release(segment)
    assert store.usage().used_bytes == 192 * KIB
    assert store.usage().free_bytes == 192 * KIB
    store.allocate(64 * KIB, "staging.a.0.1")
    assert store.usage().free_bytes == 192 * KIB
    big = store.allocate(180 * KIB, "staging.b.0.1")
    assert store.usage().used_bytes == 64 * KIB + big.size_bytes
    assert store.usage().free_bytes == 0
    assert sum(files_of(store.directory).values()) == store.usage().used_bytes


def test_no_more_free_segments_go_than_needed(store):
    sizes = [16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB]
    for segment in [store.allocate(size, POOL) for size in sizes]:
        store.release(segment)
    store.allocate(44 * KIB, "staging.a.0.1")
    assert sorted(files_of(store.directory).values()) == [16 * KIB, 44 * KIB, 64 * KIB, 128 * KIB]


def test_over_budget_says_the_numbers_and_evicts_nothing(store):
    kept = store.allocate(100 * KIB, POOL)
    store.release(store.allocate(100 * KIB, POOL))
    with pytest.raises(
        OverBudgetError, match=rf"{160 * KIB} bytes asked.* {200 * KIB} of .*{256 * KIB}.*raise"
    ):
        store.allocate(160 * KIB, "staging.a.0.1")
    assert store.usage().free_bytes == 100 * KIB
    assert kept.path.exists()


def test_a_pool_keeps_few_free_segments_or_as_many_as_it_uses(store):
    def release(segments):
        for segment in segments:
            store.release(segment)
        return store.usage().free_bytes // 4096

    segments = [store.allocate(1, POOL) for _ in range(20)]
    assert release(segments[:10]) == 10
    assert release(segments[10:15]) == FREE_SEGMENTS_MIN + 1
    assert release(segments[15:]) == FREE_SEGMENTS_MIN
    # The ones that became free last stay.
    assert set(files_of(store.directory)) == {s.name for s in segments[16:]}


def test_a_view_outlives_the_file_but_a_released_segment_gives_no_new_one(store):
    segments = [store.allocate(4096, POOL) for _ in range(FREE_SEGMENTS_MIN + 1)]
    view = segments[0].view
    view[0] = 9
    for segment in segments:
        store.release(segment)
    assert not segments[0].path.exists()
    assert view[0] == 9
    with pytest.raises(StoreError, match="gone"):
        segments[0].view  # noqa: B018


def test_a_segment_replaced_by_a_link_is_not_followed(store, tmp_path):
    segment = store.allocate(4096, POOL)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4096))
    segment.path.unlink()
    segment.path.symlink_to(secret)
    with pytest.raises(StoreError, match="regular file"):
        segment.view  # noqa: B018


def test_threads_never_slip_under_the_budget_together(tmp_path):
    budget = 64 * 4096
    store = open_store(tmp_path / "ram", budget_bytes=budget)
    too_much: list[int] = []
    refused = threading.Event()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        mine = []
        for _ in range(60):
            try:
                mine.append(store.allocate(dice.randrange(1, 16 * 4096), f"pool-{dice.randrange(3)}"))
            except OverBudgetError:
                refused.set()
            if (used := sum(stat_size(e) for e in os.scandir(store.directory / "segments"))) > budget:
                too_much.append(used)
            if mine and (len(mine) > 4 or dice.random() < 0.4):
                store.release(mine.pop(dice.randrange(len(mine))))
        for segment in mine:
            store.release(segment)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert too_much == []
    assert refused.is_set()
    usage = store.usage()
    assert usage.used_bytes == usage.free_bytes == sum(files_of(store.directory).values())
    assert store.allocate(budget, POOL).size_bytes == budget
    store.close()


def stat_size(entry: os.DirEntry) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.fixture
def small_tmpfs(tmp_path):
    """An 8 MiB tmpfs of its own."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "fastcheck-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_a_full_tmpfs_is_an_error_and_loses_nothing(small_tmpfs):
    store = open_store(small_tmpfs / "ram", budget_bytes=1 << 30)
    data = payload(1, 3 * MIB)
    held = stage(store, data)
    # Free segments are given up for it before anybody is refused.
    store.release(store.allocate(3 * MIB, "staging.a.0.1"))
    large = store.allocate(4 * MIB, "staging.b.0.1")
    assert store.usage().free_bytes == 0
    large.view[:] = b"x" * large.size_bytes
    before = files_of(store.directory)
    with pytest.raises(StoreFullError, match=r"allocate 2097152 bytes.* of 8388608 bytes and .*enlarge"):
        store.allocate(2 * MIB, POOL)
    assert files_of(store.directory) == before
    assert store.usage().used_bytes == 7 * MIB
    assert read(store, held) == data
    assert store.verify(held)
    store.close()


def test_a_manifest_finds_no_room_unless_free_segments_go(small_tmpfs):
    store = open_store(small_tmpfs / "ram", budget_bytes=1 << 30)
    first = store.allocate(4096, OWN)
    first.view[:4096] = payload(1, 4096)
    store.release(store.allocate(MIB, "staging.a.0.1"))
    filler = small_tmpfs / "filler"
    fill(filler)
    held = store.publish(manifest_of(payload(1, 4096), kind=OWNER), first, 0, verified=True)
    assert store.usage().free_bytes == 0
    fill(small_tmpfs / "filler-2")
    with pytest.raises(StoreFullError, match="write a manifest"):
        store.publish(manifest_of(payload(1, 4096), 2, kind=OWNER), first, 0, verified=True)
    assert list((store.directory / "tmp").iterdir()) == []
    assert store.held() == [held]
    assert store.verify(held)  # that needs no room
    filler.unlink()
    store.publish(manifest_of(payload(1, 4096), 2, kind=OWNER), first, 0, verified=True)
    assert len(store.held()) == 2
    store.close()


def test_a_file_system_without_inodes_is_full_as_well(small_tmpfs):
    store = open_store(small_tmpfs / "ram", budget_bytes=1 << 30)
    segment = store.allocate(4096, OWN)
    other = store.allocate(4096, staging_pool("other", 0, 1))
    for spare in [store.allocate(4096, "staging.a.0.1") for _ in range(2)]:
        store.release(spare)
    subprocess.run(["mount", "-o", "remount,nr_inodes=100", str(small_tmpfs)], check=True, timeout=20)
    fillers = iter(range(100))
    with pytest.raises(OSError, match="No space"):
        while True:
            (small_tmpfs / f"filler-{next(fillers)}").touch()
    # The manifest and the folder of its job, an inode each, take the place of the two free segments.
    store.publish(manifest_of(bytes(4096), kind=OWNER), segment, 0, verified=True)
    assert store.usage().free_bytes == 0
    with pytest.raises(StoreFullError, match="and 0 inodes left"):
        store.publish(manifest_of(bytes(4096), kind=OWNER, job="other"), other, 0, verified=True)
    with pytest.raises(StoreFullError, match="and 0 inodes left"):
        store.allocate(4096, POOL)
    assert store.usage().used_bytes == 2 * 4096
    store.close()


def fill(path):
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_an_error_that_is_not_about_room_is_told_as_such(tmp_path):
    store = open_store(tmp_path / "ram")
    (store.directory / "segments").rmdir()
    with pytest.raises(StoreError, match="No such file") as caught:
        store.allocate(1, POOL)
    assert not isinstance(caught.value, StoreFullError)
    assert store.usage().used_bytes == 0
    store.close()


def test_whoever_may_wait_gets_the_room_that_comes_back(store):
    held = store.allocate(200 * KIB, POOL)
    with pytest.raises(OverBudgetError):
        store.allocate(200 * KIB, "staging.a.0.1", wait_s=0.01)
    letting_go = threading.Timer(0.05, store.release, [held])
    letting_go.start()
    assert store.allocate(200 * KIB, "staging.a.0.1", wait_s=20).size_bytes == 200 * KIB
    letting_go.join()


def test_what_nobody_needed_meanwhile_is_given_back(store):
    pool = staging_pool("gpt", 0, 1)
    for segment in [store.allocate(8 * KIB, pool) for _ in range(3)]:
        store.release(segment)
    store.trim()
    for _ in range(5):  # one at a time
        store.release(store.allocate(8 * KIB, pool))
    assert store.trim() == 2 * 8 * KIB
    assert store.usage().free_bytes == 8 * KIB
    store.release(store.allocate(8 * KIB, pool))
    assert store.trim() == 0


def test_rare_tenants_find_warm_memory_for_trainers_and_not_for_copies(store):
    pools = (staging_pool("gpt", 0, 1), POOL)
    for pool in pools:
        store.release(store.allocate(8 * KIB, pool))
    for _ in range(1 + UNUSED_TRIMS):
        assert [len(store.free_segments(pool)) for pool in pools] == [1, 1]
        store.trim()
    assert [len(store.free_segments(pool)) for pool in pools] == [1, 0]


def test_what_an_earlier_session_copied_into_is_not_used_again(store):
    pools = [staging_pool("gpt", 0, session) for session in (1, 2)]
    free, in_use = store.allocate(16 * KIB, pools[0]), store.allocate(16 * KIB, pools[0])
    store.release(free)
    others = [
        store.allocate(16 * KIB, staging_pool("gpt", 1, 1)),
        store.allocate(16 * KIB, staging_pool("other", 0, 1)),
    ]
    newer = store.allocate(16 * KIB, pools[1])
    store.retire("gpt", 0, 2)
    assert not free.path.exists() and in_use.path.exists(), (
        "what is published in it stays until nothing refers to it"
    )
    store.release(in_use)
    assert not in_use.path.exists()
    for segment, pool in ((newer, pools[1]), (others[0], staging_pool("gpt", 1, 1))):
        store.release(segment)
        assert store.allocate(16 * KIB, pool) is segment


def test_what_sessions_of_a_deleted_job_copied_into_is_not_kept_for_them(store):
    pools = [staging_pool("gone", rank, session) for rank, session in ((0, 1), (1, 2), (1, 3))]
    pools.append(staging_pool("kept", 0, 1))
    for pool in pools:
        store.release(store.allocate(16 * KIB, pool))
    store.retire_jobs({"gone": 3, "kept": 0, "unheard_of": 9})
    assert [len(store.free_segments(pool)) for pool in pools] == [0, 0, 1, 1]


def test_what_was_brought_here_to_be_read_is_not_used_again(store):
    segment = store.allocate_to_restore(16 * KIB, "gpt")
    assert store.job_bytes() == {"gpt": 16 * KIB}
    store.release(segment)
    assert not segment.path.exists() and store.usage().used_bytes == 0
