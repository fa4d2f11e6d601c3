"""A new process finds what the old one held, and nothing that does not hold up."""

import os
from pathlib import Path

import pytest
from store_helpers import (
    CHUNK,
    COPY,
    OWNER,
    files_of,
    flip,
    in_use,
    manifest_files,
    manifest_of,
    open_store,
    payload,
    put,
    read,
    stage,
    thin,
    trained,
    weights,
)

from fastcheckd.counters import Counters
from fastcheckd.errors import OverBudgetError, StoreError
from fastcheckd.store import adoption
from fastcheckd.store.manifests import decode, encode
from fastcheckd.store.segments import staging_pool

#: Own steps, each in a segment.
DATA = [payload(seed, 5000 + seed) for seed in range(3)]


@pytest.fixture
def ram(tmp_path) -> Path:
    """A directory that a process left with its own steps 0, 1 and 2."""
    store = open_store(tmp_path / "ram")
    for step, data in enumerate(DATA):
        stage(store, data, step)
    store.close()
    return tmp_path / "ram"


def manifest_path(ram: Path, step: int) -> Path:
    return ram / "manifests" / "gpt" / f"{step}-0-0-owner.replica"


def segment_path(ram: Path, step: int) -> Path:
    return ram / "segments" / decode(manifest_path(ram, step).read_bytes()).files[0]


def rewrite(ram: Path, step: int, change) -> None:
    """Change a manifest and sign it again, as a defect of ours would."""
    stored = decode(manifest_path(ram, step).read_bytes())
    change(stored)
    manifest_path(ram, step).write_bytes(encode(stored))


def assert_left(ram: Path, steps: list[int], dropped: int) -> None:
    """Opened again, exactly these steps are there, whole, and the directory holds nothing else."""
    counters = Counters()
    store = open_store(ram, counters=counters)
    assert [s.key.step for s in store.held()] == steps
    for held in store.held():
        assert read(store, held) == DATA[held.key.step]
        assert held.verified_at_ms == 0
        assert store.verify(held)
    assert counters.get("manifests_adopted") == len(steps)
    assert counters.get("manifests_dropped") == dropped
    assert manifest_files(ram) == [manifest_path(ram, step) for step in steps]
    assert files_of(ram) == {s.segment.name: s.segment.size_bytes for s in store.held()}
    assert store.usage().used_bytes == sum(files_of(ram).values())
    assert list((ram / "tmp").iterdir()) == []
    store.close()


def test_a_restart_loses_nothing(ram):
    assert_left(ram, [0, 1, 2], 0)
    assert_left(ram, [0, 1, 2], 0)


def test_pools_are_known_again(tmp_path):
    store = open_store(tmp_path / "ram")
    put(store, b"copy")
    stage(store, b"staged", rank=3)
    store.close()
    store = open_store(tmp_path / "ram")
    copy, owner = store.held()
    assert owner.segment.pool == staging_pool("gpt", 3, 1)
    slab, segment = copy.content[0].form.place.file, owner.segment
    for held in (copy, owner):
        store.drop(held)
    assert store.allocate(1, staging_pool("gpt", 3, 1)) is segment
    assert put(store, b"other").content[0].form.place.file is slab
    store.close()


def test_shards_that_shared_a_segment_share_it_again(tmp_path):
    store = open_store(tmp_path / "ram")
    segment = store.allocate(8192, staging_pool("gpt", 0, 1))
    segment.view[:] = payload(1, 8192)
    for shard in (0, 1):
        part = bytes(segment.view[shard * 4096 :][:4096])
        store.publish(manifest_of(part, shard=shard, kind=OWNER), segment, shard * 4096, verified=True)
    store.close()
    store = open_store(tmp_path / "ram")
    first, second = store.held()
    assert first.segment is second.segment
    assert store.usage().segments == 1
    store.drop(first)
    assert store.usage().free_bytes == 0
    store.drop(second)
    assert store.usage().free_bytes == 8192
    store.close()


