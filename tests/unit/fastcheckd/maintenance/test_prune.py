"""What nothing will ask for leaves the RAM store, whenever it came and whatever was had through it."""

import asyncio

import pytest
from tests.unit.fastcheckd.store.store_helpers import (
    in_use,
    open_store,
    payload,
    put,
    read,
    trained,
    weights,
)

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.identity import NodeLife
from fastcheckd.maintenance import prune
from fastcheckd.maintenance.prune import Pruner
from fastcheckd.view import ViewFollower

BYTES = 1 << 16


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "ram", 1 << 24)
    yield store
    store.close()


def steps(store):
    return [held.key.step for held in store.held("gpt")]


def view_of(**job):
    view = ViewFollower(None, NodeLife("a"))  # type: ignore[arg-type]
    view.view = rpb.ClusterView(jobs=[rpb.JobView(job="gpt", **job)])
    return view


def test_memory_of_a_deleted_job_is_free_again(store):
    for step in (1, 2, 3):
        put(store, payload(step, BYTES), step)
    before = in_use(store)
    asyncio.run(Pruner(store, view_of(kept_steps=[1, 3], next_session=2)).prune())
    assert steps(store) == [1, 3]
    asyncio.run(Pruner(store, view_of(kept_steps=[1], void_below_session=2, next_session=2)).prune())
    assert steps(store) == [1], "back to the step before"
    asyncio.run(Pruner(store, view_of(void_below_session=2, next_session=2)).prune())
    assert steps(store) == []
    assert before >= 3 * BYTES and in_use(store) == 0


def test_what_is_had_through_a_deleted_step_stays_exact(store):
    data = [weights(1, BYTES)]
    held = put(store, data[0])
    for step in (2, 3):
        data.append(trained(data[-1], step))
        held = put(store, data[-1], step, base=held)

    def kept(*wanted, void=0):
        view = view_of(kept_steps=wanted, void_below_session=void, next_session=2)
        asyncio.run(Pruner(store, view).prune())
        assert steps(store) == list(wanted)
        for held in store.held():
            assert read(store, held) == data[held.key.step - 1]

    kept(1, 2, 3)
    kept(1, 3)  # step 1 led to step 2
    kept(1, void=2)  # and then to the newest
    kept(void=2)


def test_a_copy_that_comes_after_the_view_goes_a_little_later(store, monkeypatch):
    monkeypatch.setattr(prune, "PRUNE_S", 0.0)
    pruner = Pruner(store, view_of(void_below_session=2, next_session=2))

    async def story():
        await pruner.prune()
        put(store, payload(1, BYTES))
        running = asyncio.ensure_future(pruner.run())
        async with asyncio.timeout(20):
            while steps(store):
                await asyncio.sleep(0)
        running.cancel()

    asyncio.run(story())
