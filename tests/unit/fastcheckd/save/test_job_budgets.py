"""A job that may have no more of a node is refused while others' steps commit. Jobs that are over are forgotten."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.fastcheckd.save import save_harness
from tests.unit.fastcheckd.save.save_harness import CHUNK, next_step, noise, running_world

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.errors import FencedError, JobBudgetError
from fastcheckd.save import coordinator as coordinator_module
from fastcheckd.save.save import SaveKey
from fastcheckd.store.segments import rounded

STATE = noise(8 * CHUNK)
#: Of two ranks' steps: room for the two segments that each needs at least.
LIMIT = 4 * len(STATE) + 4 * CHUNK


def drop_older(store, job, step):
    """As retention would, once a step is committed."""
    for held in store.held(job):
        if held.key.step < step:
            store.drop(held)


async def until_idle(coordinator):
    for saves in list(coordinator._ranks.values()):
        while saves.busy():
            await asyncio.sleep(0.01)


def in_world(tmp_path, body, **options):
    async def run():
        async with running_world(tmp_path, codec="never", **options) as (node, registry, holders):
            await body(node, registry, holders)

    asyncio.run(run())


def test_a_job_at_its_limit_does_not_stop_anothers_commits(tmp_path):
    """Rank after rank of one job until it is refused; then again, while another's steps commit between."""

    async def body(node, registry, holders):
        ranks = 0
        with pytest.raises(JobBudgetError) as refused:
            while ranks < 10:
                await node.done(await node.stage(1 + ranks, STATE, rank=ranks, job="greedy"))
                ranks += 1
        assert ranks == LIMIT // (2 * rounded(len(STATE)))
        told = str(refused.value)
        assert "needs 2 segments" in told
        assert "job 'greedy' has" in told and f"of the {LIMIT} bytes" in told
        assert f"job 'greedy' on this node save {(ranks + 1) * len(STATE)} bytes" in told
        assert "job_budget_bytes should be at least" in told
        state = STATE
        for step in range(1, 6):
            with pytest.raises(JobBudgetError):
                await node.stage(50 + step, STATE, rank=ranks, job="greedy")
            state = next_step(state)
            await node.save(step, state, job="modest")
            drop_older(node.store, "modest", step)
        assert node.counters.get("saves_committed") == ranks + 5
        assert node.counters.get("job_budget_refused") == 6
        assert node.store.job_bytes()["greedy"] <= LIMIT
        # What it has stays: a refusal costs nobody's committed step.
        assert {held.key.rank for held in node.store.held("greedy")} == set(range(ranks))

    in_world(tmp_path, body, job_budget_bytes=LIMIT)


