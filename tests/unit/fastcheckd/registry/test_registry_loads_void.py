"""A process that loads in the place of an earlier one voids what any rank of its job has begun by then."""

import asyncio

import pytest
from tests.unit.fastcheckd.registry.small_cluster import apply, cluster, open_rank, record

from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.config import Config
from fastcheckd.registry.commits import begun_too_early, newest_load
from fastcheckd.registry.model import State
from fastcheckd.registry.reports import Reports

NODES = [("n0", 1), ("n1", 2)]
HOLDERS = [("n2", 3)]
COMMITTED = registry_pb2.REPORT_STATE_COMMITTED
SUPERSEDED = common_pb2.ERROR_CODE_SUPERSEDED


class Engine:
    def __init__(self):
        self.state = cluster()

    def read(self, reader):
        return reader(self.state)

    async def propose(self, command, *, timeout_s=4.0):
        return apply(self.state, command)


class Job:
    """Two ranks, and the leader that they report to."""

    def __init__(self):
        self.engine = Engine()
        self.reports = Reports(self.engine, Config(node_id="n2"))
        self.reports.leadership_gained()
        self.sessions = {}

    def open(self, rank, client, *, loads, world_size=2):
        command = open_rank("fresh", rank, world_size, client, NODES[rank % 2], loads=loads)
        self.sessions[rank] = apply(self.engine.state, command).session
        self.reports.opened("fresh", rank, self.sessions[rank])

    @classmethod
    def under_way(cls):
        """Both ranks have a process, and neither has loaded."""
        job = cls()
        for rank in (0, 1):
            job.open(rank, "first", loads=False)
        return job

    @property
    def next_session(self):
        return self.engine.state.jobs["fresh"].next_session

    def report(self, rank, step, begun_after):
        made = record(rank, self.sessions[rank], NODES[rank], HOLDERS)
        if begun_after is not None:
            made.begun_after = begun_after
        return asyncio.create_task(self.reports.report("fresh", step, 2, made, wait_s=0.2))


def scenario(function):
    async def run():
        async with asyncio.timeout(10):
            await function()

    asyncio.run(run())


def test_only_a_load_in_the_place_of_somebody_counts():
    @scenario
    async def _():
        job = Job()
        for rank in (0, 1):
            job.open(rank, "first", loads=True)
        known = job.engine.state
        assert newest_load(known, "fresh") == (0, 0), "nobody was there before"
        job.open(0, "saves", loads=False)
        assert newest_load(known, "fresh") == (0, 0)
        job.open(0, "loads", loads=True)
        assert newest_load(known, "fresh") == (job.sessions[0], 0)
        job.open(1, "loads", loads=True)
        assert newest_load(known, "fresh") == (job.sessions[1], 1)


@pytest.mark.parametrize("loads", [False, True])
def test_a_report_from_before_a_load_does_not_commit_with_one_from_after_it(loads):
    @scenario
    async def _():
        job = Job.under_way()
        begun = job.next_session
        waiting = job.report(1, 7, begun)
        await asyncio.sleep(0)
        job.open(0, "again", loads=loads)
        if loads:
            assert (await waiting).error.code == SUPERSEDED, "at once"
            assert (await job.report(1, 7, begun)).error.code == SUPERSEDED, "and when it is told again"
        mine = await job.report(0, 7, job.next_session)
        assert (mine.state == COMMITTED) is not loads
        if loads:
            assert (await job.report(1, 7, job.next_session)).state == COMMITTED, "it lives, and began after"


def test_a_rank_that_there_was_not_before_voids_what_fewer_ranks_began():
    @scenario
    async def _():
        job = Job.under_way()
        begun = job.next_session
        waiting = job.report(1, 7, begun)
        await asyncio.sleep(0)
        job.open(2, "more", loads=True, world_size=3)
        assert (await waiting).error.code == SUPERSEDED
        assert (await job.report(0, 7, begun)).error.code == SUPERSEDED
        assert newest_load(job.engine.state, "fresh") == (job.sessions[2], 2)


def test_a_process_that_loads_again_gets_one_session_more_however_often_it_asks():
    @scenario
    async def _():
        job = Job.under_way()
        old = job.sessions[0]
        again = open_rank("fresh", 0, 2, "first", NODES[0], loads=True, renews=old, replaces=old)
        new = apply(job.engine.state, again).session
        assert new > job.sessions[1] and newest_load(job.engine.state, "fresh") == (new, 0)
        assert apply(job.engine.state, again).session == new, "its answer may have been lost"
        job.sessions[0] = new
        job.open(0, "second", loads=False)
        assert apply(job.engine.state, again).code == pb.ERROR_CODE_FENCED


def test_a_report_that_does_not_say_is_not_checked():
    @scenario
    async def _():
        job = Job.under_way()
        job.open(0, "again", loads=True)
        older = job.report(1, 7, None)
        assert (await job.report(0, 7, job.next_session)).state == COMMITTED
        assert (await older).state == COMMITTED


def test_a_leader_that_missed_the_load_refuses_before_it_proposes():
    """The command that opened the session is applied, and whoever asked for it is gone: nobody told the reports."""

    @scenario
    async def _():
        job = Job.under_way()
        old = job.report(1, 7, job.next_session)
        await asyncio.sleep(0)
        command = open_rank("fresh", 0, 2, "again", NODES[0], loads=True)
        job.sessions[0] = apply(job.engine.state, command).session
        mine = job.report(0, 7, job.next_session)
        assert (await old).error.code == SUPERSEDED
        assert (await mine).state == registry_pb2.REPORT_STATE_WAITING
        assert job.engine.state.jobs["fresh"].steps == []


def test_how_long_a_load_is_open_is_never_said_to_be_longer_than_it_is():
    @scenario
    async def _():
        job = Job()
        job.open(0, "first", loads=True)
        assert job.reports.newest_load("fresh")[0] == 0
        job.open(0, "second", loads=True)
        await asyncio.sleep(0.02)
        session, age_s = job.reports.newest_load("fresh")
        assert session == job.sessions[0] and 0.02 <= age_s < 5
        # Opened in this term, and not told yet.
        command = open_rank("fresh", 0, 2, "third", NODES[0], loads=True)
        apply(job.engine.state, command)
        assert job.reports.newest_load("fresh") == (session + 1, 0.0)
        # The next leader knows that it is older than its office.
        job.reports.leadership_lost()
        job.reports.leadership_gained()
        await asyncio.sleep(0.02)
        session, age_s = job.reports.newest_load("fresh")
        assert 0.02 <= age_s < 5


def test_jobs_that_nobody_knows_are_not_refused_here():
    assert newest_load(State(), "fresh") == (0, 0)
    assert begun_too_early(State(), "fresh", 1, registry_pb2.RankRecord(begun_after=1)) is None
