"""One shard from several real holders at once, over real lanes, with everything that may happen to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from fastcheckd.restore.gathering import FairTurns, Gathering
from tests.unit.fastcheckd.transfer.transfer_harness import (
    CHUNK,
    BadWire,
    eventually,
    manifest_of,
    running_holder,
    running_owner,
    some_bytes,
)

from fastcheckd.errors import CorruptError, PeerError

CHUNKS = 60
DATA = some_bytes(CHUNKS * CHUNK - 100)
KEY = manifest_of(0).key


class Stage:
    """Two holders of one shard, and a reader."""

    def __init__(self, owner, holders, digest):
        self.owner, self.holders, self.digest = owner, holders, digest
        self.into = bytearray(len(DATA))
        self.came = {}
        self.gathering = Gathering([0], FairTurns(), self._came)

    def _came(self, node_id, count):
        self.came[node_id] = self.came.get(node_id, 0) + count

    def begin(self, index, *, lane_port=None):
        ref = self.holders[index].ref(lane_port)
        return asyncio.create_task(
            self.owner.client.read_shard(
                ref, KEY, self.digest, memoryview(self.into), self.gathering.source(0, f"h{index}"), streams=1
            )
        )


@contextlib.asynccontextmanager
async def stage(tmp_path: Path, **options):
    async with contextlib.AsyncExitStack() as stack:
        holders = [
            await stack.enter_async_context(running_holder(tmp_path / str(i), timeout_s=20)) for i in range(2)
        ]
        owner = await stack.enter_async_context(running_owner(streams=1, timeout_s=20, **options))
        for holder in holders:
            digest = await owner.put(holder.ref(), DATA, manifest=manifest_of(len(DATA)))
        yield Stage(owner, holders, digest)


def play(tmp_path, story, **options):
    async def whole():
        async with stage(tmp_path, **options) as on:
            await story(on)

    async def bounded():
        async with asyncio.timeout(60):
            await whole()

    for folder in ("0", "1"):
        (tmp_path / folder).mkdir()
    asyncio.run(bounded())


def test_two_holders_give_a_shard_together(tmp_path):
    async def story(on):
        await asyncio.gather(on.begin(0), on.begin(1))
        assert on.into == DATA
        assert sum(on.came.values()) == len(DATA)
        assert on.gathering.manifest(0).digest == on.digest
        await eventually(lambda: all(h.lane.connections == 0 for h in on.holders))
        assert all(h.counters.get("lane_rejected") == 0 for h in on.holders)

    play(tmp_path, story)


def test_a_holder_gone_silent_costs_no_timeout_and_what_it_sent_stays(tmp_path):
    async def story(on):
        with BadWire(on.holders[0].lane.port, towards_client=True) as wire:
            wire.stall_at = 5 * CHUNK + 1000
            silent = on.begin(0, lane_port=wire.port)
            await eventually(wire.stalled.is_set)
            started = time.monotonic()
            await on.begin(1)
            with pytest.raises(PeerError):
                await silent
            assert time.monotonic() - started < 10, "half of the timeout of 20 s"
        assert on.into == DATA
        assert sum(on.came.values()) == len(DATA)
        assert on.came["h0"] >= 3 * CHUNK
        assert on.gathering.was_too_slow(0, "h0")

    play(tmp_path, story)


def test_a_bad_chunk_at_one_holder_comes_from_the_other_and_the_holder_is_told(tmp_path):
    async def story(on):
        (held,) = on.holders[0].store.held()
        held.segment.view[held.offset + 9] ^= 1  # in the first chunk, which whoever begins first is asked for
        first = on.begin(0)
        await eventually(lambda: on.gathering.bad_chunks(0, "h0") > 0)
        await asyncio.gather(first, on.begin(1))
        assert on.into == DATA
        assert on.came["h1"] >= CHUNK
        assert on.came["h0"] >= CHUNK, "its other chunks are good"
        assert on.owner.counters.get("corrupt_reported") == 1
        await eventually(lambda: on.holders[0].store.held() == [])
        assert len(on.holders[1].store.held()) == 1

    play(tmp_path, story)


def test_a_byte_flipped_on_the_wire_is_asked_for_again_from_the_only_holder(tmp_path):
    async def story(on):
        with BadWire(on.holders[0].lane.port, towards_client=True) as wire:
            wire.flip_at = [3 * CHUNK]
            await on.begin(0, lane_port=wire.port)
        assert on.into == DATA
        assert on.gathering.bad_chunks(0, "h0") == 1
        await asyncio.sleep(0)
        assert len(on.holders[0].store.held()) == 1

    play(tmp_path, story)


def test_a_copy_that_is_bad_throughout_is_given_up(tmp_path):
    async def story(on):
        (held,) = on.holders[0].store.held()
        for chunk in range(CHUNKS):
            held.segment.view[held.offset + chunk * CHUNK] ^= 1
        with pytest.raises(CorruptError):
            await on.begin(0)
        assert on.gathering.manifest(0) is None
        await on.begin(1)
        assert on.into == DATA

    play(tmp_path, story)


def test_a_cancelled_read_lets_go_of_the_memory(tmp_path):
    async def story(on):
        with BadWire(on.holders[0].lane.port, towards_client=True) as wire:
            wire.stall_at = 3 * CHUNK
            reading = on.begin(0, lane_port=wire.port)
            await eventually(wire.stalled.is_set)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
        await on.begin(1)
        assert on.into == DATA
        await eventually(lambda: on.holders[0].lane.connections == 0)

    play(tmp_path, story)


def test_a_chunk_that_does_not_exist_is_not_sent(tmp_path):
    """See the lane server's own tests for what else a reader may say."""

    async def story(on):
        source = on.gathering.source(0, "h0")

        class Wrong:
            def describe(self, manifest, table):
                return source.describe(manifest, table)

            def reader(self, end, bad):
                return contextlib.nullcontext(Asking())

        class Asking:
            def next(self, still_wanted):
                return [CHUNKS + 7]

        with pytest.raises(PeerError, match="WANT"):
            await on.owner.client.read_shard(
                on.holders[0].ref(), KEY, on.digest, memoryview(on.into), Wrong(), streams=1
            )
        assert on.holders[0].counters.get("lane_rejected") == 1

    play(tmp_path, story)


def test_each_load_may_ask_for_an_equal_part():
    turns = FairTurns(100)
    assert turns.allowance_bytes == 100
    with turns.taking_part():
        assert turns.allowance_bytes == 100
        with turns.taking_part(), turns.taking_part(), turns.taking_part():
            assert turns.allowance_bytes == 25
    assert turns.allowance_bytes == 100
