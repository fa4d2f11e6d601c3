"""A process killed at any point of a patch, of taking it back, or of a drop: the next one has whole steps only."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_helpers import (
    CHUNK_BYTES,
    COPY,
    changed,
    flip,
    manifest_files,
    newer_manifest,
    open_store,
    payload,
    put,
    put_patch,
    refuse_nothing,
    replace_chunks,
    segment_files,
    way_back,
    way_files,
)

from fastcheckd.store import recovery
from fastcheckd.store.segments import SLOT_POOL

SIZE = 5 * CHUNK_BYTES - 100
S1 = payload(1, SIZE)
S2 = changed(S1, 2)
S3 = payload(3, SIZE)
STEPS = {1: S1, 2: S2, 3: S3}
BUDGET = 4 << 20


@pytest.fixture
def store(tmp_path):
    store, _ = open_store(tmp_path / "ram", BUDGET)
    yield store
    store.close()


def killed(store) -> Path:
    """The directory as it would be if the process were killed now."""
    left = store.directory.parent / "left"
    shutil.copytree(store.directory, left)
    return left


def assert_left(ram: Path, steps: list[int], dropped: int = 0) -> None:
    """The next process has exactly these steps, each with its bytes, and the directory holds nothing else."""
    store, counters = open_store(ram, BUDGET)
    held = store.held()
    assert [s.key.step for s in held] == steps
    assert counters.get("manifests_dropped") == dropped
    assert len(manifest_files(ram)) == len(steps)
    assert set(way_files(ram)) == {s.way_back.file.name for s in held if not s.is_full}
    assert set(segment_files(ram)) == {s.segment.name for s in held}
    assert list((ram / "tmp").iterdir()) == []
    usage = store.usage()
    assert usage.used_bytes == sum(segment_files(ram).values()) + sum(
        -(-size // 4096) * 4096 for size in way_files(ram).values()
    )
    for shard in held:
        assert store.verify(shard)
    for shard in held:
        with store.reading(shard) as full:
            assert full.view == STEPS[shard.key.step]
    store.close()
    again, _ = open_store(ram, BUDGET)
    assert [s.key.step for s in again.held()] == steps
    again.close()


def begin(store, depth: int = 1):
    """A chain of `depth` steps and the next one's patch, still untouched."""
    held = put(store, S1, step=1)
    for step in range(2, depth + 1):
        held = put_patch(store, held, STEPS[step], step)
    return store.begin_patch(held, depth + 1, on_wanted=refuse_nothing)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("replaced", [0, 1, 4, 5])
def test_killed_with_some_chunks_replaced(store, depth, replaced):
    patch = begin(store, depth)
    replace_chunks(patch, STEPS[depth + 1], range(replaced), depth + 1)
    assert_left(killed(store), list(range(1, depth + 1)))


@pytest.mark.parametrize("depth", [1, 2])
def test_killed_after_publish(store, depth):
    patch = begin(store, depth)
    step = depth + 1
    replace_chunks(patch, STEPS[step], range(5), step)
    patch.publish(newer_manifest(patch.base, STEPS[step], step))
    assert_left(killed(store), list(range(1, step + 1)))


def tear(store, patch, index: int, *, copied: float, backwards: bool = False, name_it: bool = True):
    """Do what `replace` (or `backwards` the undo) does to a chunk, but stop while it copies; the slot stays."""
    start, stop = patch.chunks.range(index)
    step = patch.base.key.step
    new, old = STEPS[step + 1][start:stop], bytes(patch.old(index))
    slot = store.allocate(patch.chunks.longest, SLOT_POOL)
    slot.view[: stop - start] = old if backwards else new
    if name_it:
        patch._way.append(store._pools, index, way_back(old, new, step, step + 1), stop - start)
    cut = start + int((stop - start) * copied)
    into, out_of = (old, new) if backwards else (new, old)
    patch._bytes[start:cut] = into[: cut - start]
    patch._bytes[cut:stop] = out_of[cut - start :]
    return slot


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("copied", [0, 0.01, 0.5, 0.999, 1])
def test_killed_while_chunks_were_copied(store, depth, copied, backwards):
    patch = begin(store, depth)
    replace_chunks(patch, STEPS[depth + 1], range(1), depth + 1)
    for index in (1, 3, 4):
        tear(store, patch, index, copied=copied, backwards=backwards)
    assert_left(killed(store), list(range(1, depth + 1)))


def test_killed_before_the_table_names_the_record(store):
    patch = begin(store, 1)
    record = way_back(S1[:CHUNK_BYTES], S2[:CHUNK_BYTES], 1, 2)
    with (store.directory / "ways" / patch._way.name).open("ab") as file:
        file.write(record[:100])
    assert_left(killed(store), [1])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_torn_chunk_without_its_slot_takes_the_chain_along(store, depth):
    patch = begin(store, depth)
    slot = tear(store, patch, 2, copied=0.5)
    slot.view[:] = bytes(slot.size_bytes)
    assert_left(killed(store), [], dropped=depth)


def test_a_changed_chunk_without_a_record_is_not_believed(store):
    patch = begin(store, 2)
    tear(store, patch, 2, copied=1, name_it=False)
    assert_left(killed(store), [], dropped=2)


def test_nothing_is_written_before_every_chunk_is_understood(store):
    patch = begin(store, 1)
    replace_chunks(patch, S2, [0], 2)
    tear(store, patch, 2, copied=0.5).view[:] = bytes(CHUNK_BYTES)
    left = killed(store)
    with (left / "segments" / patch.base.segment.name).open("rb") as segment:
        before = segment.read()
        assert_left(left, [], dropped=1)
        segment.seek(0)
        assert segment.read() == before


