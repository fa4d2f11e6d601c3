"""A replica is checked chunk by chunk: what changed is found, dropped and told, and nothing is held meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.fastcheckd.store.store_helpers import CHUNK, in_use, open_store, put, stage, trained, weights

from fastcheckd.counters import Counters
from fastcheckd.maintenance.scrub import Checker
from fastcheckd.store.replica import Replica
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.transfer.pacing import Gate, Pacer


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def store(tmp_path, counters) -> Iterator[ReplicaStore]:
    store = open_store(tmp_path / "ram", counters=counters)
    yield store
    store.close()


@pytest.fixture
def checker(store, counters) -> Iterator[Checker]:
    with ThreadPoolExecutor(2) as executor:
        yield Checker(store, executor, counters)


def test_what_is_good_is_noted(store, checker, counters):
    base = put(store, weights(1))
    put(store, trained(weights(1), 2), 2, base=base)
    stage(store, weights(2))
    for held in store.held():
        held.verified_at_ms = 0
        assert asyncio.run(checker.check(held)) is True
        assert held.verified_at_ms > 0
    assert counters.get("replicas_scrubbed") == 3


@pytest.mark.parametrize("make", [put, stage])
def test_what_changed_is_found_dropped_and_told(store, checker, counters, make):
    held = make(store, weights(1))
    told: list[Replica] = []
    store.on_condemned = told.append
    held.content[2].form.place.view[CHUNK - 1] ^= 1
    assert asyncio.run(checker.check(held)) is False
    assert told == [held] and store.held() == [] and counters.get("corrupt_found") == 1
    assert asyncio.run(checker.check(held)) is None


def test_what_is_dropped_while_its_turn_comes_goes_at_once(store, checker):
    """A scrub takes as long as it may, and others need the memory."""
    held = put(store, weights(1))
    busy = True
    gate = Gate(Pacer(1e9, burst_bytes=CHUNK, trickle_s=math.inf), lambda: busy)

    async def story() -> None:
        nonlocal busy
        checking = asyncio.create_task(checker.check(held, gate))
        await asyncio.sleep(0.05)
        store.drop(held)
        assert in_use(store) == 0
        busy = False
        async with asyncio.timeout(30):
            assert await checking is None

    asyncio.run(story())