def test_a_step_that_is_more_than_a_job_may_have_is_refused_before_anything_gives_way(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        with pytest.raises(JobBudgetError, match=f"{5 * len(STATE)} bytes, and one job may have {LIMIT}"):
            await node.stage(2, 5 * STATE)
        with pytest.raises(JobBudgetError, match="needs 2 segments"):
            await node.stage(2, 3 * STATE)
        assert [held.key.step for held in node.store.held("gpt")] == [1] * len(node.store.held("gpt"))
        assert node.counters.get("own_steps_dropped") == 0

    in_world(tmp_path, body, job_budget_bytes=LIMIT)


def test_a_holder_that_is_full_for_one_job_holds_for_another(tmp_path):
    """It is left alone for the one and not for the other: a rest for all would make one job's limit everybody's."""

    limit = len(STATE) + 4 * CHUNK

    async def body(node, registry, holders):
        (holder,) = holders
        await node.save(1, STATE, job="greedy")
        over = await node.stage(2, STATE, rank=1, job="greedy")
        while not node.counters.get("peers_quarantined"):
            await asyncio.sleep(0.01)
        assert holder.counters.get("job_budget_refused")
        assert node.coordinator._replicator._offers._quarantine.members("greedy") == ["node-1"]
        assert node.coordinator._replicator._offers._quarantine.members("modest") == []
        state = STATE[: 4 * CHUNK]
        for step in range(1, 4):
            state = next_step(state)
            await node.save(step, state, job="modest")
            drop_older(holder.store, "modest", step)
        assert not over.done and isinstance(over.stalled_because, JobBudgetError)
        assert "job 'greedy' has" in str(over.stalled_because)
        assert holder.store.job_bytes()["greedy"] <= limit
        # Its turn comes when there is room again.
        for held in holder.store.held("greedy"):
            if held.key.rank == 0:
                holder.store.drop(held)
        await node.done(over)

    in_world(tmp_path, body, holders=1, holders_job_budget_bytes=limit, quarantine_s=5.0)


def test_a_job_that_is_short_is_lean_and_others_are_not(tmp_path):
    async def body(node, registry, holders):
        first = await node.stage(1, STATE, job="tight")
        await node.done(first)
        other = await node.stage(1, STATE[:CHUNK], job="small")
        await node.done(other)
        assert first.lean and not other.lean

    in_world(tmp_path, body, job_budget_bytes=2 * len(STATE) + 4 * CHUNK)


def view_of(**void: int) -> rpb.ClusterView:
    return rpb.ClusterView(
        version=1,
        jobs=[rpb.JobView(job=job, void_below_session=below, next_session=99) for job, below in void.items()],
    )


def test_ranks_of_deleted_jobs_are_forgotten_and_others_are_bounded(tmp_path, monkeypatch):
    async def body(node, registry, holders):
        coordinator = node.coordinator
        for job in ("gone", "kept"):
            await node.save(1, STATE, job=job)
        await until_idle(coordinator)
        coordinator._view.view = view_of(gone=1, kept=1)  # sessions below 1: none
        coordinator.note_view()
        assert {job for job, _ in coordinator._ranks} == {"gone", "kept"}
        coordinator._view.view = view_of(gone=9, kept=1)
        coordinator.note_view()
        assert {job for job, _ in coordinator._ranks} == {"kept"}
        assert node.sessions["gone", 0, 1].over, "its trainer is told"
        assert set(coordinator._committed.seen_at) == {"kept"}
        assert coordinator.seats == 1 and [job.job for job in coordinator.progress()] == ["kept"]

        # Who still follows a step of the deleted job is told so, and not that it may have been a restart.
        with pytest.raises(FencedError, match="were deleted"):
            await coordinator.find(SaveKey("gone", 0, 2), 1)

        # A save under way is nobody's to forget, deleted or not.
        registry.waiting = True
        busy = await node.stage(2, STATE, job="kept")
        coordinator._view.view = view_of(kept=9)
        coordinator.note_view()
        assert ("kept", 0) in coordinator._ranks
        registry.waiting = False
        await node.done(busy)
        await until_idle(coordinator)
        coordinator.note_view()
        assert not coordinator._ranks and not coordinator._committed.seen_at

        # Jobs that nobody deletes: the ones that were taken first go.
        monkeypatch.setattr(coordinator_module, "RANKS_MAX", 3)
        coordinator._view.view = rpb.ClusterView()
        for number in range(6):
            await node.save(1, STATE[:CHUNK], job=f"j{number}")
            for held in node.store.held(f"j{number}"):
                node.store.drop(held)
            coordinator.sessions.leave(node.sessions.pop((f"j{number}", 0, 1)))
        await until_idle(coordinator)
        coordinator.note_view()
        assert [job for job, _ in coordinator._ranks] == ["j3", "j4", "j5"]
        assert set(coordinator._committed.seen_at) == {"j3", "j4", "j5"}
        await node.save(2, STATE[:CHUNK], job="j0")  # who comes back is known again

    in_world(tmp_path, body)


assert save_harness.BUDGET > 6 * LIMIT  # the node's own budget is not what refuses
