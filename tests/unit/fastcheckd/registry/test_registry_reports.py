"""Reports that meet a commit under way: what a refusal of it says to whom."""

import asyncio

from tests.unit.fastcheckd.registry.small_cluster import apply, cluster, open_rank, record

from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheckd.config import Config
from fastcheckd.registry.reports import Reports

HOLDERS = [("n2", 3)]


class SlowEngine:
    """The state machine behind an engine whose proposals are decided when the test says so."""

    def __init__(self, state):
        self.state = state
        self.proposed = asyncio.Event()
        self.decide = asyncio.Event()

    def read(self, reader):
        return reader(self.state)

    async def propose(self, command, *, timeout_s=4.0):
        self.proposed.set()
        await self.decide.wait()
        return apply(self.state, command)


def test_a_predecessors_refused_commit_says_nothing_about_the_new_process():
    """Its report of the same step arrives while the commit with the old one is on its way through the log."""

    async def scenario():
        state = cluster()
        session = apply(state, open_rank("solo", 0, 1, "old", ("n0", 1))).session
        engine = SlowEngine(state)
        reports = Reports(engine, Config(node_id="n0"))
        first = asyncio.create_task(
            reports.report("solo", 7, 1, record(0, session, ("n0", 1), HOLDERS), wait_s=10)
        )
        await engine.proposed.wait()
        # The commit that was proposed is decided after this one.
        newer = apply(state, open_rank("solo", 0, 1, "new", ("n1", 2))).session
        reports.opened("solo", 0, newer)
        second = asyncio.create_task(
            reports.report("solo", 7, 1, record(0, newer, ("n1", 2), HOLDERS), wait_s=10)
        )
        await asyncio.sleep(0)
        engine.decide.set()
        async with asyncio.timeout(5):
            assert (await first).error.code == common_pb2.ERROR_CODE_FENCED
            assert (await second).state == registry_pb2.REPORT_STATE_COMMITTED
        (kept,) = state.jobs["solo"].steps
        assert [rank.session for rank in kept.ranks] == [newer]

    asyncio.run(scenario())


def test_a_rank_left_over_from_a_run_with_more_ranks_is_not_told_that_its_step_was_committed():
    """It reported the same number; then the job went on with fewer ranks, and committed its own step of that number."""

    async def scenario():
        state = cluster()
        old = apply(state, open_rank("job", 1, 2, "old", ("n1", 2))).session
        new = apply(state, open_rank("job", 0, 1, "new", ("n0", 1))).session
        engine = SlowEngine(state)
        engine.decide.set()
        reports = Reports(engine, Config(node_id="n0"))
        left_over = asyncio.create_task(
            reports.report("job", 7, 2, record(1, old, ("n1", 2), HOLDERS), wait_s=10)
        )
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            mine = await reports.report("job", 7, 1, record(0, new, ("n0", 1), HOLDERS), wait_s=10)
            assert mine.state == registry_pb2.REPORT_STATE_COMMITTED
            assert (await left_over).error.code == common_pb2.ERROR_CODE_SUPERSEDED
        (kept,) = state.jobs["job"].steps
        assert [rank.rank for rank in kept.ranks] == [0]

    asyncio.run(scenario())
