"""Saves while the registry is silent: replicated all the same, called provisional, committed when it is back."""

import asyncio

from tests.unit.fastcheckd.save.save_harness import BUDGET, CHUNK, next_step, noise, running_world
from tests.unit.fastcheckd.transfer.transfer_harness import eventually

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.errors import SupersededError

STATE = noise(8 * CHUNK)


def in_world(tmp_path, body, **options):
    async def run():
        async with running_world(tmp_path, **options) as (node, registry, holders):
            await body(node, registry, holders)

    asyncio.run(run())


def state_of(step):
    """Each step differs from the one before in every chunk."""
    state = bytearray(STATE)
    for at in range(0, len(state), CHUNK):
        state[at + step] ^= 1
    return bytes(state)


def copy_of(holders, step):
    """The step's bytes from what the holders have."""
    parts = {}
    for holder in holders:
        for held in holder.store.held("gpt", step):
            into = bytearray(held.manifest.bytes)
            holder.store.copy_to(held, memoryview(into))
            parts[held.manifest.offset] = bytes(into)
    return b"".join(data for _, data in sorted(parts.items()))


def held_steps(store):
    return sorted({held.key.step for held in store.held("gpt")})


async def provisional(node, step, state=None):
    save = await node.stage(step, state or state_of(step))
    await eventually(lambda: save.sent, within_s=60)
    assert save.provisional, save.error
    return save


def test_ten_provisional_steps_leave_the_committed_one_and_the_newest_three(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, state_of(1))
        registry.silent = True
        used = []
        for step in range(2, 12):
            await provisional(node, step)
            used.append([h.reserved_bytes for h in holders] + [node.store.usage().used_bytes])
        await eventually(lambda: held_steps(node.store) == [1, 9, 10, 11])
        # The one that pushed the fourth newest out tells its holders with the next put.
        for holder in holders:
            assert held_steps(holder.store) == [1, 8, 9, 10, 11]
            assert holder.counters.get("provisional_dropped") == 6
        assert used[4] == used[-1], "memory stays the same"
        for step in (1, 8, 9, 10, 11):
            assert copy_of(holders, step) == state_of(step)

    in_world(tmp_path, body, codec="always")


def test_a_reported_step_is_never_given_up_nor_dropped(tmp_path):
    """Its report may have become a commit whose answer was lost."""

    async def body(node, registry, holders):
        await node.save(1, state_of(1))
        registry.silent = True
        reported = await provisional(node, 2)
        registry.silent, registry.waiting = False, True
        await eventually(lambda: reported.reported, within_s=60)
        registry.silent = True
        for step in range(3, 10):
            await provisional(node, step)
        await eventually(lambda: held_steps(node.store) == [1, 2, 7, 8, 9])
        assert not reported.done
        assert copy_of(holders, 2) == state_of(2)

    in_world(tmp_path, body)


def test_a_replicated_step_whose_report_is_not_answered_becomes_provisional(tmp_path):
    async def body(node, registry, holders):
        registry.waiting = True
        save = await node.stage(1, STATE)
        await eventually(lambda: save.reported)
        registry.silent = True
        await eventually(lambda: save.provisional, within_s=60)
        # However long it lasts.
        await eventually(lambda: save.idle_s() > 1.0)
        assert not save.done
        registry.silent = registry.waiting = False
        await node.done(save)

    in_world(tmp_path, body, provisional_after_s=0.2, commit_timeout_s=0.5)


def test_a_holder_lost_meanwhile_is_replaced_when_the_registry_is_back(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        registry.silent = True
        save = await provisional(node, 2, next_step(STATE))
        lost = rpb.ReportResponse(
            state=rpb.REPORT_STATE_REFUSED,
            error=pb.ErrorDetail(code=pb.ERROR_CODE_HOLDER_LOST),
            lost_holders=[registry.holders[0].node],
        )
        registry.answers = [lost]
        registry.holders = registry.holders[1:]
        registry.silent = False
        await node.done(save)
        names = {h.node_id for s in registry.reports[-1].record.shards for h in s.holders}
        assert names == {"node-2"}

    in_world(tmp_path, body)


def test_nobody_is_known_then_the_step_waits_as_before(tmp_path):
    async def body(node, registry, holders):
        await node.session()
        registry.silent = True
        save = await node.stage(1, STATE)
        await eventually(lambda: save.stalled_because is not None, within_s=60)
        assert save.state == tpb.SAVE_STATE_STAGED
        registry.silent = False
        await node.done(save)

    in_world(tmp_path, body)


def test_short_memory_goes_to_the_newer_step(tmp_path):
    async def body(node, registry, holders):
        big = noise(7 << 20)
        await node.save(1, big)
        registry.silent = True
        for step in range(2, 8):
            save = await provisional(node, step, next_step(big, step))
        assert held_steps(node.store)[0] == 1 and held_steps(node.store)[-1] == 7
        registry.silent = False
        await node.done(save)

    in_world(tmp_path, body)


def test_provisional_steps_that_another_rank_did_not_save_give_way_when_memory_is_short(tmp_path):
    """They are reported once there is a registry again, and wait for a rank that will never save them."""

    async def body(node, registry, holders):
        await node.save(1, state_of(1))
        registry.silent = True
        waiting = [await provisional(node, step) for step in (2, 3)]
        registry.waiting, registry.absent, registry.silent = True, [1], False
        await eventually(lambda: all(isinstance(save.stalled_because, SupersededError) for save in waiting))
        node.store.allocate(BUDGET - 9 * len(STATE) // 2, "staging.other.0.1")
        for step in range(4, 8):
            await node.stage(step, state_of(step % 8))
        assert all(save.done for save in waiting)
        registry.waiting = False
        await node.save(8, state_of(0))

    in_world(tmp_path, body, stall_after_s=0.05)