def test_a_process_killed_while_it_recovers(store, monkeypatch):
    patch = begin(store, 2)
    replace_chunks(patch, S3, range(3), 3)
    tear(store, patch, 4, copied=0.3)
    left = killed(store)
    with monkeypatch.context() as patched:
        put_back, calls = recovery.Undo.put_back, []

        def killed_at_the_second(self, index, slot):
            if calls:
                raise KeyboardInterrupt
            calls.append(index)
            put_back(self, index, slot)

        patched.setattr(recovery.Undo, "put_back", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            open_store(left, BUDGET)
    assert_left(left, [1, 2])


def three_steps(store) -> dict:
    patch = begin(store, 2)
    replace_chunks(patch, STEPS[3], range(5), 3)
    patch.publish(newer_manifest(patch.base, STEPS[3], 3))
    return {s.key.step: s for s in store.held()}


def manifest(ram: Path, step: int) -> Path:
    return ram / "manifests" / "gpt" / f"{step}-0-0-copy.shard"


def test_killed_while_the_newest_was_dropped(store):
    """Its manifest is gone and its bytes are here: those of the next older step come back."""
    three_steps(store)
    left = killed(store)
    manifest(left, 3).unlink()
    assert_left(left, [1, 2])


def test_a_newest_whose_manifest_is_damaged(store):
    three_steps(store)
    left = killed(store)
    flip(manifest(left, 3), 50)
    assert_left(left, [1, 2], dropped=1)


def test_a_middle_step_that_is_gone_takes_the_older_along_and_not_the_newest(store):
    three_steps(store)
    left = killed(store)
    manifest(left, 2).unlink()
    assert_left(left, [3], dropped=1)


def test_bytes_of_the_newest_are_not_turned_back_to_a_step_that_needs_another(store, monkeypatch):
    """Steps 2 and 3 are the same: every chunk of step 3 looks like one that step 1's way back starts from."""
    monkeypatch.setitem(STEPS, 3, S2)
    three_steps(store)
    left = killed(store)
    manifest(left, 2).unlink()
    assert_left(left, [3], dropped=1)


def test_the_two_newest_are_gone(store):
    """Step 1 starts from bytes that are not here any more: it is dropped, not guessed."""
    three_steps(store)
    left = killed(store)
    manifest(left, 2).unlink()
    manifest(left, 3).unlink()
    assert_left(left, [], dropped=1)


def test_two_roots_in_one_segment(store):
    shards = three_steps(store)
    store.full(shards[2])
    left = killed(store)
    # Step 1's manifest still names the segment of step 3.
    manifest(left, 2).unlink()
    assert_left(left, [3], dropped=1)


@pytest.mark.parametrize("damage", ["gone", "head", "short", "link", "chunks"])
def test_a_way_back_file_that_does_not_hold_up(store, damage):
    shards = three_steps(store)
    left = killed(store)
    way = left / "ways" / shards[2].way_back.file.name
    if damage == "gone":
        way.unlink()
    elif damage == "head":
        flip(way, 9)
    elif damage == "short":
        os.truncate(way, 40)
    elif damage == "link":
        way.rename(left.parent / "outside.way")
        way.symlink_to(left.parent / "outside.way")
    else:
        data = put(store, payload(9, 100), shard=1, step=1)
        put_patch(store, data, payload(10, 100), 2)
        other = store.held()[1].way_back.file
        shutil.copyfile(other.path, way)
    assert_left(left, [3], dropped=2)


def test_strange_things_among_the_ways_are_removed(store):
    three_steps(store)
    left = killed(store)
    (left / "ways" / "notes.txt").write_text("x")
    (left / "ways" / "folder").mkdir()
    (left / "ways" / f"{'0' * 32}.way").write_bytes(bytes(100))
    assert_left(left, [1, 2, 3])


SCRIPT = """
import sys, threading
from pathlib import Path
from store_helpers import *
from fastcheckd.errors import NotHeldError
from fastcheckd.digests import chunk_digest

store, _ = open_store(Path(sys.argv[1]), 64 << 20)
size = 64 * CHUNK_BYTES
held = store.held()
step = held[-1].key.step if held else 1
head = held[-1] if held else put(store, payload(1, size), step=1)
head = store.full(head)
print("ready", flush=True)
while True:
    old = bytes(head.view)
    new = changed(old, step)
    step += 1
    patch = store.begin_patch(head, step, on_wanted=refuse_nothing)
    threads = [
        threading.Thread(target=replace_chunks, args=(patch, new, range(n, 64, 3), step)) for n in range(3)
    ]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if step % 5 == 0:
        patch.abort()
    else:
        head = patch.publish(newer_manifest(head, new, step))
    held = store.held()
    if step % 7 == 0 and len(held) > 1:
        store.drop(head)
        head = store.held()[-1]
    while len(held) > 3:
        store.drop(held.pop(0))
"""


def test_kill_minus_nine_at_any_moment(tmp_path):
    ram = tmp_path / "ram"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(ram)], env=environment, stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.037 * life)  # any moment will do
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        process.stdout.close()
        store, counters = open_store(ram, 64 << 20)
        held = store.held()
        assert held
        assert counters.get("manifests_dropped") == 0
        for shard in held:
            assert store.verify(shard)
        assert store.find(held[-1].key, COPY).is_full
        store.close()
