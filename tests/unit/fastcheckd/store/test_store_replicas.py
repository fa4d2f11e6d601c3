"""Publish, find, read, verify, drop: what each promises, of copies and of the owner's own."""

import contextlib
import stat
import threading

import pytest
from store_helpers import (
    CHUNK,
    COPY,
    OWNER,
    files_of,
    in_use,
    manifest_files,
    manifest_of,
    open_store,
    payload,
    put,
    read,
    stage,
    trained,
    weights,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.counters import Counters
from fastcheckd.errors import CorruptError, InvalidRequestError, NotHeldError, StoreError
from fastcheckd.store.manifests import decode
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import staging_pool

OWN = staging_pool("gpt", 0, 1)
PAGE = 4096


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def store(tmp_path, counters):
    store = open_store(tmp_path / "deep" / "ram", counters=counters)
    yield store
    store.close()


@pytest.mark.parametrize("make", [put, stage])
def test_a_published_shard_is_found_under_its_key_and_kind(store, make):
    data = payload(1, 10_000)
    held = make(store, data, 3, rank=1, shard=2)
    kind, other = (COPY, OWNER) if make is put else (OWNER, COPY)
    key = pb.ShardKey(job="gpt", step=3, rank=1, shard=2)
    assert store.find(key, kind) is held
    assert store.find(key, other) is None
    assert store.find(pb.ShardKey(job="gpt", step=3, rank=1, shard=1), kind) is None
    assert (held.key, held.kind) == (key, kind)
    assert read(store, held) == data
    assert held.verified_at_ms > 1_600_000_000_000
    path = store.directory / "manifests" / "gpt" / f"3-1-2-{'copy' if kind == COPY else 'owner'}.replica"
    assert decode(path.read_bytes()).manifest == held.manifest


def test_everything_on_disk_is_for_this_user_alone(store):
    put(store, b"x")
    stage(store, b"x")
    for path in [store.directory, *store.directory.rglob("*")]:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


def test_the_callers_manifest_is_not_kept(store):
    manifest = manifest_of(b"x", kind=OWNER)
    segment = store.allocate(1, OWN)
    segment.view[0] = ord("x")
    held = store.publish(manifest, segment, 0, verified=False)
    manifest.Clear()
    assert held.key.job == "gpt"
    assert held.verified_at_ms == 0


def test_what_is_published_is_read_only(store):
    held = put(store, payload(1, 5000))
    with store.reading(held) as opened, opened.chunk(0) as view:
        assert view.readonly
    assert stage(store, b"x").view.readonly


def test_an_owners_shards_share_one_segment(store):
    data = payload(2, 12_000)
    segment = store.allocate(len(data), OWN)
    segment.view[: len(data)] = data
    shards = []
    for index, start in enumerate((0, 4000, 8000)):
        part = data[start : start + 4000]
        manifest = manifest_of(part, shard=index, kind=OWNER)
        shards.append(store.publish(manifest, segment, start, verified=True))
    store.release(segment)
    assert b"".join(shard.view for shard in shards) == data
    assert store.usage().segments == 1
    for shard in shards:
        assert store.usage().free_bytes == 0
        store.drop(shard)
    assert store.usage().free_bytes == segment.size_bytes
    assert store.free_segments(OWN) == [segment]


@pytest.mark.parametrize("make", [put, stage])
def test_a_shard_without_bytes_is_a_shard(store, make):
    held = make(store, b"")
    assert read(store, held) == b""
    assert store.verify(held)


@pytest.mark.parametrize("make", [put, stage])
def test_a_second_publication_takes_the_place_of_the_first(store, make):
    old, new = make(store, b"old"), make(store, b"new")
    assert store.held() == [new]
    assert read(store, store.find(new.key, new.kind)) == b"new"
    assert in_use(store) == PAGE
    assert len(manifest_files(store.directory)) == 1
    store.drop(old)  # late news about the one that is gone
    assert store.held() == [new]
    with pytest.raises(NotHeldError), store.reading(old):
        pass


def test_held_filters_and_sorts(store):
    for job, step, rank in [("b", 1, 0), ("a", 10, 0), ("a", 9, 1), ("a", 9, 0)]:
        put(store, b"x", step, job=job, rank=rank)

    def ids(shards):
        return [(s.key.job, s.key.step, s.key.rank) for s in shards]

    assert ids(store.held()) == [("a", 9, 0), ("a", 9, 1), ("a", 10, 0), ("b", 1, 0)]
    assert ids(store.held("a", 9)) == [("a", 9, 0), ("a", 9, 1)]
    assert ids(store.held(step=1)) == [("b", 1, 0)]
    assert ids(store.held("c")) == []
    assert ids(store.history(pb.ShardKey(job="a", step=1), COPY)) == [("a", 10, 0), ("a", 9, 0)]


def test_a_reader_keeps_the_bytes_of_a_dropped_shard_whatever_comes(tmp_path):
    store = open_store(tmp_path / "ram", budget_bytes=8 * CHUNK)
    data = payload(3, 4 * CHUNK)
    held = put(store, data)
    with store.reading(held) as opened, store.reading(held):
        store.drop(held)
        with pytest.raises(StoreError):
            store.allocate(5 * CHUNK, OWN)
        store.allocate(4 * CHUNK, OWN).view[:] = bytes(4 * CHUNK)
        for index in range(4):
            with opened.chunk(index) as view:
                assert view == data[index * CHUNK : (index + 1) * CHUNK]
        with pytest.raises(NotHeldError), store.reading(held):
            pass
        with pytest.raises(NotHeldError):
            store.check(held, 0)
    store.allocate(4 * CHUNK, OWN)
    store.close()


def test_a_mapped_segment_stays_as_it_is(store):
    """A load's trainer reads it where it lies, whatever becomes of the replica."""
    data = weights(1)
    held = stage(store, data)
    with store.mapped(held) as segment:
        newer = stage(store, trained(data, 2), 2)
        store.reverse_deltas(held).publish(newer)
        assert held.segment is None
        store.drop(held)
        assert all(store.allocate(4 * CHUNK, OWN) is not segment for _ in range(3))
        assert segment.view[: len(data)] == data
    assert segment in store.free_segments(OWN)
    for gone in (held, put(store, data)):
        with pytest.raises(NotHeldError), store.mapped(gone):
            pass


def test_verify_notes_when(tmp_path):
    clock = iter([100, 200])
    store = ReplicaStore.open(
        tmp_path / "ram", budget_bytes=1 << 20, counters=Counters(), now_ms=lambda: next(clock)
    )
    held = put(store, payload(4, 9000))
    assert held.verified_at_ms == 100
    before = manifest_files(store.directory)[0].stat().st_ino
    assert store.verify(held)
    assert store.find(held.key, COPY).verified_at_ms == 200
    assert manifest_files(store.directory)[0].stat().st_ino == before, "a check writes nothing"
    store.close()


@pytest.mark.parametrize("at", [0, 4095, 4096, 8999])
def test_a_flipped_byte_is_found_and_never_served_again(store, counters, at):
    held = stage(store, payload(5, 9000))
    held.segment.view[at] ^= 0x10
    assert store.verify(held) is False
    assert counters.get("corrupt_found") == 1
    assert store.find(held.key, OWNER) is None
    assert manifest_files(store.directory) == []
    # Memory that went bad once is not used again.
    assert files_of(store.directory) == {}
    assert store.usage().used_bytes == 0
    with pytest.raises(NotHeldError):
        store.verify(held)


def test_a_byte_beyond_the_shard_is_nobodys(store):
    held = stage(store, payload(5, 9000))
    held.segment.view[9000] ^= 1
    assert store.verify(held)


def test_one_bad_shard_leaves_its_neighbours_in_the_segment_alone(store):
    segment = store.allocate(8192, OWN)
    first, second = payload(1, 4096), payload(2, 4096)
    segment.view[:] = first + second
    bad = store.publish(manifest_of(first, shard=0, kind=OWNER), segment, 0, verified=True)
    good = store.publish(manifest_of(second, shard=1, kind=OWNER), segment, 4096, verified=True)
    store.release(segment)
    segment.view[0] ^= 1
    assert not store.verify(bad)
    assert store.verify(good)
    assert store.held("gpt")[0].view == second
    assert segment.path.exists()
    store.drop(good)
    assert not segment.path.exists()
    assert store.usage().segments == 0


def test_verify_of_many_threads_counts_a_bad_shard_once(store, counters):
    held = put(store, payload(6, 100_000))
    held.content[4].form.place.view[777] ^= 1
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


def test_some_chunks_of_a_shard_are_copied_and_checked(store):
    data = payload(1, 5 * CHUNK + 100)
    held = put(store, data)
    into = bytearray(len(data))
    store.copy_to(held, memoryview(into), [1, 5])
    assert into == bytes(CHUNK) + data[CHUNK : 2 * CHUNK] + bytes(3 * CHUNK) + data[5 * CHUNK :]
    held.content[1].form.place.view[0] ^= 1
    store.copy_to(held, memoryview(into), [0, 2])  # of the bad one nothing is wanted
    with pytest.raises(CorruptError):
        store.copy_to(held, memoryview(into), [1])
    assert store.find(held.key, held.kind) is None


def test_a_draft_does_not_publish_a_chunk_that_was_found_bad_meanwhile(store):
    data = payload(1, 4 * CHUNK)
    held = put(store, data)
    draft = store.draft(manifest_of(data, 2))
    assert draft.missing == ()
    held.content[1].form.place.view[3] ^= 1
    assert not store.verify(held)
    with pytest.raises(CorruptError):
        draft.publish()
    assert draft.missing == (1,)
    draft.place(1)[:] = data[CHUNK : 2 * CHUNK]
    draft.received(1, None)
    assert read(store, draft.publish()) == data


@pytest.mark.parametrize(
    ("key", "offset", "pool"),
    [
        ({"job": "../x"}, 0, "staging.gpt.0.1"),
        ({}, -1, "staging.gpt.0.1"),
        ({}, 4096 - 99, "staging.gpt.0.1"),
        ({"kind": COPY}, 0, "staging.gpt.0.1"),
        ({}, 0, "gathered.gpt"),
        ({}, 0, "slab"),
        ({}, 0, "staging.gpt.1.1"),
        ({}, 0, "restored.other"),
        ({"session": 2}, 0, "staging.gpt.0.1"),
    ],
)
def test_a_publication_that_does_not_hold_up_is_refused(store, key, offset, pool):
    segment = store.allocate(4096, pool)
    with pytest.raises(InvalidRequestError):
        store.publish(manifest_of(bytes(100), **{"kind": OWNER} | key), segment, offset, verified=True)
    assert store.held() == []
    assert not list((store.directory / "manifests").iterdir())
    store.release(segment)
    assert store.usage().free_bytes == 4096


def test_a_released_segment_cannot_be_published(store):
    segment = store.allocate(1, OWN)
    store.release(segment)
    with pytest.raises(StoreError, match="not in use"):
        store.publish(manifest_of(b"x", kind=OWNER), segment, 0, verified=True)
    assert manifest_files(store.directory) == []
    assert list((store.directory / "tmp").iterdir()) == []


def test_the_folder_of_a_job_is_not_reached_through_a_link(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (store.directory / "manifests" / "gpt").symlink_to(tmp_path / "elsewhere")
    for make in (put, stage):
        with pytest.raises(StoreError, match="symbolic link"):
            make(store, b"x")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert in_use(store) == 0


@pytest.mark.parametrize("make", [put, stage])
def test_a_publication_that_cannot_be_renamed_leaves_nothing(store, make):
    name = "1-0-0-copy" if make is put else "1-0-0-owner"
    (store.directory / "manifests" / "gpt" / f"{name}.replica" / "x").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot publish"):
        make(store, b"\0")
    assert store.held() == [] and in_use(store) == 0
    assert list((store.directory / "tmp").iterdir()) == []


def test_a_second_store_in_the_same_directory_is_refused(store):
    with pytest.raises(StoreError, match=f"{store.directory} is in use by another"):
        open_store(store.directory)
    store.close()
    open_store(store.directory).close()


def test_a_closed_store_takes_nothing_and_touches_nothing(store):
    held, copy = stage(store, b"x"), put(store, b"x")
    mine = store.allocate(1, OWN)
    bad = stage(store, b"y", 2)
    bad.segment.view[0] = 0
    draft = store.draft(manifest_of(b"z", 3))
    pins = contextlib.ExitStack()
    for each in (held, bad, copy):
        pins.enter_context(store.reading(each))
    assert not store.verify(bad)  # to be unlinked with the pin
    store.release(store.allocate(1, "staging.a.0.1"))
    store.close()
    store.close()
    before = files_of(store.directory)
    slab = copy.content[0].form.place.file.name
    assert set(before) == {held.segment.name, bad.segment.name, mine.name, slab}
    store.release(mine)
    pins.close()
    draft.abandon()
    assert files_of(store.directory) == before
    for call in (
        lambda: store.allocate(1, OWN),
        lambda: put(store, b"y"),
        lambda: store.drop(held),
        lambda: store.verify(held),
        lambda: store.publish(manifest_of(b"x", kind=OWNER), mine, 0, verified=True),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()
    assert store.held() == []
    assert manifest_files(store.directory)


def test_readers_and_writers_at_once_see_whole_shards_only(store):
    errors: list[BaseException] = []
    stop = threading.Event()
    versions = [weights(1, 3 * CHUNK)]
    for seed in range(3):
        versions.append(trained(versions[-1], seed, {0, seed}))

    def write():
        try:
            base = None
            for step in range(60):
                base = put(store, versions[step % 4], step, base=base)
                if step >= 3:  # the oldest, or one that it leads through
                    store.drop(store.held()[step % 2])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        finally:
            stop.set()

    def reads():
        try:
            while not stop.is_set():
                for held in store.held():
                    with contextlib.suppress(NotHeldError):
                        assert read(store, held) == versions[held.key.step % 4]
                        assert store.verify(held)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=write), *(threading.Thread(target=reads) for _ in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    for held in store.held():
        store.drop(held)
    assert in_use(store) == 0


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
