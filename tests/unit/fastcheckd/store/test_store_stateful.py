"""Whatever the order of calls: the budget holds, shards are intact, and the disk says what the store says."""

import contextlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from store_helpers import COPY, OWNER, make_manifest, manifest_files, open_store, payload, segment_files

from fastcheckd.errors import NotHeldError, OverBudgetError
from fastcheckd.store.manifests import decode
from fastcheckd.store.segments import COPY_POOL, pool_of, staging_pool

PAGE = 4096
BUDGET = 24 * PAGE
POOLS = [COPY_POOL, staging_pool("gpt", 0), staging_pool("gpt", 1)]


class StoreMachine(RuleBasedStateMachine):
    segments = Bundle("segments")  # allocated by us, not yet released
    shards = Bundle("shards")  # values from publish, perhaps outdated
    pins = Bundle("pins")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.store, self.counters = open_store(self.folder / "ram", BUDGET)
        self.life = 0
        self.seed = 0
        self.expected = {}  # id -> bytes
        self.values = {}  # id -> the HeldShard that is current
        self.allocated = set()
        self.pinned = []  # (view, bytes)

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(target=segments, pages=st.integers(0, 10), pool=st.sampled_from(POOLS))
    def allocate(self, pages, pool):
        before = self.store.usage()
        try:
            segment = self.store.allocate(pages * PAGE, pool)
        except OverBudgetError:
            assert before.used_bytes - before.free_bytes + max(1, pages) * PAGE > BUDGET
            assert self.store.usage() == before
            return multiple()
        assert segment.pool == pool
        assert segment.size_bytes >= pages * PAGE
        assert segment not in self.allocated
        assert all(segment is not value.segment for value in self.values.values())
        # What others look at must not change under them.
        segment.view[:] = b"\xee" * segment.size_bytes
        self.allocated.add(segment)
        return self.life, segment

    @rule(
        target=shards,
        place=segments,
        step=st.integers(1, 3),
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
        offset = segment.size_bytes - size
        self.seed += 1
        data = payload(self.seed, size)
        segment.view[offset : offset + size] = data
        kind = COPY if segment.pool == COPY_POOL else OWNER
        rank = 0 if kind == COPY else int(segment.pool.rpartition(".")[2])
        manifest = make_manifest(data, step=step, rank=rank, kind=kind)
        assert pool_of(manifest) == segment.pool
        held = self.store.publish(manifest, segment, offset, verified=verified)
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
        self.store.drop(held)
        if self.values.get(held.id) is held:
            del self.values[held.id], self.expected[held.id]

    @rule(target=pins, shard=shards)
    def pin(self, shard):
        life, held = shard
        if life != self.life:
            return multiple()
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(self.store.pinned(held))
        except NotHeldError:
            assert self.values.get(held.id) is not held
            return multiple()
        assert self.values[held.id] is held
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
        if life != self.life or self.values.get(held.id) is not held:
            return
        others = any(view.obj is held.segment.view.obj for view, _ in self.pinned)
        damage = damage and held.manifest.bytes > 0 and not others
        if damage:
            held.segment.view[held.offset] ^= 1
        found = self.counters.get("corrupt_found")
        assert self.store.verify(held) is not damage
        assert self.counters.get("corrupt_found") == found + damage
        if damage:
            del self.values[held.id], self.expected[held.id]
            assert self.store.find(held.key, held.kind) is None
        else:
            assert self.store.find(held.key, held.kind).verified_at_ms > 0

    @rule()
    def restart(self):
        self.store.close()
        self.store, self.counters = open_store(self.folder / "ram", BUDGET)
        assert self.counters.get("manifests_dropped") == 0
        self.life += 1
        self.allocated = set()
        self.pinned = []
        self.values = {held.id: held for held in self.store.held()}

    @invariant()
    def shards_are_whole(self):
        held = {value.id: value for value in self.store.held()}
        assert {name: bytes(value.view) for name, value in held.items()} == self.expected
        for view, data in self.pinned:
            assert view == data

    @invariant()
    def the_disk_says_what_the_store_says(self):
        ram = self.store.directory
        held = self.store.held()
        on_disk = {path: decode(path.read_bytes()) for path in manifest_files(ram)}
        assert {stored.segment for stored in on_disk.values()} == {value.segment.name for value in held}
        assert sorted(m.manifest.key.step for m in on_disk.values()) == sorted(v.key.step for v in held)
        files = segment_files(ram)
        assert {s.name for s in self.allocated} <= set(files)
        usage = self.store.usage()
        assert usage.used_bytes == sum(files.values()) <= BUDGET
        assert usage.segments == len(files)
        assert list((ram / "tmp").iterdir()) == []

    @invariant()
    def nothing_leaks(self):
        usage = self.store.usage()
        needed = {s.name: s.size_bytes for s in self.allocated}
        needed |= {v.segment.name: v.segment.size_bytes for v in self.values.values()}
        if not self.pinned:
            assert usage.used_bytes - usage.free_bytes == sum(needed.values())


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
