"""Publish, find, pin, verify, drop."""

import contextlib
import stat
import threading
from pathlib import Path

import pytest
from store_helpers import (
    COPY,
    OWNER,
    make_manifest,
    manifest_files,
    open_store,
    payload,
    put,
    segment_files,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.counters import Counters
from fastcheckd.errors import InvalidRequestError, NotHeldError, StoreError
from fastcheckd.store.manifests import decode
from fastcheckd.store.ram_store import RamStore
from fastcheckd.store.segments import COPY_POOL, staging_pool


@pytest.fixture
def opened(tmp_path):
    store, counters = open_store(tmp_path / "deep" / "ram")
    yield store, counters
    store.close()


@pytest.fixture
def store(opened):
    return opened[0]


def test_a_published_shard_is_found_under_its_key_and_kind(store):
    data = payload(1, 10_000)
    held = put(store, data, step=3, rank=1, shard=2)
    key = pb.ShardKey(job="gpt", step=3, rank=1, shard=2)
    assert store.find(key, COPY) is held
    assert store.find(key, OWNER) is None
    assert store.find(pb.ShardKey(job="gpt", step=3, rank=1, shard=1), COPY) is None
    assert (held.key, held.kind) == (key, COPY)
    assert held.view == data
    assert held.view.readonly
    assert held.verified_at_ms > 1_600_000_000_000
    path = store.directory / "manifests" / "gpt" / "3-1-2-copy.shard"
    stored = decode(path.read_bytes())
    assert stored.manifest == held.manifest
    assert (stored.segment, stored.segment_offset) == (held.segment.name, 0)
    assert stored.verified_at_ms == held.verified_at_ms


def test_everything_on_disk_is_for_this_user_alone(store):
    put(store, b"x")
    for path in [store.directory, *store.directory.rglob("*")]:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


def test_the_callers_manifest_is_not_kept(store):
    manifest = make_manifest(b"x")
    segment = store.allocate(1, COPY_POOL)
    segment.view[0] = ord("x")
    held = store.publish(manifest, segment, 0, verified=False)
    manifest.Clear()
    assert held.key.job == "gpt"
    assert held.verified_at_ms == 0


def test_an_owners_shards_share_one_segment(store):
    data = payload(2, 12_000)
    segment = store.allocate(len(data), staging_pool("gpt", 0, 1))
    segment.view[: len(data)] = data
    shards = []
    for index, start in enumerate((0, 4000, 8000)):
        part = data[start : start + 4000]
        manifest = make_manifest(part, shard=index, kind=OWNER)
        shards.append(store.publish(manifest, segment, start, verified=True))
    store.release(segment)
    assert b"".join(shard.view for shard in shards) == data
    assert store.usage().segments == 1
    for shard in shards:
        assert store.usage().free_bytes == 0
        store.drop(shard)
    assert store.usage().free_bytes == segment.size_bytes
    assert store.free_segments(staging_pool("gpt", 0, 1)) == [segment]


def test_a_shard_without_bytes_is_a_shard(store):
    held = put(store, b"")
    assert bytes(held.view) == b""
    assert store.verify(held)


def test_a_second_publication_takes_the_place_of_the_first(store):
    old, new = put(store, b"old"), put(store, b"new")
    assert store.held() == [new]
    assert bytes(store.find(new.key, COPY).view) == b"new"
    assert store.usage().free_bytes == old.segment.size_bytes
    assert len(manifest_files(store.directory)) == 1
    store.drop(old)  # late news about the one that is gone
    assert store.held() == [new]
    with pytest.raises(NotHeldError), store.pinned(old):
        pass


def test_held_filters_and_sorts(store):
    for job, step, rank in [("b", 1, 0), ("a", 10, 0), ("a", 9, 1), ("a", 9, 0)]:
        put(store, b"x", job=job, step=step, rank=rank)

    def ids(shards):
        return [(s.key.job, s.key.step, s.key.rank) for s in shards]

    assert ids(store.held()) == [("a", 9, 0), ("a", 9, 1), ("a", 10, 0), ("b", 1, 0)]
    assert ids(store.held("a", 9)) == [("a", 9, 0), ("a", 9, 1)]
    assert ids(store.held(step=1)) == [("b", 1, 0)]
    assert ids(store.held("c")) == []


def test_dropping_removes_the_manifest_and_frees_the_segment(store):
    held = put(store, b"x")
    store.drop(held)
    store.drop(held)
    assert store.held() == []
    assert manifest_files(store.directory) == []
    assert store.usage().free_bytes == store.usage().used_bytes == 4096
    assert store.allocate(1, COPY_POOL) is held.segment


def test_a_pin_keeps_the_bytes_of_a_dropped_shard(store):
    data = payload(3, 4096)
    held = put(store, data)
    with store.pinned(held), store.pinned(held):
        view = held.view
        store.drop(held)
        other = store.allocate(4096, COPY_POOL)
        assert other is not held.segment
        other.view[:] = bytes(4096)
        assert view == data
        assert held.segment.path.exists()
        with pytest.raises(NotHeldError), store.pinned(held):
            pass
    assert store.allocate(4096, COPY_POOL) is held.segment


def test_a_pin_survives_a_shortage(tmp_path):
    store, _ = open_store(tmp_path / "ram", budget_bytes=2 * 4096)
    data = payload(3, 4096)
    held = put(store, data)
    with store.pinned(held):
        store.drop(held)
        with pytest.raises(StoreError):
            store.allocate(2 * 4096, "staging.a.0.1")
        assert held.view == data
    store.allocate(2 * 4096, "staging.a.0.1")
    store.close()


def test_verify_notes_when(tmp_path):
    clock = iter([100, 200])
    store = RamStore.open(
        tmp_path / "ram", budget_bytes=1 << 20, counters=Counters(), now_ms=lambda: next(clock)
    )
    held = put(store, payload(4, 9000))
    assert held.verified_at_ms == 100
    assert store.verify(held)
    now = store.find(held.key, COPY)
    assert now.verified_at_ms == 200
    assert decode(manifest_files(store.directory)[0].read_bytes()).verified_at_ms == 200
    assert list((store.directory / "tmp").iterdir()) == []
    store.drop(held)  # the value from before the check still names the same shard
    assert store.held() == []
    store.close()


@pytest.mark.parametrize("at", [0, 4095, 4096, 8999])
def test_a_flipped_byte_is_found_and_never_served_again(opened, at):
    store, counters = opened
    held = put(store, payload(5, 9000))
    held.segment.view[at] ^= 0x10
    assert store.verify(held) is False
    assert counters.get("corrupt_found") == 1
    assert store.find(held.key, COPY) is None
    assert manifest_files(store.directory) == []
    # Memory that went bad once is not used again.
    assert segment_files(store.directory) == {}
    assert store.usage().used_bytes == 0
    with pytest.raises(NotHeldError):
        store.verify(held)


def test_a_byte_beyond_the_shard_is_nobodys(store):
    held = put(store, payload(5, 9000))
    held.segment.view[9000] ^= 1
    assert store.verify(held)


def test_one_bad_shard_leaves_its_neighbours_in_the_segment_alone(store):
    segment = store.allocate(8192, staging_pool("gpt", 0, 1))
    first, second = payload(1, 4096), payload(2, 4096)
    segment.view[:] = first + second
    bad = store.publish(make_manifest(first, shard=0, kind=OWNER), segment, 0, verified=True)
    good = store.publish(make_manifest(second, shard=1, kind=OWNER), segment, 4096, verified=True)
    store.release(segment)
    segment.view[0] ^= 1
    assert not store.verify(bad)
    assert store.verify(good)
    assert store.held("gpt")[0].view == second
    assert segment.path.exists()
    store.drop(good)
    assert not segment.path.exists()
    assert store.usage().segments == 0


def test_verify_of_many_threads_counts_a_bad_shard_once(opened):
    store, counters = opened
    held = put(store, payload(6, 100_000))
    held.segment.view[77_777] ^= 1
    answers = []

    def verify():
        try:
            answers.append(store.verify(held))
        except NotHeldError:
            answers.append(False)

    threads = [threading.Thread(target=verify) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [False] * 4
    assert counters.get("corrupt_found") == 1


@pytest.mark.parametrize(
    ("key", "offset", "pool"),
    [
        ({"job": "../x"}, 0, COPY_POOL),
        ({}, -1, COPY_POOL),
        ({}, 4096 - 99, COPY_POOL),
        ({}, 0, "staging.gpt.0.1"),
        ({"kind": OWNER}, 0, COPY_POOL),
        ({"kind": OWNER}, 0, "staging.gpt.1.1"),
    ],
)
def test_a_publication_that_does_not_hold_up_is_refused(store, key, offset, pool):
    segment = store.allocate(4096, pool)
    with pytest.raises(InvalidRequestError):
        store.publish(make_manifest(bytes(100), **key), segment, offset, verified=True)
    assert store.held() == []
    assert not list((store.directory / "manifests").iterdir())
    store.release(segment)
    assert store.usage().free_bytes == 4096


def test_a_released_segment_cannot_be_published(store):
    segment = store.allocate(1, COPY_POOL)
    store.release(segment)
    with pytest.raises(StoreError, match="not in use"):
        store.publish(make_manifest(b"x"), segment, 0, verified=True)
    assert manifest_files(store.directory) == []
    assert list((store.directory / "tmp").iterdir()) == []


def test_the_folder_of_a_job_is_not_reached_through_a_link(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (store.directory / "manifests" / "gpt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        put(store, b"x")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_publication_that_cannot_be_renamed_leaves_nothing(store):
    (store.directory / "manifests" / "gpt" / "1-0-0-copy.shard" / "x").mkdir(parents=True)
    segment = store.allocate(1, COPY_POOL)
    with pytest.raises(StoreError, match="cannot publish"):
        store.publish(make_manifest(b"\0"), segment, 0, verified=True)
    assert store.held() == []
    store.release(segment)
    assert store.usage().free_bytes == 4096


def test_a_second_store_in_the_same_directory_is_refused(store):
    with pytest.raises(StoreError, match=f"{store.directory} is in use by another"):
        open_store(store.directory)
    store.close()
    second, _ = open_store(store.directory)
    second.close()


def test_a_closed_store_takes_nothing_and_touches_nothing(store):
    held = put(store, b"x")
    mine = store.allocate(1, COPY_POOL)
    bad = put(store, b"y", step=2)
    bad.segment.view[0] = 0
    pins = contextlib.ExitStack()
    pins.enter_context(store.pinned(held))
    pins.enter_context(store.pinned(bad))
    assert not store.verify(bad)  # to be unlinked with the pin
    store.release(store.allocate(1, "staging.a.0.1"))
    store.close()
    store.close()
    before = segment_files(store.directory)
    assert set(before) == {held.segment.name, bad.segment.name, mine.name}
    store.release(mine)
    pins.close()
    assert segment_files(store.directory) == before
    for call in (
        lambda: store.allocate(1, COPY_POOL),
        lambda: put(store, b"y"),
        lambda: store.drop(held),
        lambda: store.verify(held),
        lambda: store.publish(make_manifest(b"x"), mine, 0, verified=True),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()
    assert store.held() == []
    assert manifest_files(store.directory)


def test_readers_and_writers_at_once_see_whole_shards_only(store):
    errors: list[BaseException] = []
    stop = threading.Event()
    versions = [payload(seed, 8192) for seed in range(4)]

    def write():
        try:
            for round_ in range(60):
                put(store, versions[round_ % 4])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        finally:
            stop.set()

    def read():
        key = make_manifest(versions[0]).key
        try:
            while not stop.is_set():
                held = store.find(key, COPY)
                if held is None:
                    continue
                try:
                    with store.pinned(held):
                        assert held.first_bad_chunk() is None
                except NotHeldError:
                    continue
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=write), *(threading.Thread(target=read) for _ in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []


@pytest.mark.parametrize("name", ["segments", "ways", "manifests", "tmp"])
def test_a_linked_folder_is_refused(tmp_path: Path, name):
    ram = tmp_path / "ram"
    open_store(ram)[0].close()
    (ram / name).rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (ram / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        open_store(ram)
    assert (tmp_path / "elsewhere" / "file").exists()


def test_a_linked_or_open_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(StoreError, match="symbolic link"):
        open_store(tmp_path / "link")
    (tmp_path / "real").chmod(0o770)
    with pytest.raises(StoreError, match="written by other users"):
        open_store(tmp_path / "real")
    assert list((tmp_path / "real").iterdir()) == []


def test_a_folder_with_a_life_of_its_own_is_not_emptied(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "thesis.txt").touch()
    with pytest.raises(StoreError, match="not a RAM directory"):
        open_store(tmp_path)
    assert (tmp_path / "tmp" / "thesis.txt").exists()
    assert not (tmp_path / "LOCK").exists()


def test_a_linked_lock_is_refused(tmp_path):
    (tmp_path / "ram").mkdir(mode=0o700)
    (tmp_path / "ram" / "LOCK").symlink_to(tmp_path / "other")
    with pytest.raises(StoreError, match="LOCK"):
        open_store(tmp_path / "ram")
    assert not (tmp_path / "other").exists()
