"""A newer step in the place of an older one: put, taken back, read, dropped."""

import contextlib
import threading
import time

import pytest
from store_helpers import (
    CHUNK_BYTES,
    COPY,
    OWNER,
    changed,
    flip,
    make_manifest,
    manifest_files,
    newer_manifest,
    open_store,
    payload,
    put,
    put_patch,
    refuse_nothing,
    replace_chunks,
    way_back,
    way_files,
)

from fastcheckd.chunks import ChunkTable
from fastcheckd.errors import (
    CorruptError,
    InvalidRequestError,
    NotHeldError,
    OverBudgetError,
    StoreError,
)
from fastcheckd.store import books, patches
from fastcheckd.store.manifests import decode
from fastcheckd.store.segments import COPY_POOL
from fastcheckd.store.undo import Undo

SIZE = 5 * CHUNK_BYTES - 100
S1 = payload(1, SIZE)
S2 = changed(S1, 2)
S3 = changed(S2, 3, every=1)
S4 = payload(4, SIZE)  # nothing in common: ways back are raw
STEPS = {1: S1, 2: S2, 3: S3, 4: S4}


@pytest.fixture
def opened(tmp_path):
    store, counters = open_store(tmp_path / "ram", budget_bytes=4 << 20)
    yield store, counters
    store.close()


@pytest.fixture
def store(opened):
    return opened[0]


def chain(store, newest: int):
    """Steps 1 to `newest`, each patched into the one before; by step."""
    held = put(store, S1, step=1)
    for step in range(2, newest + 1):
        held = put_patch(store, held, STEPS[step], step)
    return {shard.key.step: shard for shard in store.held()}


def assert_bytes(store, shard, data: bytes) -> None:
    with store.reading(shard) as full:
        assert full.view == data


def assert_all(store, steps) -> None:
    """Exactly these steps are held, and each can be had. Verified first: that changes nothing."""
    assert [s.key.step for s in store.held()] == list(steps)
    for shard in store.held():
        assert store.verify(shard)
    for shard in store.held():
        assert_bytes(store, shard, STEPS[shard.key.step])


def test_the_newer_step_takes_the_place_and_the_older_can_be_had(opened):
    store, counters = opened
    base = put(store, S1, step=1)
    newer = put_patch(store, base, S2, 2)
    assert newer.segment is base.segment
    assert newer.view == S2
    older, now = store.held()
    assert now is newer and newer.is_full and not older.is_full
    assert older.stored_bytes == older.way_back.file.size_bytes
    assert newer.stored_bytes == SIZE
    stored = decode(manifest_files(store.directory)[0].read_bytes())
    assert (stored.way_back.from_step, stored.way_back.file) == (2, older.way_back.file.name)
    with pytest.raises(NotHeldError, match="make it full"):
        older.view  # noqa: B018
    for stale in (base, older):
        with pytest.raises(NotHeldError), store.pinned(stale):
            pass
    assert_all(store, [1, 2])
    assert way_files(store.directory)  # free, to be used again
    assert counters.get("corrupt_found") == 0
    assert not list((store.directory / "tmp").iterdir())


def test_chunks_of_various_lengths(store):
    lengths = [100, 9000, 1, SIZE - 9101]
    segment = store.allocate(SIZE, COPY_POOL)
    segment.view[:SIZE] = S1
    base = store.publish(make_manifest(S1, lengths=lengths), segment, 0, verified=True)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    assert patch.chunks == ChunkTable(lengths)
    replace_chunks(patch, S4, range(4), 2)
    newer = patch.publish(make_manifest(S4, step=2, lengths=lengths))
    store.release(segment)
    assert newer.view == S4
    assert store.verify(newer)
    assert_bytes(store, base, S1)


@pytest.mark.parametrize(("newest", "wanted"), [(n, w) for n in (2, 3, 4) for w in range(1, n + 1)])
def test_any_step_of_a_chain_is_copied_out_and_the_chain_stays(store, newest, wanted):
    shards = chain(store, newest)
    used = store.usage().used_bytes
    into = bytearray(SIZE)
    store.copy_to(shards[wanted], memoryview(into))
    assert into == STEPS[wanted]
    assert store.usage().used_bytes == used
    assert [s.is_full for s in store.held()] == [step == newest for step in range(1, newest + 1)]