def test_older_steps_are_led_to_as_before_and_go_as_before(tmp_path):
    steps = [weights(1)]
    for step in range(2, 5):
        steps.append(trained(steps[-1], step, {0, step % 4}))
    store = open_store(tmp_path / "ram")
    for kind in (COPY, OWNER):
        before = None
        for step, data in enumerate(steps, 1):
            if kind == COPY:
                before = put(store, data, step, base=before)
                continue
            older, before = before, stage(store, data, step)
            if older is not None:
                thin(store, older, before)
    used = in_use(store)
    store.close()
    store = open_store(tmp_path / "ram")
    assert in_use(store) == used
    for held in store.held():
        assert read(store, held) == steps[held.key.step - 1]
    assert put(store, steps[2], 5).key.step == 5  # of chunks that are here in any form
    for held in store.held():
        store.drop(held)
    assert in_use(store) == 0
    store.close()


def test_chunks_that_an_earlier_process_left_are_checked_before_a_copy_counts_on_them(tmp_path):
    data = weights(1)
    store = open_store(tmp_path / "ram")
    held = put(store, data)
    held.content[1].form.place.view[9] ^= 1
    store.close()
    counters = Counters()
    store = open_store(tmp_path / "ram", counters=counters)
    draft = store.draft(manifest_of(data, 2))
    assert draft.missing == (1,)
    assert counters.get("corrupt_found") == 1 and store.held() == []
    draft.abandon()
    assert in_use(store) == CHUNK  # what is bad is not used again
    store.close()


def test_leftovers_are_removed(ram):
    (ram / "tmp" / "abc.replica").write_bytes(b"half")
    (ram / "tmp" / "folder").mkdir()
    (ram / "segments" / f"{'0' * 32}.seg").write_bytes(bytes(4096))
    (ram / "segments" / "notes.txt").touch()
    (ram / "manifests" / "old-job").mkdir()
    assert_left(ram, [0, 1, 2], 0)
    assert [p.name for p in (ram / "manifests").iterdir()] == ["gpt"]


