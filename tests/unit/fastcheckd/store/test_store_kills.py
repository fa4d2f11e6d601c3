"""kill -9 between any two steps that change something on disk: what was published is exact, and nothing leaks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_helpers import (
    CHUNK,
    COPY,
    OWNER,
    fill,
    in_use,
    manifest_of,
    open_store,
    put,
    read,
    stage,
    thin,
    trained,
    weights,
)

from fastcheckd.store import draft
from fastcheckd.store.replica_store import ReplicaStore

SIZE = 24 * CHUNK
#: Room for a copy and two thirds of another: drafts against it are lean.
LEAN = 42 * CHUNK


@functools.cache
def data_of(kind: int, step: int) -> bytes:
    """Of each step of a life."""
    data = weights(kind, SIZE)
    for each in range(2, step + 1):
        data = trained(data, each, None if each % 2 else {0, 3, 7, each})
    return data


def published(store: ReplicaStore) -> None:
    """Copies and own steps, each the first of its kind, and one that takes the place of another."""
    put(store, data_of(COPY, 1))
    stage(store, data_of(OWNER, 1))
    draft = store.draft(manifest_of(data_of(COPY, 1), 1, session=2))
    draft.publish()


def replaced(store: ReplicaStore) -> None:
    """Older copies that become reverse deltas, two deep."""
    base = put(store, data_of(COPY, 1))
    for step in (2, 3):
        base = put(store, data_of(COPY, step), step, base=base)


def turned(store: ReplicaStore) -> None:
    """Older steps of the owner, with deltas for some of their chunks."""
    own = stage(store, data_of(OWNER, 1))
    for step in (2, 3):
        older, own = own, stage(store, data_of(OWNER, step), step)
        thin(store, older, own, chunks=range(0, 24, 2))


def lean(store: ReplicaStore) -> None:
    """A lean draft that is published, after one that is given up."""
    base = put(store, data_of(COPY, 1))
    given_up = store.draft(manifest_of(data_of(COPY, 5), 5), base=base)
    fill(given_up, data_of(COPY, 5), against_base=True, chunks=given_up.missing[:8])
    given_up.abandon()
    put(store, data_of(COPY, 3), 3, base=base)


def dropped(store: ReplicaStore) -> None:
    """Steps in the middle and at the end go: older ones are led to others, or get their own bytes again."""
    replaced(store)
    turned(store)
    for kind in (COPY, OWNER):
        for step in (2, 3, 1):
            store.drop(store.find(manifest_of(b"", step).key, kind))


LIVES: list[tuple[Callable[[ReplicaStore], None], int, set[str]]] = [
    (published, 64 << 20, {"publish: staged", "publish: renamed"}),
    (replaced, 64 << 20, {"replace: staged", "replace: one renamed", "replace: renamed"}),
    (turned, 64 << 20, {"replace: staged", "replace: one renamed", "replace: renamed"}),
    (lean, LEAN, {"replace: staged", "replace: one renamed", "replace: renamed"}),
    (dropped, 64 << 20, {"drop: struck", "replace: staged", "replace: one renamed", "replace: renamed"}),
]


def live(directory: Path, budget_bytes: int, life: Callable[[ReplicaStore], None], faults) -> None:
    store = open_store(directory, budget_bytes)
    store.faults = faults
    life(store)
    store.close()


@pytest.mark.parametrize(("life", "budget_bytes", "names"), LIVES, ids=[life.__name__ for life, *_ in LIVES])
def test_a_kill_at_any_fault_point_leaves_every_published_replica_exact(
    tmp_path, monkeypatch, life, budget_bytes, names
):
    monkeypatch.setattr(draft, "FLUSH_BYTES", 6 * CHUNK)
    seen: list[str] = []
    live(tmp_path / "whole", budget_bytes, life, seen.append)
    assert set(seen) >= names
    for number, name in enumerate(seen):
        directory = tmp_path / str(number)
        child = os.fork()
        if child == 0:
            count = iter(range(len(seen)))
            live(
                directory,
                budget_bytes,
                life,
                lambda _, n=number, c=count: os._exit(9) if next(c) == n else None,
            )
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9, name
        store = open_store(directory, 64 << 20)
        for held in store.held():
            assert read(store, held) == data_of(held.kind, held.key.step), (name, tuple(held.id))
            assert store.verify(held)
        # Life goes on: a newer step comes against the newest of these.
        held = store.history(manifest_of(b"").key, COPY)
        if held:
            step = held[0].key.step + 1
            newer = put(store, trained(read(store, held[0]), step), step, base=held[0])
            for older in held:
                assert read(store, older) == data_of(COPY, older.key.step), (name, tuple(older.id))
            assert store.verify(newer)
        for each in store.held():
            store.drop(each)
        assert in_use(store) == 0 and store.job_bytes() == {}, name
        store.close()