@pytest.mark.parametrize(("newest", "wanted"), [(n, w) for n in (2, 3, 4) for w in range(1, n + 1)])
def test_any_step_of_a_chain_is_made_full_and_the_others_stay_right(store, newest, wanted):
    shards = chain(store, newest)
    full = store.full(shards[wanted])
    assert full.is_full and full.view == STEPS[wanted]
    assert store.full(full) is full
    assert store.find(full.key, COPY) is full
    assert_all(store, range(1, newest + 1))


def test_a_chain_survives_a_restart_also_after_a_step_moved_out_of_it(store):
    shards = chain(store, 4)
    store.full(shards[2])  # step 1 now hangs on its bytes, though its manifest names the old segment
    store.close()
    store, counters = open_store(store.directory, 4 << 20)
    assert counters.get("manifests_adopted") == 4
    held = {s.key.step: s for s in store.held()}
    assert [held[s].is_full for s in (1, 2, 3, 4)] == [False, True, False, True]
    assert held[1].segment is held[2].segment is not held[4].segment
    store.drop(held[2])  # turns the moved bytes back to step 1
    assert store.find(held[1].key, COPY).is_full
    assert_all(store, [1, 3, 4])
    store.close()


@pytest.mark.parametrize("replaced", [0, 1, 5])
def test_an_aborted_patch_leaves_the_base_as_it_was(opened, replaced):
    store, counters = opened
    base = put(store, S1, step=1)
    before = manifest_files(store.directory)[0].read_bytes()
    patch = store.begin_patch(base, 4, on_wanted=refuse_nothing)
    assert decode(manifest_files(store.directory)[0].read_bytes()).way_back.from_step == 4
    replace_chunks(patch, S4, range(replaced), 4)
    assert store.held() == [base]
    patch.abort()
    patch.abort()
    assert base.view == S1
    assert manifest_files(store.directory)[0].read_bytes() == before
    assert store.verify(base)
    assert not list((store.directory / "tmp").iterdir())
    usage = store.usage()
    assert usage.used_bytes - usage.free_bytes == base.segment.size_bytes
    for call in (
        lambda: patch.keep(4),
        lambda: replace_chunks(patch, S4, [4], 4),
        lambda: patch.publish(newer_manifest(base, S4, 4)),
    ):
        with pytest.raises(NotHeldError, match="has ended"):
            call()
    assert base.view == S1
    assert put_patch(store, store.held()[0], S2, 2).view == S2  # and it can be patched again
    assert counters.get("corrupt_found") == 0


def test_abort_after_publish_changes_nothing(store):
    base = put(store, S1, step=1)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    replace_chunks(patch, S2, range(5), 2)
    newer = patch.publish(newer_manifest(base, S2, 2))
    patch.abort()
    assert newer.view == S2
    assert_all(store, [1, 2])


def test_what_cannot_be_patched(store):
    def refused(shard, step, why):
        with pytest.raises(NotHeldError, match=why):
            store.begin_patch(shard, step, on_wanted=refuse_nothing)

    refused(put(store, S1, step=1, kind=OWNER), 2, "not a copy")
    shards = chain(store, 2)
    refused(shards[1], 3, "newer step was put")
    refused(shards[2], 2, "not newer")
    refused(shards[2], 1, "not newer")
    other = put(store, S3, step=3)
    refused(shards[2], 3, "held already")
    with store.pinned(other):
        refused(other, 4, "being read")
    patch = store.begin_patch(other, 4, on_wanted=refuse_nothing)
    refused(other, 5, "another patch")
    refused(shards[2], 4, "being put")
    patch.abort()
    store.drop(other)
    refused(other, 4, "not held")


def test_a_patch_that_is_not_complete_or_not_what_it_says_is_not_published(store):
    base = put(store, S1, step=1)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    replace_chunks(patch, S2, range(4), 2)
    good = newer_manifest(base, S2, 2)
    with pytest.raises(InvalidRequestError, match="missing"):
        patch.publish(good)
    patch.keep(4)
    with pytest.raises(InvalidRequestError, match="was kept"):
        patch.publish(good)
    with pytest.raises(InvalidRequestError, match="replaced already"):
        patch.keep(0)
    with pytest.raises(InvalidRequestError, match="replaced already"):
        replace_chunks(patch, S4, [0], 2)
    replace_chunks(patch, S2, [4], 2)
    for bad in (
        newer_manifest(base, S2, 3),
        make_manifest(S2, step=2, shard=1),
        make_manifest(S2, step=2, kind=OWNER),
        make_manifest(S2, step=2, chunk_bytes=SIZE),
        make_manifest(S2[:-1], step=2),
    ):
        with pytest.raises(InvalidRequestError):
            patch.publish(bad)
    assert patch.publish(good).view == S2
    assert_all(store, [1, 2])


