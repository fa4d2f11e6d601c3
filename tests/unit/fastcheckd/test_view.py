"""What a view says of a job, of which sessions it says nothing, and how soon a data process goes by it."""

import asyncio

from tests.sockets import free_address
from tests.unit.fastcheckd.store.store_helpers import CHUNK, open_store, put, trained, weights

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config import Config
from fastcheckd.counters import Counters
from fastcheckd.identity import NodeLife
from fastcheckd.process.data import _DataProcess
from fastcheckd.store.retention import Kept
from fastcheckd.view import ViewFollower


def follower(**job):
    view = ViewFollower(None, NodeLife("a"))  # type: ignore[arg-type]
    view.view = rpb.ClusterView(jobs=[rpb.JobView(job="gpt", **job)])
    return view


def test_a_view_speaks_of_the_sessions_that_it_knows():
    view = follower(kept_steps=[3, 9], void_below_session=2, next_session=5)
    assert view.speaks_of("gpt", 4) and not view.speaks_of("gpt", 5)
    assert view.is_void("gpt", 1) and not view.is_void("gpt", 2)
    assert view.retention() == {"gpt": Kept(frozenset({3, 9}), 2, 5)}
    assert not view.is_void("other", 1)


def test_the_view_of_a_version_that_tells_nothing_of_sessions_is_taken_as_it_always_was():
    view = follower(kept_steps=[3])
    assert view.speaks_of("gpt", 10**6) and not view.is_void("gpt", 1)


def test_a_slow_reader_of_a_deleted_step_does_not_keep_newer_views_waiting(tmp_path):
    """Nodes join while a step is being deleted whose bytes somebody reads: the newest epoch counts at once."""
    config = Config(
        node_id="a", state_dir=tmp_path / "state", ram_dir=tmp_path / "ram", runtime_dir=tmp_path / "run",
        data_port=int(free_address().rpartition(":")[2]), lane_port=int(free_address().rpartition(":")[2]),
        ram_budget_bytes=1 << 24,
    )  # fmt: skip
    counters = Counters()
    store = open_store(config.ram_dir, 1 << 24, counters=counters)
    newer = trained(weights(1), 2)
    read = put(store, newer, 2, base=put(store, weights(1)))

    class Registry:
        async def watch(self):
            for epoch in (1, 2, 3):
                job = rpb.JobView(job="gpt", kept_steps=[1], void_below_session=2, next_session=2)
                yield rpb.ClusterView(
                    cluster_id=config.cluster_id, version=epoch, epoch=epoch, has_leader=True, jobs=[job]
                )
            await asyncio.Event().wait()

        def use_voters(self, voters):
            pass

    async def scenario():
        rooms = _DataProcess(config, store, counters)
        rooms.view._registry = Registry()
        rooms.maintenance.start()
        following = asyncio.create_task(rooms.view.run())
        try:
            with store.reading(read) as opened, opened.chunk(0) as view:
                async with asyncio.timeout(60):
                    while rooms.identity.epoch < 3 or [held.key.step for held in store.held("gpt")] != [1]:
                        await asyncio.sleep(0.01)
                assert view == newer[:CHUNK]
        finally:
            following.cancel()
            await rooms.maintenance.stop()
            await rooms.close()

    asyncio.run(scenario())
