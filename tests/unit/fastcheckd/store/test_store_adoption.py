"""A new process finds what the old one held, and nothing that does not hold up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import (
    COPY,
    OWNER,
    flip,
    make_manifest,
    manifest_files,
    open_store,
    payload,
    put,
    segment_files,
)

from fastcheckd.counters import Counters
from fastcheckd.errors import OverBudgetError, StoreError
from fastcheckd.store import adoption
from fastcheckd.store.manifests import decode, encode
from fastcheckd.store.segments import COPY_POOL, staging_pool

DATA = [payload(seed, 5000 + seed) for seed in range(3)]


@pytest.fixture
def ram(tmp_path) -> Path:
    """A directory that a process left with copies of steps 0, 1 and 2."""
    store, _ = open_store(tmp_path / "ram")
    for step, data in enumerate(DATA):
        put(store, data, step=step)
    store.close()
    return tmp_path / "ram"


def manifest_path(ram: Path, step: int) -> Path:
    return ram / "manifests" / "gpt" / f"{step}-0-0-copy.shard"


def segment_path(ram: Path, step: int) -> Path:
    return ram / "segments" / decode(manifest_path(ram, step).read_bytes()).segment


def rewrite(ram: Path, step: int, change) -> None:
    """Change a manifest and sign it again, as a defect of ours would."""
    stored = decode(manifest_path(ram, step).read_bytes())
    change(stored)
    manifest_path(ram, step).write_bytes(encode(stored))


def assert_left(ram: Path, steps: list[int], dropped: int) -> None:
    """Opened again, exactly these steps are there, whole, and the directory holds nothing else."""
    store, counters = open_store(ram)
    assert [s.key.step for s in store.held()] == steps
    for held in store.held():
        assert held.view == DATA[held.key.step]
        assert held.verified_at_ms == 0
        assert store.verify(held)
    assert counters.get("manifests_adopted") == len(steps)
    assert counters.get("manifests_dropped") == dropped
    assert manifest_files(ram) == [manifest_path(ram, step) for step in steps]
    assert segment_files(ram) == {s.segment.name: s.segment.size_bytes for s in store.held()}
    assert store.usage().used_bytes == sum(segment_files(ram).values())
    assert list((ram / "tmp").iterdir()) == []
    store.close()


def test_a_restart_loses_nothing(ram):
    assert_left(ram, [0, 1, 2], 0)
    assert_left(ram, [0, 1, 2], 0)


def test_pools_are_known_again(tmp_path):
    store, _ = open_store(tmp_path / "ram")
    put(store, b"copy", kind=COPY)
    put(store, b"staged", kind=OWNER, rank=3)
    store.close()
    store, _ = open_store(tmp_path / "ram")
    owner, copy = store.held(step=1)[1], store.held(step=1)[0]
    assert (copy.segment.pool, owner.segment.pool) == (COPY_POOL, staging_pool("gpt", 3, 1))
    store.drop(copy)
    store.drop(owner)
    assert store.allocate(1, COPY_POOL) is copy.segment
    assert store.allocate(1, staging_pool("gpt", 3, 1)) is owner.segment
    store.close()


def test_shards_that_shared_a_segment_share_it_again(tmp_path):
    store, _ = open_store(tmp_path / "ram")
    segment = store.allocate(8192, staging_pool("gpt", 0, 1))
    segment.view[:] = payload(1, 8192)
    for shard in (0, 1):
        part = bytes(segment.view[shard * 4096 :][:4096])
        store.publish(make_manifest(part, shard=shard, kind=OWNER), segment, shard * 4096, verified=True)
    store.close()
    store, _ = open_store(tmp_path / "ram")
    first, second = store.held()
    assert first.segment is second.segment
    assert store.usage().segments == 1
    store.drop(first)
    assert store.usage().free_bytes == 0
    store.drop(second)
    assert store.usage().free_bytes == 8192
    store.close()


def test_a_process_killed_with_work_under_way_leaves_what_it_published(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from store_helpers import open_store, payload, put
store, _ = open_store(Path(sys.argv[1]))
put(store, payload(0, 5000), step=0)
put(store, payload(1, 5001), step=1)
store.allocate(100_000, "staging.gpt.0.1").view[:5] = b"half "
(store.directory / "tmp" / "half.shard").write_bytes(b"half a manifest")
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ram")], env=environment, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert len(segment_files(tmp_path / "ram")) == 3
    assert_left(tmp_path / "ram", [0, 1], 0)


def test_leftovers_are_removed(ram):
    (ram / "tmp" / "abc.shard").write_bytes(b"half")
    (ram / "tmp" / "folder").mkdir()
    (ram / "segments" / f"{'0' * 32}.seg").write_bytes(bytes(4096))
    (ram / "segments" / "notes.txt").touch()
    (ram / "manifests" / "old-job").mkdir()
    assert_left(ram, [0, 1, 2], 0)
    assert [p.name for p in (ram / "manifests").iterdir()] == ["gpt"]


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_flipped_byte_in_a_manifest(ram, at):
    flip(manifest_path(ram, 1), at)
    assert_left(ram, [0, 2], 1)


@pytest.mark.parametrize("keep", [0, 10, 60])
def test_half_a_manifest(ram, keep):
    os.truncate(manifest_path(ram, 1), keep)
    assert_left(ram, [0, 2], 1)


def test_a_manifest_that_is_too_long(ram, monkeypatch):
    sizes = sorted(p.stat().st_size for p in manifest_files(ram))
    monkeypatch.setattr(adoption, "MANIFEST_BYTES_MAX", sizes[-1])
    with manifest_path(ram, 1).open("ab") as file:
        file.write(bytes(sizes[-1]))
    assert_left(ram, [0, 2], 1)


def test_a_manifest_under_a_wrong_name(ram):
    manifest_path(ram, 1).rename(manifest_path(ram, 7))
    assert_left(ram, [0, 2], 1)


def test_a_copy_of_a_manifest_under_a_wrong_name_takes_nothing_with_it(ram):
    manifest_path(ram, 7).write_bytes(manifest_path(ram, 1).read_bytes())
    assert_left(ram, [0, 1, 2], 1)


def test_a_manifest_in_the_folder_of_another_job(ram):
    (ram / "manifests" / "other").mkdir()
    manifest_path(ram, 1).rename(ram / "manifests" / "other" / "1-0-0-copy.shard")
    assert_left(ram, [0, 2], 1)
    assert not (ram / "manifests" / "other").exists()


def test_a_manifest_that_is_a_link_or_a_folder_or_a_pipe(ram, tmp_path):
    good = tmp_path / "outside.shard"
    manifest_path(ram, 1).rename(good)
    manifest_path(ram, 1).symlink_to(good)
    (ram / "manifests" / "gpt" / "8-0-0-copy.shard").mkdir()
    os.mkfifo(ram / "manifests" / "gpt" / "9-0-0-copy.shard")
    assert_left(ram, [0, 2], 3)
    assert good.exists()


def test_a_job_that_is_a_link_or_a_file(ram, tmp_path):
    (ram / "manifests" / "gpt").rename(tmp_path / "outside")
    (ram / "manifests" / "gpt").symlink_to(tmp_path / "outside")
    (ram / "manifests" / "file").touch()
    assert_left(ram, [], 2)
    assert len(list((tmp_path / "outside").iterdir())) == 3


def test_a_segment_that_is_gone(ram):
    segment_path(ram, 1).unlink()
    assert_left(ram, [0, 2], 1)


@pytest.mark.parametrize("size", [0, 4096, 4097, 8191])
def test_a_truncated_segment(ram, size):
    os.truncate(segment_path(ram, 1), size)
    assert_left(ram, [0, 2], 1)


def test_a_segment_that_is_a_link(ram, tmp_path):
    segment = segment_path(ram, 1)
    segment.rename(tmp_path / "outside.seg")
    segment.symlink_to(tmp_path / "outside.seg")
    assert_left(ram, [0, 2], 1)
    assert (tmp_path / "outside.seg").exists()


def test_a_shard_beyond_its_segment(ram):
    rewrite(ram, 1, lambda stored: setattr(stored, "segment_offset", 8192 - 5000))
    assert_left(ram, [0, 2], 1)


def test_holes_in_a_segment_are_filled_before_it_is_mapped(ram):
    segment = segment_path(ram, 1)
    with segment.open("r+b") as file:
        file.truncate(0)
        file.truncate(8192)
    assert segment.stat().st_blocks == 0
    store, _ = open_store(ram)
    assert segment.stat().st_blocks * 512 >= 8192
    held = store.held(step=1)[0]
    assert not store.verify(held)
    store.close()


def test_flipped_bytes_are_adopted_and_found_by_verify(ram):
    flip(segment_path(ram, 1), 100)
    store, counters = open_store(ram)
    assert [store.verify(held) for held in store.held()] == [True, False, True]
    assert counters.get("corrupt_found") == 1
    store.close()
    assert_left(ram, [0, 2], 0)


def test_a_segment_with_tenants_that_never_share_is_not_recycled(ram):
    name = segment_path(ram, 0).name
    rewrite(ram, 0, lambda stored: setattr(stored.manifest, "kind", OWNER))
    manifest_path(ram, 0).rename(ram / "manifests" / "gpt" / "0-0-0-owner.shard")
    rewrite(ram, 1, lambda stored: setattr(stored, "segment", name))
    store, _ = open_store(ram)
    owner = store.held(step=0)[0]
    assert owner.segment is store.held(step=1)[0].segment
    for held in store.held():
        store.drop(held)
    assert not owner.segment.path.exists()
    store.close()


def test_a_budget_that_shrank_keeps_what_is_held_and_takes_nothing_new(ram):
    store, _ = open_store(ram, budget_bytes=8192)
    assert len(store.held()) == 3
    assert store.usage().used_bytes == 3 * 8192
    with pytest.raises(OverBudgetError):
        store.allocate(1, COPY_POOL)
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


def test_the_counters_are_those_of_the_caller(ram):
    flip(manifest_path(ram, 0), 3)
    _, counters = open_store(ram)
    assert isinstance(counters, Counters)
    assert counters.snapshot()["manifests_dropped"] == 1
