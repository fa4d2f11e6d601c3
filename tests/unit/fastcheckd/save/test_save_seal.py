"""Segments from their loan to the seal: what a trainer says of its state, and what becomes of memory it left."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.unit.fastcheckd.save.save_harness import CHUNK, layout_of, noise, running_world

from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.errors import InvalidRequestError

STATE = noise(12 * CHUNK)


def in_world(tmp_path, body):
    async def run():
        async with running_world(tmp_path) as (node, _registry, holders):
            await body(node, holders)

    asyncio.run(run())


async def filled(node, **said):
    """A session whose trainer has filled a segment, and how it would seal it."""
    stream = await node.session()
    segment_id, segment = await node.segment(stream, len(STATE))
    segment.view[: len(STATE)] = STATE
    said = {"header_offset": len(STATE) - 10, "header_bytes": 10, "state_bytes": len(STATE), **said}
    return stream, tpb.Sealed(segment_id=segment_id, step=1, **said)


def copies(holders):
    found = {}
    for holder in holders:
        for held in holder.store.held("gpt", 1):
            into = bytearray(held.manifest.bytes)
            holder.store.copy_to(held, memoryview(into))
            found[held.manifest.offset] = bytes(into)
    return b"".join(data for _, data in sorted(found.items()))


def test_a_layout_that_is_said_is_how_the_state_is_cut(tmp_path):
    async def body(node, holders):
        layout = layout_of(CHUNK, 11 * CHUNK)
        save = await node.seal(*await filled(node, header_offset=5, header_bytes=7, layout=layout))
        await node.done(save)
        (held, *_) = holders[0].store.held("gpt", 1)
        assert (held.manifest.header_offset, held.manifest.header_bytes) == (5, 7)
        assert copies(holders) == STATE

    in_world(tmp_path, body)


def test_what_is_wrong_with_a_state_is_told_and_its_segment_comes_back(tmp_path):
    async def body(node, holders):
        bad = layout_of(CHUNK)  # of twelve
        for wrong in (
            {"layout": bad}, {"header_bytes": 0}, {"header_offset": len(STATE)}, {"state_bytes": 0},
            {"state_bytes": 13 * len(STATE)},
        ):  # fmt: skip
            stream, sealed = await filled(node, **wrong)
            with pytest.raises(InvalidRequestError):
                await node.seal(stream, sealed)
            assert sealed.segment_id not in stream.held
        assert not copies(holders)
        assert node.store.count_segments("staging.gpt.0.1") <= 4
        await node.done(await node.seal(*await filled(node)))
        assert copies(holders) == STATE

    in_world(tmp_path, body)


def test_a_segment_is_sealed_once_and_a_loan_that_is_over_is_not_known(tmp_path):
    async def body(node, holders):
        stream, sealed = await filled(node)
        save = await node.seal(stream, sealed)
        await node.coordinator.sealed(stream, sealed)  # a trainer that lost its stream says it again
        assert await node.coordinator.find(save.key, 1) is save
        await node.done(save)
        node.coordinator.resume()
        sealed.step = 2
        await node.coordinator.sealed(stream, sealed)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if ("refused", 1, 2) in stream._outbox:
                break
        assert "not known here" in stream._outbox["refused", 1, 2].refused.error.message

    in_world(tmp_path, body)


def test_memory_that_a_stopped_process_may_write_to_is_not_used_again(tmp_path):
    """A newer process takes the rank over: of the older one's segments none is lent again, sealed ones stay."""

    async def body(node, holders):
        stream, sealed = await filled(node)
        save = await node.seal(stream, sealed)
        lent = list(stream.held.values())
        newer = await node.session(number=2)
        assert stream.over and "fenced" in stream._outbox and not stream.held
        await node.segment(newer, len(STATE))
        await asyncio.sleep(0.1)
        assert not any(segment.path.exists() for segment in lent)
        assert save.segment.path.exists()
        assert not {s.name for s in newer.held.values()} & {save.segment.name, *(s.name for s in lent)}
        stale = tpb.Sealed(segment_id="x", step=7, state_bytes=1)
        await node.coordinator.sealed(stream, stale)

    in_world(tmp_path, body)


def test_a_stream_that_ends_gives_its_memory_back_and_the_same_process_gets_it_again(tmp_path):
    async def body(node, holders):
        stream = await node.session()
        await node.segment(stream, len(STATE))
        for _ in range(100):
            await asyncio.sleep(0.01)
            if node.store.count_segments("staging.gpt.0.1") == 4:
                break
        node.coordinator.sessions.leave(stream)
        await asyncio.sleep(0.1)
        usage = node.store.usage()
        assert usage.used_bytes == usage.free_bytes, "what is kept warm goes when somebody needs it"
        node.sessions.clear()
        again = await node.session()
        assert again is not stream
        await node.segment(again, len(STATE))

    in_world(tmp_path, body)


def test_ten_thousand_small_saves_do_not_grow_anything(tmp_path):
    async def body(node, holders):
        small = STATE[:CHUNK]

        def sizes():
            (rank,) = node.coordinator._ranks.values()
            (stream,) = node.sessions.values()
            assert len(rank.spare) + len(stream.held) <= rank.contract.segments
            return [
                len(rank.saves), len(rank.finding), len(rank.next_sessions),
                len(node.coordinator._outcomes._jobs), node.store.count_segments("staging.gpt.0.1"),
            ]  # fmt: skip

        async def drop(below):
            for store in (node.store, *(holder.store for holder in holders)):
                for held in store.held("gpt"):
                    if held.key.step < below:
                        store.drop(held)

        node.coordinator._replicator.run = _committed  # what is sent where is none of this test's business
        most = [0] * 5
        await node.stage(0, small)
        for step in range(1, 10_000):
            await node.done(await node.stage(step, small))
            (stream,) = node.sessions.values()
            stream._outbox.clear()  # its trainer reads
            if step > 100:
                deadline = time.monotonic() + 10  # what has ended is forgotten by tasks of its own
                while any(now > before for now, before in zip(sizes(), most, strict=True)):
                    assert time.monotonic() < deadline, (step, sizes(), most)
                    await asyncio.sleep(0)
            else:
                most = [max(pair) for pair in zip(sizes(), most, strict=True)]

    in_world(tmp_path, body)


async def _committed(save):
    return None