def test_a_way_back_of_impossible_size_is_refused_before_anything_changes(store):
    base = put(store, S1, step=1)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    with patch.slot() as slot:
        for record in (b"", bytes(CHUNK_BYTES + 2000)):
            with pytest.raises(InvalidRequestError, match="way back"):
                patch.replace(0, slot, record)
    assert patch.old(0) == S1[:CHUNK_BYTES]
    replace_chunks(patch, S2, range(5), 2)
    patch.publish(newer_manifest(base, S2, 2))
    assert_all(store, [1, 2])


def test_a_reader_ends_a_patch(store):
    base = put(store, S1, step=1)
    wanted = []

    def give_way():
        wanted.append(1)
        patch.abort()

    patch = store.begin_patch(base, 4, on_wanted=give_way)
    replace_chunks(patch, S4, range(3), 4)
    with store.pinned(base):
        assert base.view == S1
    assert wanted == [1]
    assert store.full(base) is base


def test_a_reader_that_comes_while_a_patch_is_prepared_is_not_kept_waiting(store, monkeypatch):
    base = put(store, S1, step=1)
    prepare, readers, seen = patches.Patch.prepare, [], []

    def read():
        with store.pinned(base):
            seen.append(bytes(base.view))

    def prepare_with_a_reader(patch):
        prepare(patch)
        readers.append(threading.Thread(target=read))
        readers[0].start()
        give_up_s = time.monotonic() + 60
        while not patch.wanted and time.monotonic() < give_up_s:
            time.sleep(0.001)

    monkeypatch.setattr(patches.Patch, "prepare", prepare_with_a_reader)
    called = []
    with pytest.raises(NotHeldError, match="being read"):
        store.begin_patch(base, 2, on_wanted=lambda: called.append(1))
    readers[0].join(10)
    assert seen == [S1]
    assert not called


@pytest.mark.parametrize("read", ["pinned", "full", "verify", "drop", "older"])
def test_readers_wait_until_the_patch_has_ended(store, read):
    oldest = put(store, S1, step=1)
    base = put_patch(store, oldest, S2, 2)
    asked = threading.Semaphore(0)
    patch = store.begin_patch(base, 4, on_wanted=asked.release)
    replace_chunks(patch, S4, range(5), 4)
    seen = []

    def reader():
        if read == "pinned":
            with store.pinned(base):
                seen.append(bytes(base.view) == S2)
        elif read == "full":
            seen.append(store.full(base).view == S2)
        elif read == "verify":
            seen.append(store.verify(base))
        elif read == "older":
            seen.append(store.full(oldest).view == S1)
        else:
            store.drop(base)
            seen.append(store.find(base.key, COPY) is None)

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert asked.acquire(timeout=60)
    assert not seen
    patch.abort()
    for thread in threads:
        thread.join(10)
    assert seen == [True] * 3
    assert not asked.acquire(blocking=False)  # asked once


def test_a_reader_that_waited_for_a_patch_that_was_published_still_gets_its_step(store):
    base = put(store, S1, step=1)
    asked = threading.Event()
    patch = store.begin_patch(base, 4, on_wanted=asked.set)
    replace_chunks(patch, S4, range(5), 4)
    seen = []

    def reader():
        with store.reading(base) as full:
            seen.append(bytes(full.view))

    thread = threading.Thread(target=reader)
    thread.start()
    assert asked.wait(10)
    patch.publish(newer_manifest(base, S4, 4))
    thread.join(10)
    assert seen == [S1]
    assert_all(store, [1, 4])


def test_a_reader_of_a_step_that_moved_along_ends_the_patch_of_its_new_place(store):
    shards = chain(store, 3)
    moved = store.full(shards[2])
    patch = store.begin_patch(moved, 5, on_wanted=lambda: patch.abort())  # noqa: PLW0108  bound only later
    replace_chunks(patch, S4, range(5), 5)
    assert_bytes(store, shards[1], S1)
    assert_all(store, [1, 2, 3])


