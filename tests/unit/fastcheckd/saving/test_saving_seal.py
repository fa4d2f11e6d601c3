"""What a trainer says of its state, when the save begins or when it is sealed."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.fastcheckd.saving.saving_harness import CHUNK, layout_of, noise, running_world

from fastcheck_proto.v1 import layout_pb2
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.errors import InvalidRequestError, NotHeldError

STATE = noise(12 * CHUNK)


def in_world(tmp_path, body):
    async def run():
        async with running_world(tmp_path) as (node, _registry, holders):
            await body(node, holders)

    asyncio.run(run())


def said(layout: layout_pb2.StateLayout | None = None, **fields: object) -> tpb.PushSeal:
    return tpb.PushSeal(
        **{"header_offset": len(STATE) - 10, "header_bytes": 10, "layout": layout, **fields}  # type: ignore[arg-type]
    )


async def begin(node, seal=None):
    request = tpb.BeginSaveRequest(
        job="gpt", world_size=1, session=1, step=1, state_bytes=len(STATE), ahead=seal or said()
    )
    save, _ = await node.room.begin(request)
    save.segment.view[: len(STATE)] = STATE
    return save


def copies(holders):
    found = {}
    for holder in holders:
        for held in holder.store.held("gpt", 1):
            into = bytearray(held.manifest.bytes)
            holder.store.copy_to(held, memoryview(into))
            found[held.manifest.offset] = bytes(into)
    return b"".join(data for _, data in sorted(found.items()))


def test_what_was_said_at_first_need_not_be_said_again(tmp_path):
    async def body(node, holders):
        save = await begin(node)
        await node.room.seal(save.save_id, None)
        await node.done(save)
        assert copies(holders) == STATE

    in_world(tmp_path, body)


def test_a_seal_that_says_something_else_counts(tmp_path):
    async def body(node, holders):
        save = await begin(node)
        seal = tpb.SealSaveRequest(header_offset=5, header_bytes=7, layout=layout_of(CHUNK, 11 * CHUNK))
        await node.room.seal(save.save_id, seal)
        await node.done(save)
        (held, *_) = holders[0].store.held("gpt", 1)
        assert (held.manifest.header_offset, held.manifest.header_bytes) == (5, 7)
        assert copies(holders) == STATE

    in_world(tmp_path, body)


def test_what_is_wrong_with_a_state_is_said_by_its_seal(tmp_path):
    async def body(node, holders):
        bad = layout_of(CHUNK)  # of twelve
        for wrong in (said(bad), said(header_bytes=0), said(header_offset=len(STATE))):
            save = await begin(node, wrong)
            with pytest.raises(InvalidRequestError):
                await node.room.seal(save.save_id, None)
            node.room.abandon(save.save_id)
        assert not copies(holders)

    in_world(tmp_path, body)


def test_a_seal_needs_something_said_once(tmp_path):
    async def body(node, holders):
        request = tpb.BeginSaveRequest(job="gpt", world_size=1, session=1, step=1, state_bytes=len(STATE))
        save, _ = await node.room.begin(request)
        with pytest.raises(InvalidRequestError, match="nothing was said"):
            await node.room.seal(save.save_id, None)

    in_world(tmp_path, body)


def test_a_save_given_back_while_its_seal_is_read_is_not_known_any_more(tmp_path):
    async def body(node, holders):
        save = await begin(node)
        sealing = asyncio.create_task(node.room.seal(save.save_id, None))
        await asyncio.sleep(0)
        node.room.abandon(save.save_id)
        with pytest.raises(NotHeldError):
            await sealing
        assert save.task is None and not copies(holders)

    in_world(tmp_path, body)
