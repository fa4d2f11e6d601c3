"""A restore's reads from holders that encode: each chunk is asked for, decoded into its place, and checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from fastcheckd.restore.gathering import FairTurns, Gathering
from tests.unit.fastcheckd.transfer.transfer_harness import (
    CHUNK,
    BadWire,
    Holder,
    Owner,
    eventually,
    manifest_of,
    running_holder,
    running_owner,
)

CHUNKS = 40
#: Weights, which shrink by something.
DATA = bytearray(
    (np.random.default_rng(3).normal(size=CHUNKS * CHUNK // 4) * 0.02).astype(np.float32).tobytes()
)
KEY = manifest_of(0).key


class Stage:
    """Two holders of one shard, and a reader."""

    def __init__(self, owner: Owner, holders: list[Holder], digest: bytes) -> None:
        self.owner, self.holders, self.digest = owner, holders, digest
        self.into = bytearray(len(DATA))
        self.came_bytes = 0
        self.gathering = Gathering([0], FairTurns(), self._came)

    def _came(self, node_id: str, count: int) -> None:
        self.came_bytes += count

    def begin(self, index: int, *, lane_port: int | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(
            self.owner.client.read_shard(
                self.holders[index].ref(lane_port),
                KEY,
                self.digest,
                memoryview(self.into),
                self.gathering.source(0, f"h{index}"),
                streams=2,
            )
        )

    def sent(self, what: str) -> int:
        return sum(holder.counters.get(what) for holder in self.holders)


def play(
    tmp_path: Path, story: Callable[[Stage], Awaitable[None]], *, codec: str = "always", decodes: bool = True
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
            holders = []
            for name in ("0", "1"):
                (tmp_path / name).mkdir()
                holder = running_holder(tmp_path / name, timeout_s=20, codec=codec)
                holders.append(await stack.enter_async_context(holder))
            owner = await stack.enter_async_context(running_owner(streams=2, timeout_s=20, decodes=decodes))
            for holder in holders:
                digest = await owner.put(holder.ref(), DATA, manifest=manifest_of(len(DATA)))
            await story(Stage(owner, holders, digest))

    asyncio.run(whole())


def test_two_holders_give_a_shard_together_in_fewer_bytes(tmp_path: Path) -> None:
    async def story(on: Stage) -> None:
        await asyncio.gather(on.begin(0), on.begin(1))
        assert on.into == DATA
        assert on.came_bytes == len(DATA), "progress is told in bytes of the state"
        assert 0.5 * len(DATA) < on.owner.counters.get("bytes_received") < 0.95 * len(DATA)
        assert on.sent("chunks_encoded") >= CHUNKS
        await eventually(lambda: all(h.lane.connections == 0 for h in on.holders))
        assert on.sent("lane_rejected") == 0

    play(tmp_path, story)


@pytest.mark.parametrize(("codec", "decodes"), [("always", False), ("never", True)])
def test_asked_for_chunks_come_raw_when_either_side_wants_them_so(
    tmp_path: Path, codec: str, decodes: bool
) -> None:
    async def story(on: Stage) -> None:
        await on.begin(0)
        assert on.into == DATA
        assert on.owner.counters.get("bytes_received") == len(DATA)
        assert on.sent("chunks_encoded") == 0

    play(tmp_path, story, codec=codec, decodes=decodes)


def test_a_chunk_gone_bad_before_it_was_encoded_comes_from_the_other_holder(tmp_path: Path) -> None:
    async def story(on: Stage) -> None:
        (held,) = on.holders[0].store.held()
        held.segment.view[held.offset + 9] ^= 1
        first = on.begin(0)
        await eventually(lambda: on.gathering.bad_chunks(0, "h0") > 0)
        await asyncio.gather(first, on.begin(1))
        assert on.into == DATA
        await eventually(lambda: on.holders[0].store.held() == [])

    play(tmp_path, story)


def test_a_byte_flipped_in_an_encoded_chunk_is_asked_for_again(tmp_path: Path) -> None:
    async def story(on: Stage) -> None:
        with BadWire(on.holders[0].lane.port, towards_client=True) as wire:
            wire.flip_at = [64 + 500]
            await on.begin(0, lane_port=wire.port)
        assert on.into == DATA
        assert on.gathering.bad_chunks(0, "h0") >= 1
        assert len(on.holders[0].store.held()) == 1, "its copy is good"

    play(tmp_path, story)


def test_a_read_that_is_called_off_among_encoded_chunks_lets_go_of_the_memory_at_both_ends(
    tmp_path: Path,
) -> None:
    async def story(on: Stage) -> None:
        with BadWire(on.holders[0].lane.port, towards_client=True) as wire:
            wire.stall_at = 3 * CHUNK
            reading = on.begin(0, lane_port=wire.port)
            await eventually(wire.stalled.is_set)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
        await eventually(lambda: on.holders[0].lane.connections == 0)
        (held,) = on.holders[0].store.held()
        on.holders[0].store.drop(held)  # nobody has it pinned any more
        await on.begin(1)
        assert on.into == DATA

    play(tmp_path, story)