def test_a_patch_that_does_not_end_refuses_its_readers(store, monkeypatch):
    monkeypatch.setattr(books, "CHANGE_WAIT_S", 0.05)
    base = put(store, S1, step=1)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    with pytest.raises(NotHeldError, match="being replaced"), store.pinned(base):
        pass
    replace_chunks(patch, S2, range(5), 2)
    patch.publish(newer_manifest(base, S2, 2))
    assert_all(store, [1, 2])


def test_the_oldest_may_go_while_the_newest_is_patched(store):
    shards = chain(store, 2)
    asked = threading.Event()
    patch = store.begin_patch(shards[2], 3, on_wanted=asked.set)
    store.drop(shards[1])
    replace_chunks(patch, S3, range(5), 3)
    patch.publish(newer_manifest(shards[2], S3, 3))
    assert not asked.is_set()
    assert_all(store, [2, 3])


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 3, 1, 4], [3, 2, 4, 1], [2, 4, 3, 1]])
def test_steps_may_be_dropped_in_any_order(opened, order):
    store, counters = opened
    shards = chain(store, 4)
    for count, step in enumerate(order, 1):
        store.drop(shards[step])
        left = sorted(order[count:])
        assert [s.key.step for s in store.held()] == left
        for shard in store.held():
            assert store.verify(shard)
            assert_step = STEPS[shard.key.step]
            if shard.is_full:
                assert shard.view == assert_step
    assert counters.get("corrupt_found") == 0
    assert manifest_files(store.directory) == []
    usage = store.usage()
    assert usage.used_bytes == usage.free_bytes


def test_a_hidden_step_is_neither_found_nor_read_and_goes_with_the_one_that_needed_it(store):
    shards = chain(store, 3)
    store.drop(shards[2])
    assert [s.key.step for s in store.held()] == [1, 3]
    assert store.find(shards[2].key, COPY) is None
    with pytest.raises(NotHeldError):
        store.full(shards[2])
    with pytest.raises(NotHeldError):
        store.begin_patch(shards[3], 2, on_wanted=refuse_nothing)
    assert len(manifest_files(store.directory)) == 3
    store.full(shards[1])  # has bytes of its own now: step 2 is not needed any more
    assert len(manifest_files(store.directory)) == 2
    assert_all(store, [1, 3])


def test_dropping_the_newest_waits_for_its_readers(store, monkeypatch):
    monkeypatch.setattr("fastcheckd.store.chains.CHANGE_WAIT_S", 0.05)
    shards = chain(store, 2)
    with store.pinned(shards[2]):
        with pytest.raises(NotHeldError, match="being read"):
            store.drop(shards[2])
        assert shards[2].view == S2
    assert_all(store, [1, 2])


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_whole_put_takes_the_place_of_any_step_of_a_chain(store, step):
    chain(store, 3)
    mine = payload(99, SIZE)
    new = put(store, mine, step=step)
    assert new.is_full and new.view == mine
    assert [s.key.step for s in store.held()] == [1, 2, 3]
    for shard in store.held():
        assert store.verify(shard)
        assert_bytes(store, shard, mine if shard.key.step == step else STEPS[shard.key.step])


def test_a_whole_put_of_the_step_that_a_patch_makes_ends_the_patch(store):
    base = put(store, S1, step=1)

    def give_way():
        patch.abort()

    patch = store.begin_patch(base, 2, on_wanted=give_way)
    replace_chunks(patch, S2, range(5), 2)
    whole = put(store, S4, step=2)
    assert whole.view == S4 and base.view == S1
    assert all(s.is_full for s in store.held())


@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_damage_of_the_newest_takes_all_that_needs_it_along(opened, at):
    store, counters = opened
    shards = chain(store, 3)
    shards[3].segment.view[at] ^= 1
    assert not store.verify(shards[3])
    assert counters.get("corrupt_found") == 3
    assert store.held() == []
    assert store.usage().used_bytes == store.usage().free_bytes


