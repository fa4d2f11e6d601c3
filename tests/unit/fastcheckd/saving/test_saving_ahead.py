"""Steps that are sent while their trainers copy: in time, never early, and taken back without a trace."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fastcheckd.saving.saving_harness import CHUNK, layout_of, next_step, noise, running_world
from tests.unit.fastcheckd.transfer.transfer_harness import eventually

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import layout_pb2
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.errors import InvalidRequestError, NotHeldError
from fastcheckd.saving.ahead import worth_it

STATE = noise(12 * CHUNK)
LOSSY = layout_pb2.Precision(momentum=layout_pb2.MOMENTUM_CODING_INDEX8)


def in_world(tmp_path, body, **options):
    async def run():
        async with running_world(tmp_path, **{"overlap_staging": "always", **options}) as (
            node,
            registry,
            holders,
        ):
            await body(node, registry, holders)

    asyncio.run(run())


def said(state: bytes, layout: layout_pb2.StateLayout | None = None, **fields: object) -> tpb.PushSeal:
    return tpb.PushSeal(
        **{"header_offset": len(state) - 10, "header_bytes": 10, "layout": layout, **fields}  # type: ignore[arg-type]
    )


async def begin(node, step, state, seal=None, session=1):
    """A save of which nothing is copied; the memory holds what no copy may ever show."""
    request = tpb.BeginSaveRequest(
        job="gpt", world_size=2, session=session, step=step, state_bytes=len(state), ahead=seal or said(state)
    )
    save, _ = await node.room.begin(request)
    save.segment.view[: len(state)] = b"\xee" * len(state)
    return save


def fill(node, save, state, stop, start=0):
    save.segment.view[start:stop] = state[start:stop]
    assert node.room.fill(save.save_id, stop)


def copies(holders, step):
    found = {}
    for holder in holders:
        for held in holder.store.held("gpt", step):
            if held.kind == pb.REPLICA_KIND_COPY:
                with holder.store.reading(held) as full:
                    found[held.manifest.offset] = bytes(full.view)
    return b"".join(data for _, data in sorted(found.items()))


def received(holders):
    return sum(holder.counters.get("bytes_received") for holder in holders)


def untouched(node, registry, holders, step, reserved):
    """Nothing of a step is left anywhere."""
    return (
        not any(r.step == step for r in registry.reports)
        and not node.store.held("gpt", step)
        and not any(holder.store.held("gpt", step) for holder in holders)
        and not any(holder.desk.transfers for holder in holders)
        and [holder.reserved_bytes for holder in holders] == reserved
    )


def test_chunks_arrive_before_the_seal_and_nothing_counts_before_it(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, 4 * CHUNK)
        await eventually(lambda: received(holders) >= 4 * CHUNK)
        fill(node, save, STATE, len(STATE), 4 * CHUNK)
        await eventually(lambda: received(holders) >= len(STATE))
        assert not save.sealed and not registry.reports
        assert not any(holder.store.held("gpt") for holder in holders) and not node.store.held("gpt")
        assert node.room.replicating
        assert registry.placed_ahead[1] == [True], "the other ranks are not told before the seal"
        registry.waiting = True
        assert await node.room.seal(save.save_id, None) is save
        await eventually(lambda: registry.placed_ahead[1] == [True, False])
        registry.waiting = False
        await node.done(save)
        assert copies(holders, 1) == STATE
        assert received(holders) == len(STATE), "nothing was sent twice"
        assert node.counters.get("saves_ahead") == 1 and not node.counters.get("saves_ahead_stopped")

    in_world(tmp_path, body)


@settings(max_examples=12, deadline=None)
@given(
    stops=st.lists(st.integers(0, len(STATE)), max_size=8),
    codec=st.sampled_from(["always", "never"]),
    lengths=st.sampled_from([(), (CHUNK // 2, 3 * CHUNK, CHUNK // 2, 8 * CHUNK)]),
    seed=st.integers(0, 99),
)
def test_whatever_the_pace_of_the_copy_what_arrives_is_the_state(
    tmp_path_factory, stops, codec, lengths, seed
):
    async def body(node, registry, holders):
        layout = layout_of(*lengths) if lengths else None
        wanted = STATE
        for step in (1, 2):
            save = await begin(node, step, wanted, said(wanted, layout))
            at = 0
            for stop in sorted(stops):
                fill(node, save, wanted, stop, at)
                at = max(at, stop)
                if random.Random(seed + stop).random() < 0.5:
                    before = received(holders)
                    await asyncio.sleep(0.005 * (received(holders) == before))
            save.segment.view[at : len(wanted)] = wanted[at:]
            await node.room.seal(save.save_id, None)
            await node.done(save)
            assert copies(holders, step) == wanted
            wanted = next_step(wanted, at=seed)

    in_world(tmp_path_factory.mktemp("world"), body, codec=codec)


@pytest.mark.parametrize("codec", ["always", "never"])
@pytest.mark.parametrize("how", ["abandoned", "out of sight", "begun anew", "another process"])
def test_a_copy_given_up_midway_leaves_no_step_and_no_bytes_behind(tmp_path, codec, how):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        await node.save(2, next_step(STATE))
        reserved = [holder.reserved_bytes for holder in holders]
        own = node.store.usage().used_bytes - node.store.usage().free_bytes
        before = received(holders)
        third = next_step(next_step(STATE), at=7 * CHUNK)
        save = await begin(node, 3, third)
        fill(node, save, third, 10 * CHUNK)
        await eventually(lambda: received(holders) > before and all(h.desk.transfers for h in holders))
        if how == "abandoned":
            node.room.abandon(save.save_id)
        elif how == "out of sight":
            node.room.lost_sight(save.save_id)
        elif how == "begun anew":
            await node.stage(4, third)
        else:
            registry.session = 2
            await begin(node, 3, third, session=2)
            node.room.abandon(next(iter(node.room._reserved)))
        await eventually(lambda: untouched(node, registry, holders, 3, reserved) or how == "begun anew")
        if how == "begun anew":
            await eventually(lambda: node.room._ranks["gpt", 0].saves[-1].done)
            assert not any(holder.store.held("gpt", 3) for holder in holders)
            assert copies(holders, 4) == third
            return
        assert copies(holders, 2) == next_step(STATE) and copies(holders, 1) == STATE
        node.room.abandon(save.save_id)
        usage = node.store.usage
        await eventually(lambda: usage().used_bytes - usage().free_bytes == own)
        with pytest.raises(NotHeldError):
            await node.room.seal(save.save_id, None)
        assert node.counters.get("saves_ahead_stopped") >= 1
        assert not node.counters.get("peers_quarantined") and not node.counters.get("saves_failed")

    in_world(tmp_path, body, codec=codec)


def test_a_trainer_that_pauses_costs_the_lead_and_neither_the_step_nor_a_holder(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, 2 * CHUNK)
        await eventually(lambda: node.counters.get("saves_ahead_stopped") == 1)
        await eventually(lambda: not any(holder.desk.transfers for holder in holders))
        fill(node, save, STATE, len(STATE), 2 * CHUNK)
        await node.room.seal(save.save_id, None)
        await node.done(save)
        assert copies(holders, 1) == STATE
        assert not node.counters.get("peers_quarantined") and save.resent_shards == 0

    in_world(tmp_path, body, transfer_timeout_s=0.8)


def test_a_pause_before_the_seal_is_no_fault_either(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, len(STATE))
        await eventually(lambda: node.counters.get("saves_ahead_stopped") == 1)
        await node.room.seal(save.save_id, None)
        await node.done(save)
        assert copies(holders, 1) == STATE and not node.counters.get("peers_quarantined")

    in_world(tmp_path, body, transfer_timeout_s=0.8)


def test_holders_are_not_troubled_before_there_is_something_to_send(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, 2 * CHUNK)  # the first of two shards
        await eventually(lambda: received(holders) == 2 * CHUNK)
        assert [bool(holder.desk.transfers) for holder in holders] == [True, False]
        node.room.abandon(save.save_id)
        await eventually(lambda: not any(holder.desk.transfers for holder in holders))

    in_world(tmp_path, body)


def test_a_holder_that_fails_before_the_seal_is_replaced_and_the_step_goes_on(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, 7 * CHUNK)
        await eventually(lambda: all(holder.desk.transfers for holder in holders))
        holders[0].desk.close()
        registry.holders = registry.holders[1:]
        # It is noticed now where bytes are under way to it, else with the last ones.
        fill(node, save, STATE, len(STATE), 7 * CHUNK)
        await node.room.seal(save.save_id, None)
        await node.done(save)
        assert node.counters.get("peers_quarantined") >= 1
        assert copies(holders[1:], 1) == STATE

    in_world(tmp_path, body)


def test_a_step_waits_for_the_one_before_and_is_sent_against_it(tmp_path):
    async def body(node, registry, holders):
        registry.unplaceable = {1}
        first = await node.stage(1, STATE)
        second = await begin(node, 2, next_step(STATE))
        fill(node, second, next_step(STATE), len(STATE))
        await eventually(lambda: first.stalled_because is not None)
        assert not received(holders)
        registry.unplaceable = set()
        await node.done(first)
        await eventually(lambda: received(holders) > len(STATE))
        await node.room.seal(second.save_id, None)
        await node.done(second)
        assert sum(holder.counters.get("patches_applied") for holder in holders) == 2
        assert copies(holders, 2) == next_step(STATE)

    in_world(tmp_path, body)


def test_a_seal_that_says_something_else_counts(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, len(STATE))
        await eventually(lambda: received(holders) >= len(STATE))
        seal = tpb.SealSaveRequest(header_offset=5, header_bytes=7, layout=layout_of(CHUNK, 11 * CHUNK))
        await node.room.seal(save.save_id, seal)
        await node.done(save)
        (held, *_) = holders[0].store.held("gpt", 1)
        assert (held.manifest.header_offset, held.manifest.header_bytes) == (5, 7)
        assert copies(holders, 1) == STATE

    in_world(tmp_path, body)


def test_what_is_wrong_with_a_state_is_said_by_its_seal_and_nothing_is_sent(tmp_path):
    async def body(node, registry, holders):
        bad = layout_of(CHUNK)  # of twelve
        for wrong in (said(STATE, bad), said(STATE, header_bytes=0), said(STATE, header_offset=len(STATE))):
            save = await begin(node, 1, STATE, wrong)
            fill(node, save, STATE, len(STATE))
            with pytest.raises(InvalidRequestError):
                await node.room.seal(save.save_id, None)
            node.room.abandon(save.save_id)
        assert not received(holders)

    in_world(tmp_path, body)


def test_a_seal_needs_something_said_once(tmp_path):
    async def body(node, registry, holders):
        request = tpb.BeginSaveRequest(job="gpt", world_size=1, session=1, step=1, state_bytes=len(STATE))
        save, _ = await node.room.begin(request)
        assert not node.room.fill(save.save_id, 10) and not node.room.fill("unknown", 10)
        with pytest.raises(InvalidRequestError, match="nothing was said"):
            await node.room.seal(save.save_id, None)

    in_world(tmp_path, body)


def test_what_is_made_lossy_waits_for_the_seal(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE, said(STATE, layout_of(4 * CHUNK, 8 * CHUNK, precision=LOSSY)))
        fill(node, save, STATE, len(STATE))
        assert save.task is not None
        await asyncio.wait({save.task}, timeout=60)
        assert save.task.done() and not received(holders)
        await node.room.seal(save.save_id, None)
        await node.done(save)
        assert save.lossy and copies(holders, 1) == STATE  # opaque bytes stay as they are

    in_world(tmp_path, body)


@pytest.mark.parametrize("policy", ["never", "auto"])
def test_without_the_overlap_what_was_said_at_first_still_need_not_be_said_again(tmp_path, policy):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)  # too small for `auto`, whatever the machine
        assert save.filling is None and not node.room.fill(save.save_id, len(STATE))
        save.segment.view[: len(STATE)] = STATE
        await node.room.seal(save.save_id, None)
        await node.done(save)
        assert copies(holders, 1) == STATE

    in_world(tmp_path, body, overlap_staging=policy)


def test_the_overlap_is_chosen_where_cores_are_many_and_the_state_is_large():
    large = 1 << 30
    assert (
        worth_it("auto", large, 64) and not worth_it("auto", large, 2) and not worth_it("auto", 1 << 20, 64)
    )
    assert worth_it("always", 1, 1) and not worth_it("never", large, 64)


def test_stopping_the_process_ends_what_is_sent_ahead(tmp_path):
    async def body(node, registry, holders):
        save = await begin(node, 1, STATE)
        fill(node, save, STATE, 7 * CHUNK)
        await eventually(lambda: all(holder.desk.transfers for holder in holders))
        await node.room.stop()
        assert save.task is not None and save.task.done()
        await eventually(lambda: not any(holder.desk.transfers for holder in holders))

    in_world(tmp_path, body)
