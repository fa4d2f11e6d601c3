"""Any course of drafts, reverse deltas, drops, damage and restarts, against a model that is a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_helpers import (
    CHUNK,
    COPY,
    OWNER,
    fill,
    in_use,
    manifest_of,
    open_store,
    read,
    stage,
    thin,
    trained,
    weights,
)
from tests.fuzzing import examples

from fastcheckd.errors import CorruptError, OverBudgetError
from fastcheckd.store.draft import Draft

SIZE = 6 * CHUNK
BUDGET = 96 * CHUNK
RANKS = st.integers(0, 1)
SEEDS = st.integers(0, 5)


class Lives(RuleBasedStateMachine):
    """Copies of two ranks, and the owner's own steps of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.store = open_store(self.directory / "ram", BUDGET)
        self.model: dict[tuple[int, int, int], bytes] = {}  # (kind, rank, step)
        self.drafts: list[tuple[Draft, bytes]] = []
        self.step = 0
        #: What is not used again until the next process has the directory.
        self.bad_bytes = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def newest(self, kind: int, rank: int):
        key = manifest_of(b"", rank=rank).key
        return next(iter(self.store.history(key, kind)), None)

    @rule(rank=RANKS, seed=SEEDS, chunks=st.one_of(st.none(), st.sets(st.integers(0, 5))), on_base=st.booleans(),
          keep=st.booleans(), part=st.integers(0, 6), encoded=st.booleans(), finish=st.sampled_from("pao"))  # fmt: skip
    def draft(self, rank, seed, chunks, on_base, keep, part, encoded, finish):
        self.step += 1
        base = self.newest(COPY, rank) if on_base else None
        before = self.model[COPY, rank, base.key.step] if base is not None else weights(seed, SIZE)
        data = trained(before, seed, chunks)
        try:
            draft = self.store.draft(manifest_of(data, self.step, rank=rank), base=base, keep_base=keep)
            fill(draft, data, against_base=encoded, chunks=draft.missing[:part])
            if finish == "p":
                fill(draft, data, against_base=encoded)
                draft.publish()
                self.model[COPY, rank, self.step] = data
            elif finish == "a":
                draft.abandon()
            else:
                self.drafts.append((draft, data))
        except OverBudgetError:
            draft.abandon() if "draft" in locals() else None

    @precondition(lambda self: self.drafts)
    @rule(publish=st.booleans())
    def end_a_draft(self, publish):
        draft, data = self.drafts.pop()
        try:
            if publish:
                fill(draft, data)
                draft.publish()
                self.model[COPY, draft.manifest.key.rank, draft.manifest.key.step] = data
        except (OverBudgetError, CorruptError):
            pass
        draft.abandon()

    @rule(seed=SEEDS, chunks=st.one_of(st.none(), st.sets(st.integers(0, 5))))
    def stage(self, seed, chunks):
        self.step += 1
        newest = self.newest(OWNER, 0)
        data = trained(self.model[OWNER, 0, newest.key.step] if newest else weights(seed, SIZE), seed, chunks)
        try:
            stage(self.store, data, self.step)
        except OverBudgetError:
            return
        self.model[OWNER, 0, self.step] = data

    @rule()
    def thin(self):
        own = self.store.history(manifest_of(b"").key, OWNER)
        older = next((r for r in own[1:] if r.segment is not None), None)
        if older is not None and own[0].segment is not None:
            try:
                thin(self.store, older, own[0])
            except OverBudgetError:
                assert older.segment is not None

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data):
        kind, rank, step = data.draw(st.sampled_from(sorted(self.model)))
        self.store.drop(self.store.find(manifest_of(b"", step, rank=rank).key, kind))
        del self.model[kind, rank, step]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), number=st.integers(0, 5))
    def damage(self, data, number):
        kind, rank, step = data.draw(st.sampled_from(sorted(self.model)))
        replica = self.store.find(manifest_of(b"", step, rank=rank).key, kind)
        chunk = replica.content[number]
        place = chunk.form.place
        leading = [r for r in self.store.held() if any(chunk in each.chain() for each in r.content)]
        place.view[place.length // 2] ^= 1
        assert not self.store.verify(replica)
        for each in leading:
            del self.model[each.kind, each.key.rank, each.key.step]
        self.bad_bytes += place.slot_bytes

    @rule()
    def restart(self):
        for draft, _ in self.drafts:
            draft.abandon()
        self.drafts.clear()
        self.bad_bytes = 0
        self.store.close()
        self.store = open_store(self.directory / "ram", BUDGET)

    @invariant()
    def holds_exactly_the_model(self):
        held = {(r.kind, r.key.rank, r.key.step): r for r in self.store.held()}
        assert held.keys() == self.model.keys()
        for name, replica in held.items():
            assert read(self.store, replica) == self.model[name], name
        usage = self.store.usage()
        assert 0 <= usage.free_bytes <= usage.used_bytes <= BUDGET
        if not self.model and not self.drafts:
            assert in_use(self.store) == self.bad_bytes
            assert self.store.job_bytes() == {}


TestLives = Lives.TestCase
TestLives.settings = settings(examples(40), stateful_step_count=30)