def test_damage_of_the_newest_found_through_an_older_one(opened):
    store, counters = opened
    shards = chain(store, 3)
    shards[3].segment.view[0] ^= 1
    with pytest.raises(CorruptError, match="step 3"):
        store.full(shards[1])
    assert store.held() == []
    assert counters.get("corrupt_found") == 3


@pytest.mark.parametrize("wanted", [1, 3])
def test_damage_found_by_copying(opened, wanted):
    store, counters = opened
    shards = chain(store, 3)
    shards[3].segment.view[SIZE - 1] ^= 1
    with pytest.raises(CorruptError, match="step 3"):
        store.copy_to(shards[wanted], memoryview(bytearray(SIZE)))
    assert store.held() == []
    assert counters.get("corrupt_found") == 3


def test_a_damaged_way_back_takes_only_the_older_along(opened):
    store, counters = opened
    shards = chain(store, 4)
    path = shards[2].way_back.file.path
    flip(path, path.stat().st_size - 10)
    assert store.verify(shards[4]) and store.verify(shards[3])
    assert not store.verify(shards[1])
    assert counters.get("corrupt_found") == 2
    assert not path.exists()  # memory that went bad once is not used again
    assert_all(store, [3, 4])


def test_a_patch_that_cannot_be_taken_back_drops_the_base(opened):
    store, counters = opened
    shards = chain(store, 2)
    patch = store.begin_patch(shards[2], 4, on_wanted=refuse_nothing)
    replace_chunks(patch, S4, range(5), 4)
    shards[2].segment.view[5] ^= 1
    (unfinished,) = [f for f in way_files(store.directory) if f != shards[1].way_back.file.name]
    flip(store.directory / "ways" / unfinished, 5 * CHUNK_BYTES)
    patch.abort()
    assert store.held() == []
    assert counters.get("corrupt_found") == 2
    assert manifest_files(store.directory) == []


class _DefectError(Exception):
    pass


@pytest.mark.parametrize("error", [_DefectError, StoreError])
@pytest.mark.parametrize("undoing", ["patch", "drop"])
def test_an_undo_that_fails_half_way_serves_nothing(opened, monkeypatch, undoing, error):
    store, counters = opened
    shards = chain(store, 3)
    patch = store.begin_patch(shards[3], 4, on_wanted=refuse_nothing) if undoing == "patch" else None
    if patch is not None:
        replace_chunks(patch, S4, range(5), 4)

    def fail(self, indexes, slots):
        self.put_back(next(iter(indexes)), slots[0])
        raise error("in the middle")

    monkeypatch.setattr(Undo, "put_all_back", fail)
    expected = pytest.raises(_DefectError) if error is _DefectError else contextlib.nullcontext()
    with expected:
        if patch is not None:
            patch.abort()
        else:
            store.drop(shards[3])
    assert store.held() == []
    assert manifest_files(store.directory) == []
    assert counters.get("corrupt_found") == (3 if patch is not None else 2)
    usage = store.usage()
    assert usage.used_bytes == usage.free_bytes
    assert put(store, S1, step=1).view == S1


def test_no_room_for_a_way_back_leaves_the_chunk_and_the_patch_can_be_taken_back(tmp_path):
    pages = 2000
    data, new = payload(1, 100 * CHUNK_BYTES), payload(2, 100 * CHUNK_BYTES)
    store, _ = open_store(tmp_path / "ram", (100 + 66 + 4 + 3) * 4096)
    base = put(store, data, step=1)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    with pytest.raises(OverBudgetError):
        replace_chunks(patch, new, range(100), 2)
    assert patch.old(99) == data[99 * CHUNK_BYTES :]
    assert patch.old(0) == new[:CHUNK_BYTES]
    assert store.usage().used_bytes <= store.usage().budget_bytes < pages * 4096
    patch.abort()
    assert base.view == data
    store.close()


def test_no_room_to_begin_leaves_the_base(tmp_path):
    store, _ = open_store(tmp_path / "ram", 6 * 4096)
    base = put(store, S1, step=1)
    with pytest.raises(OverBudgetError):
        store.begin_patch(base, 2, on_wanted=refuse_nothing)
    assert store.held() == [base]
    with store.pinned(base):
        assert base.view == S1
    assert not list((store.directory / "tmp").iterdir())
    usage = store.usage()
    assert usage.used_bytes - usage.free_bytes == base.segment.size_bytes
    store.close()


