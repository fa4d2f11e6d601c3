"""Whatever the order of calls: the budget holds, shards are intact, and the disk says what the store says."""

import contextlib
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from store_helpers import (
    COPY,
    OWNER,
    changed,
    make_manifest,
    manifest_files,
    newer_manifest,
    open_store,
    payload,
    replace_chunks,
    segment_files,
    way_back,
    way_files,
)

from fastcheckd.digests import chunk_digest
from fastcheckd.errors import NotHeldError, OverBudgetError
from fastcheckd.store import books, chains
from fastcheckd.store import way_back as ways
from fastcheckd.store.manifests import decode
from fastcheckd.store.segments import COPY_POOL, SLOT_POOL, StagingPool, pool_of, staging_pool

PAGE = 4096
BUDGET = 40 * PAGE
WAIT_S = 0.01
POOLS = [COPY_POOL, staging_pool("gpt", 0, 1), staging_pool("gpt", 1, 1)]


class OpenPatch:
    """A patch under way, and what the model knows of it."""

    def __init__(self, life, base, data, step):
        self.life, self.base, self.data, self.step = life, base, data, step
        self.patch = None
        self.over = False
        self.rest = set(range(len(base.chunks)))

    def give_way(self):
        self.over = True
        self.patch.abort()


class StoreMachine(RuleBasedStateMachine):
    segments = Bundle("segments")  # allocated by us, not yet released
    shards = Bundle("shards")  # values from publish, perhaps outdated
    pins = Bundle("pins")
    patches = Bundle("patches")

    def __init__(self):
        super().__init__()
        self.constants = ways.GROW_BYTES, books.CHANGE_WAIT_S, chains.CHANGE_WAIT_S
        ways.GROW_BYTES, books.CHANGE_WAIT_S, chains.CHANGE_WAIT_S = PAGE, WAIT_S, WAIT_S
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.store, self.counters = open_store(self.folder / "ram", BUDGET)
        self.life = 0
        self.seed = 0
        self.expected = {}  # id -> bytes
        self.values = {}  # id -> the HeldShard that is current
        self.hidden = {}  # id -> bytes: dropped, but perhaps still there for older ones
        self.allocated = set()
        self.pinned = []  # (view, bytes)
        self.open_patches = []

    def teardown(self):
        ways.GROW_BYTES, books.CHANGE_WAIT_S, chains.CHANGE_WAIT_S = self.constants
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(target=segments, pages=st.integers(0, 10), pool=st.sampled_from(POOLS))
    def allocate(self, pages, pool):
        before = self.store.usage()
        try:
            segment = self.store.allocate(pages * PAGE, pool, job="gpt")
        except OverBudgetError:
            assert before.used_bytes - before.free_bytes + max(1, pages) * PAGE > BUDGET
            assert self.store.usage() == before
            return multiple()
        assert segment.pool == pool
        assert segment.size_bytes >= pages * PAGE
        assert segment not in self.allocated
        # By what is held now: `full` moves bytes, and the values here are from before.
        assert all(segment is not held.segment for held in self.store.held())
        # What others look at must not change under them.
        segment.view[:] = b"\xee" * segment.size_bytes
        self.allocated.add(segment)
        return self.life, segment

    @rule(
        target=shards,
        place=segments,
        step=st.integers(1, 5),
        size=st.integers(0, 3 * PAGE),
        verified=st.booleans(),
    )
    def publish(self, place, step, size, verified):
        life, segment = place
        if life != self.life or segment not in self.allocated:
            return multiple()
        if any(value.segment is segment for value in self.values.values()):
            return multiple()  # its bytes are sealed
        if any(view.obj is segment.view.obj for view, _ in self.pinned):
            return multiple()
        size = min(size, segment.size_bytes)
        return self.publish_in(segment, step, size, segment.size_bytes - size, verified)

    def publish_in(self, segment, step, size, offset, verified):
        self.seed += 1
        data = payload(self.seed, size)
        segment.view[offset : offset + size] = data
        kind = COPY if segment.pool == COPY_POOL else OWNER
        rank = 0 if kind == COPY else StagingPool.of(segment.pool).rank
        manifest = make_manifest(data, step=step, rank=rank, kind=kind)
        assert pool_of(manifest) == segment.pool
        try:
            held = self.store.publish(manifest, segment, offset, verified=verified)
        except NotHeldError:
            assert self.pinned  # the bytes that older ones need are being read
            return multiple()
        except OverBudgetError:
            return multiple()  # an older one that needs the replaced one has no room of its own
        self.hidden.pop(held.id, None)
        self.expected[held.id] = data
        self.values[held.id] = held
        return self.life, held

    @rule(place=consumes(segments))
    def release(self, place):
        life, segment = place
        if life == self.life:
            self.allocated.remove(segment)
            self.store.release(segment)

    @rule(shard=shards)
    def drop(self, shard):
        life, held = shard
        if life != self.life:
            return
        try:
            self.store.drop(held)
        except NotHeldError:
            assert self.pinned
            return
        except OverBudgetError:
            return
        if self.is_current(held):
            self.hidden[held.id] = self.expected[held.id]
            self.forget(held)

    @rule(target=pins, shard=shards)
    def pin(self, shard):
        life, held = shard
        if life != self.life:
            return multiple()
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(self.store.pinned(held))
        except NotHeldError:
            now = self.store.find(held.key, held.kind)
            assert not self.is_current(held) or not now.is_full or now.segment is not held.segment
            return multiple()
        assert self.is_current(held)
        entry = (held.view, self.expected[held.id])
        self.pinned.append(entry)
        return self.life, stack, entry

    @rule(pin=consumes(pins))
    def unpin(self, pin):
        life, stack, entry = pin
        if life == self.life:
            self.pinned = [other for other in self.pinned if other is not entry]
            stack.close()

    @rule(shard=shards, damage=st.booleans())
    def verify(self, shard, damage):
        life, held = shard
        if life != self.life or not self.is_current(held):
            return
        held = self.store.find(held.key, held.kind)
        needed = any(
            not other.is_full and other.segment is held.segment
            for other in self.store.held()
            if other is not held
        )
        damage = damage and held.is_full and not needed
        if damage:
            for each in self.live_patches():
                if each.base.id == held.id:
                    each.give_way()
        others = any(view.obj is held.segment.view.obj for view, _ in self.pinned)
        damage = damage and held.manifest.bytes > 0 and not others
        if damage:
            held.segment.view[held.offset] ^= 1
        found = self.counters.get("corrupt_found")
        assert self.store.verify(held) is not damage
        assert self.counters.get("corrupt_found") == found + damage
        if damage:
            self.forget(held)
            assert self.store.find(held.key, held.kind) is None
        else:
            assert self.store.find(held.key, held.kind).verified_at_ms > 0

    @rule(target=shards, step=st.integers(1, 5), size=st.sampled_from([PAGE - 1, 3 * PAGE + 5]))
    def put_whole(self, step, size):
        try:
            segment = self.store.allocate(size, COPY_POOL, job="gpt")
        except OverBudgetError:
            return multiple()
        self.allocated.add(segment)
        published = self.publish_in(segment, step, size, 0, True)
        self.allocated.remove(segment)
        self.store.release(segment)
        return published

    @rule(target=patches, which=st.integers(0, 20), ahead=st.integers(1, 2), alike=st.booleans())
    def begin_patch(self, which, ahead, alike):
        held = self.pick(which, lambda s: s.is_full)
        if held is None:
            return multiple()
        self.seed += 1
        old = self.expected[held.id]
        data = changed(old, self.seed) if alike and old else payload(self.seed, len(old))
        entry = OpenPatch(self.life, held, data, held.key.step + ahead)
        try:
            entry.patch = self.store.begin_patch(held, entry.step, on_wanted=entry.give_way)
        except (NotHeldError, OverBudgetError):
            assert self.is_current(held)
            return multiple()
        self.open_patches.append(entry)
        return entry

    @rule(entry=patches, index=st.integers(0, 3))
    def replace(self, entry, index):
        if entry not in self.live_patches() or index not in entry.rest:
            return
        # An OverBudgetError leaves the chunk as it was; the invariants look whether it is.
        with contextlib.suppress(OverBudgetError):
            replace_chunks(entry.patch, entry.data, [index], entry.step)
            entry.rest.remove(index)

    @rule(target=shards, entry=consumes(patches))
    def publish_patch(self, entry):
        if entry not in self.live_patches():
            return multiple()
        try:
            replace_chunks(entry.patch, entry.data, sorted(entry.rest), entry.step)
        except OverBudgetError:
            entry.give_way()
            return multiple()
        held = entry.patch.publish(newer_manifest(entry.base, entry.data, entry.step))
        entry.over = True
        self.expected[held.id] = entry.data
        self.values[held.id] = held
        return self.life, held

    @rule(target=shards, which=st.integers(0, 20), alike=st.booleans())
    def patch(self, which, alike):
        entry = self.begin_patch(which, 1, alike)
        return self.publish_patch(entry) if isinstance(entry, OpenPatch) else multiple()

    @rule(entry=consumes(patches))
    def abort(self, entry):
        if entry.life == self.life:
            entry.give_way()

    @rule(which=st.integers(0, 20))
    def drop_a_copy(self, which):
        if (held := self.pick(which)) is not None:
            self.drop((self.life, held))

    @rule(target=shards, which=st.integers(0, 20))
    def make_full(self, which):
        held = self.pick(which)
        if held is None:
            return multiple()
        try:
            full = self.store.full(held)
        except OverBudgetError:
            return multiple()
        with self.store.pinned(full):
            assert full.view == self.expected[held.id]
        return self.life, full

    def pick(self, which, suits=lambda shard: True):
        """One of the copies of rank 0, as the store has it now."""
        copies = [s for s in self.store.held() if s.kind == COPY and suits(s)]
        return copies[which % len(copies)] if copies else None

    @rule()
    def restart(self):
        self.store.close()
        self.reopen(self.folder / "ram")

    @rule(torn=st.none() | st.floats(0, 1), seed=st.integers(0, 3))
    def kill(self, torn, seed):
        """The process is gone in the middle of everything, perhaps of copying a chunk."""
        slot = None
        for entry in self.live_patches():
            if torn is not None and entry.rest:
                index = sorted(entry.rest)[seed % len(entry.rest)]
                with contextlib.suppress(OverBudgetError):
                    slot = self.tear(entry, index, torn)
        left = self.folder / f"ram-{self.life}"
        shutil.copytree(self.store.directory, left)
        if slot is not None:
            self.store.release(slot)
        self.store.close()
        shutil.rmtree(self.store.directory)
        left.rename(self.folder / "ram")
        self.reopen(self.folder / "ram")

    def tear(self, entry, index, share):
        """What `Patch.replace` does, stopped in the middle."""
        patch = entry.patch
        start, stop = patch.chunks.range(index)
        old, new = bytes(patch.old(index)), entry.data[start:stop]
        slot = self.store.allocate(patch.chunks.longest, "slot")
        slot.view[: stop - start] = new
        try:
            record = way_back(old, new, entry.base.key.step, entry.step)
            patch._way.append(self.store._pools, index, record, stop - start)
        except OverBudgetError:
            self.store.release(slot)
            raise
        cut = int((stop - start) * share)
        patch._bytes[start : start + cut] = new[:cut]
        return slot

    def reopen(self, ram):
        self.store, self.counters = open_store(ram, BUDGET)
        assert self.counters.get("manifests_dropped") == 0
        self.life += 1
        self.allocated = set()
        self.pinned = []
        self.open_patches = []
        self.values = {held.id: held for held in self.store.held()}
        # A restart forgets that one was dropped which older ones are had through.
        for name in self.values.keys() - self.expected.keys():
            self.expected[name] = self.hidden[name]
        self.hidden = {}

    def is_current(self, held):
        return held.id in self.values and self.values[held.id].manifest is held.manifest

    def forget(self, held):
        del self.values[held.id], self.expected[held.id]

    def live_patches(self):
        return [e for e in self.open_patches if e.life == self.life and not e.over]

    @invariant()
    def shards_are_whole(self):
        held = {value.id: value for value in self.store.held()}
        patched = {entry.base.id for entry in self.live_patches()}
        busy = {value.segment for name, value in held.items() if name in patched}
        assert held.keys() == self.expected.keys()
        for name, value in held.items():
            if value.segment in busy:
                continue
            if value.is_full:
                assert bytes(value.view) == self.expected[name]
            else:
                starts = [value.chunks.range(index) for index in range(len(value.chunks))]
                digests = [chunk_digest(self.expected[name][start:stop]) for start, stop in starts]
                assert value.manifest.chunk_digests == b"".join(digests)
                assert self.store.verify(value)
        for view, data in self.pinned:
            assert view == data
        for entry in self.live_patches():
            for index in range(len(entry.patch.chunks)):
                start, stop = entry.patch.chunks.range(index)
                data = self.expected[entry.base.id] if index in entry.rest else entry.data
                assert entry.patch.old(index) == data[start:stop]

    @invariant()
    def the_disk_says_what_the_store_says(self):
        ram = self.store.directory
        held = self.store.held()
        on_disk = {}
        for path in manifest_files(ram):
            stored = decode(path.read_bytes())
            on_disk[stored.manifest.key.step, stored.manifest.key.rank, stored.manifest.kind] = stored
        hidden = set()
        patched = {entry.base.id for entry in self.live_patches()}
        for key, stored in on_disk.items():
            found = [v for v in held if (v.key.step, v.key.rank, v.kind) == key]
            if not found:
                hidden.add(key)
                assert stored.HasField("way_back")
            elif found[0].is_full:
                assert stored.segment == found[0].segment.name
                assert stored.HasField("way_back") == (found[0].id in patched)
            else:
                assert stored.way_back.file == found[0].way_back.file.name
        assert len(on_disk) == len(held) + len(hidden)
        files = segment_files(ram)
        assert {s.name for s in self.allocated} <= set(files)
        usage = self.store.usage()
        way_bytes = sum(-(-size // PAGE) * PAGE for size in way_files(ram).values())
        assert sum(files.values()) + way_bytes <= usage.used_bytes <= BUDGET
        assert usage.segments == len(files)
        if not self.live_patches():
            assert usage.used_bytes == sum(files.values()) + way_bytes
            assert list((ram / "tmp").iterdir()) == []

    @invariant()
    def nothing_leaks(self):
        usage = self.store.usage()
        needed = {s.name: s.size_bytes for s in self.allocated}
        held = self.store.held()
        needed |= {v.segment.name: v.segment.size_bytes for v in held}
        needed |= {v.way_back.file.name: v.way_back.file.size_bytes for v in held if not v.is_full}
        if (
            not self.pinned
            and not self.live_patches()
            and len(manifest_files(self.store.directory)) == len(held)
        ):
            assert usage.used_bytes - usage.free_bytes == sum(needed.values())
        # What is in use, for each job, slots apart: they are nobody's.
        in_use = Counter()
        for file in self.store._pools._in_use:
            in_use[file.job] += file.size_bytes
            assert (file.job == "") == (file.pool == SLOT_POOL)
        del in_use[""]
        assert self.store.job_bytes() == in_use


StoreMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