#: What may be wrong with step 1's manifest or segment.
DAMAGE = {
    "the first byte of a manifest": lambda ram: flip(manifest_path(ram, 1), 0),
    "a byte of a manifest": lambda ram: flip(manifest_path(ram, 1), 40),
    "the last byte of a manifest": lambda ram: flip(manifest_path(ram, 1), -1),
    "an empty manifest": lambda ram: os.truncate(manifest_path(ram, 1), 0),
    "half a manifest": lambda ram: os.truncate(manifest_path(ram, 1), 60),
    "another name": lambda ram: manifest_path(ram, 1).rename(manifest_path(ram, 7)),
    "no segment": lambda ram: segment_path(ram, 1).unlink(),
    "an empty segment": lambda ram: os.truncate(segment_path(ram, 1), 0),
    "a segment a byte too short": lambda ram: os.truncate(segment_path(ram, 1), 8191),
    "a shard beyond its segment": lambda ram: rewrite(
        ram, 1, lambda stored: stored.places.offsets.__setitem__(0, 8192 - 5000)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_does_not_hold_up_is_dropped_and_the_rest_stays(ram, damage):
    damage(ram)
    assert_left(ram, [0, 2], 1)


def test_a_manifest_that_is_too_long(ram, monkeypatch):
    sizes = sorted(p.stat().st_size for p in manifest_files(ram))
    monkeypatch.setattr(adoption, "MANIFEST_BYTES_MAX", sizes[-1])
    with manifest_path(ram, 1).open("ab") as file:
        file.write(bytes(sizes[-1]))
    assert_left(ram, [0, 2], 1)


def test_a_copy_of_a_manifest_under_a_wrong_name_takes_nothing_with_it(ram):
    manifest_path(ram, 7).write_bytes(manifest_path(ram, 1).read_bytes())
    assert_left(ram, [0, 1, 2], 1)


def test_a_manifest_in_the_folder_of_another_job(ram):
    (ram / "manifests" / "other").mkdir()
    manifest_path(ram, 1).rename(ram / "manifests" / "other" / "1-0-0-owner.replica")
    assert_left(ram, [0, 2], 1)
    assert not (ram / "manifests" / "other").exists()


def test_a_manifest_that_is_a_link_or_a_folder_or_a_pipe(ram, tmp_path):
    good = tmp_path / "outside.replica"
    manifest_path(ram, 1).rename(good)
    manifest_path(ram, 1).symlink_to(good)
    (ram / "manifests" / "gpt" / "8-0-0-owner.replica").mkdir()
    os.mkfifo(ram / "manifests" / "gpt" / "9-0-0-owner.replica")
    assert_left(ram, [0, 2], 3)
    assert good.exists()


def test_a_job_that_is_a_link_or_a_file(ram, tmp_path):
    (ram / "manifests" / "gpt").rename(tmp_path / "outside")
    (ram / "manifests" / "gpt").symlink_to(tmp_path / "outside")
    (ram / "manifests" / "file").touch()
    assert_left(ram, [], 2)
    assert len(list((tmp_path / "outside").iterdir())) == 3


def test_a_segment_that_is_a_link(ram, tmp_path):
    segment = segment_path(ram, 1)
    segment.rename(tmp_path / "outside.seg")
    segment.symlink_to(tmp_path / "outside.seg")
    assert_left(ram, [0, 2], 1)
    assert (tmp_path / "outside.seg").exists()


def test_a_slot_that_does_not_begin_with_a_page(tmp_path):
    store = open_store(tmp_path / "ram")
    for rank in range(2):
        put(store, weights(rank), rank=rank)
    store.close()
    path = manifest_files(tmp_path / "ram")[0]
    stored = decode(path.read_bytes())
    stored.places.offsets[0] += 8
    path.write_bytes(encode(stored))
    store = open_store(tmp_path / "ram")
    assert [held.key.rank for held in store.held()] == [1]
    store.close()


def test_holes_in_a_segment_are_filled_before_it_is_mapped(ram):
    segment = segment_path(ram, 1)
    with segment.open("r+b") as file:
        file.truncate(0)
        file.truncate(8192)
    assert segment.stat().st_blocks == 0
    store = open_store(ram)
    assert segment.stat().st_blocks * 512 >= 8192
    held = store.held(step=1)[0]
    assert not store.verify(held)
    store.close()


def test_flipped_bytes_are_adopted_and_found_by_verify(ram):
    flip(segment_path(ram, 1), 100)
    counters = Counters()
    store = open_store(ram, counters=counters)
    assert [store.verify(held) for held in store.held()] == [True, False, True]
    assert counters.get("corrupt_found") == 1
    store.close()
    assert_left(ram, [0, 2], 0)


def test_a_segment_of_two_sessions_is_not_recycled(ram):
    """As a defect might write it."""
    stored = decode(manifest_path(ram, 0).read_bytes())
    stored.manifest.session, stored.manifest.key.step = 2, 9
    manifest_path(ram, 9).write_bytes(encode(stored))
    store = open_store(ram)
    one, other = store.held(step=0)[0], store.held(step=9)[0]
    segment = one.segment
    assert segment is other.segment
    for held in store.held():
        store.drop(held)
    assert not segment.path.exists()
    store.close()


def test_a_budget_that_shrank_keeps_what_is_held_and_takes_nothing_new(ram):
    store = open_store(ram, 8192)
    assert len(store.held()) == 3
    assert store.usage().used_bytes == 3 * 8192
    with pytest.raises(OverBudgetError):
        store.allocate(1, "gathered")
    store.drop(store.held()[0])
    assert (store.usage().used_bytes, store.usage().free_bytes) == (2 * 8192, 0)
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_manifest_stops_the_start_and_stays(ram):
    manifest_path(ram, 1).chmod(0)
    with pytest.raises(StoreError, match="cannot open"):
        open_store(ram)
    assert manifest_path(ram, 1).exists()


def test_a_failed_start_gives_the_lock_back(ram, tmp_path):
    (ram / "tmp").rmdir()
    (ram / "tmp").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="symbolic link"):
        open_store(ram)
    (ram / "tmp").unlink()
    assert_left(ram, [0, 1, 2], 0)