def test_no_room_to_make_it_full_leaves_the_chain(tmp_path):
    store, _ = open_store(tmp_path / "ram", (5 + 64 + 2 + 3) * 4096)
    base = put(store, S1, step=1)
    put_patch(store, base, S2, 2)
    hog = store.allocate(66 * 4096, COPY_POOL)
    with pytest.raises(OverBudgetError):
        store.full(base)
    store.release(hog)
    assert_all(store, [1, 2])
    store.close()


def test_many_threads_make_one_patch(store):
    data, new = payload(5, 64 * CHUNK_BYTES), payload(6, 64 * CHUNK_BYTES)
    base = put(store, data, step=1)
    patch = store.begin_patch(base, 2, on_wanted=refuse_nothing)
    errors: list[BaseException] = []

    def work(first):
        try:
            replace_chunks(patch, new, range(first, 64, 8), 2)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert patch.publish(newer_manifest(base, new, 2)).view == new
    assert_bytes(store, base, data)


def test_closing_ends_a_patch_and_the_next_process_takes_it_back(store):
    base = put(store, S1, step=1)
    patch = store.begin_patch(base, 4, on_wanted=refuse_nothing)
    replace_chunks(patch, S4, range(3), 4)
    store.close()
    next_one, counters = open_store(store.directory, 4 << 20)
    with pytest.raises(StoreError):
        replace_chunks(patch, S4, [3], 4)
    patch.abort()
    (held,) = next_one.held()
    assert held.is_full and held.view == S1 and next_one.verify(held)
    assert counters.get("manifests_dropped") == 0
    next_one.close()


def test_way_back_files_are_used_again(store):
    held = put(store, S1, step=1)
    names = set()
    for step in range(2, 12):
        older = held
        held = put_patch(store, held, changed(bytes(held.view), step), step)
        names |= set(way_files(store.directory))
        store.drop(older)
    assert len(names) == 1
    assert [s.key.step for s in store.held()] == [11]


def test_readers_patches_and_drops_at_once(store):
    """Whoever reads a step sees that step's bytes, whatever else goes on."""
    states = {1: S1}
    for step in range(2, 30):
        states[step] = changed(states[step - 1], step)
    put(store, S1, step=1)
    stop = threading.Event()
    errors: list[BaseException] = []
    reads = []

    def writer():
        try:
            head = 1
            for step in range(2, 30):
                base = store.find(make_manifest(S1, step=head).key, COPY)
                patch = None
                try:
                    patch = store.begin_patch(base, step, on_wanted=refuse_nothing)
                    replace_chunks(patch, states[step], range(5), step)
                    patch.publish(newer_manifest(base, states[step], step))
                except NotHeldError:  # somebody reads it
                    if patch is not None:
                        patch.abort()
                    put(store, states[step], step=step)
                head = step
                for shard in store.held():
                    if shard.key.step < step - 3:
                        store.drop(shard)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        finally:
            stop.set()

    def reader(number):
        try:
            while not stop.is_set():
                for shard in store.held()[number::2]:
                    try:
                        with store.reading(shard) as full:
                            assert full.view == states[shard.key.step]
                        reads.append(shard.key.step)
                    except (NotHeldError, OverBudgetError):
                        continue
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=writer)]
    threads += [threading.Thread(target=reader, args=(number,)) for number in range(2)]
    give_up_s = time.monotonic() + 90
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.1, give_up_s - time.monotonic()))
        assert not thread.is_alive()
    assert errors == []
    assert reads
    for shard in store.held():
        assert store.verify(shard)


def test_a_record_of_another_chunk_never_leads_to_wrong_bytes(store):
    """A caller that mixes ways back up loses the older step, not the truth."""
    base = put(store, S1, step=1)
    patch = store.begin_patch(base, 4, on_wanted=refuse_nothing)
    replace_chunks(patch, S4, range(1, 5), 4)
    wrong = way_back(S3[:CHUNK_BYTES], S4[:CHUNK_BYTES], 1, 4)
    with patch.slot() as slot:
        slot[:] = S4[:CHUNK_BYTES]
        patch.replace(0, slot, wrong)
    newer = patch.publish(newer_manifest(base, S4, 4))
    with pytest.raises(CorruptError):
        store.full(base)
    assert store.held() == [newer]
    assert store.verify(newer)
