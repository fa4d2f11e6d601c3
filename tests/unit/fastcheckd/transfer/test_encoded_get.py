"""Reading a shard encoded: over a real lane, from a real store, and only by readers that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from transfer_harness import (
    CHUNK,
    BadWire,
    Holder,
    Owner,
    eventually,
    manifest_of,
    running_holder,
    running_owner,
)

from fastcheckd.errors import CorruptError, PeerError

Story = Callable[[Holder, Owner], Awaitable[None]]
COMPRESSIBLE = 4 * CHUNK + 40


def play(
    directory: Path, story: Story, *, codec: str = "always", decodes: bool = True, streams: int = 2
) -> None:
    async def run() -> None:
        async with (
            running_holder(directory, codec=codec) as holder,
            running_owner(streams=streams, decodes=decodes) as owner,
        ):
            await story(holder, owner)

    asyncio.run(run())


def mixed_bytes() -> bytearray:
    """Chunks of weights, which shrink, then some of noise, which do not."""
    rng = np.random.default_rng(3)
    weights = (rng.normal(size=COMPRESSIBLE // 4) * 0.02).astype(np.float32).tobytes()
    return bytearray(weights + rng.bytes(2 * CHUNK + 7))


async def read(holder: Holder, owner: Owner, digest: bytes, size: int, port: int | None = None) -> bytearray:
    into = bytearray(size)
    key = manifest_of(0).key
    await owner.client.get_shard(holder.ref(port), key, digest, memoryview(into), owner.progress.append)
    return into


@pytest.mark.parametrize("streams", [1, 3])
def test_a_reader_that_can_decode_gets_fewer_bytes_and_the_same_shard(tmp_path: Path, streams: int) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = mixed_bytes()
        digest = await owner.put(holder.ref(), data)
        before = holder.counters.get("bytes_sent")
        assert await read(holder, owner, digest, len(data)) == data
        sent = holder.counters.get("bytes_sent") - before
        assert 0.5 * len(data) < sent < len(data) - 0.1 * COMPRESSIBLE
        assert owner.counters.get("bytes_received") == sent
        assert holder.counters.get("chunks_encoded") == COMPRESSIBLE // CHUNK
        assert holder.counters.get("lane_rejected") == 0

    play(tmp_path, story, streams=streams)


@pytest.mark.parametrize(("codec", "decodes"), [("always", False), ("never", True)])
def test_chunks_come_raw_when_either_side_wants_them_so(tmp_path: Path, codec: str, decodes: bool) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = mixed_bytes()
        digest = await owner.put(holder.ref(), data)
        assert await read(holder, owner, digest, len(data)) == data
        assert holder.counters.get("bytes_sent") == len(data)
        assert holder.counters.get("chunks_encoded") == 0

    play(tmp_path, story, codec=codec, decodes=decodes)


def test_a_replica_gone_bad_is_found_although_it_was_encoded(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = mixed_bytes()
        digest = await owner.put(holder.ref(), data)
        (held,) = holder.store.held()
        held.segment.view[held.offset + CHUNK + 7] ^= 1
        with pytest.raises(CorruptError):
            await read(holder, owner, digest, len(data))
        await eventually(lambda: holder.store.held() == [])

    play(tmp_path, story)


def test_a_byte_flipped_in_an_encoded_chunk_is_found_and_the_next_try_is_whole(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = mixed_bytes()
        digest = await owner.put(holder.ref(), data)
        with BadWire(holder.lane.port, towards_client=True) as wire:
            wire.flip_at = [64 + 500]
            with pytest.raises(CorruptError):
                await read(holder, owner, digest, len(data), wire.port)
        assert owner.counters.get("corrupt_received") == 1
        assert await read(holder, owner, digest, len(data)) == data

    play(tmp_path, story, streams=1)


def test_a_reader_that_leaves_in_the_middle_costs_the_holder_nothing(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = mixed_bytes()
        digest = await owner.put(holder.ref(), data)
        with BadWire(holder.lane.port, towards_client=True) as wire:
            wire.cut_at = CHUNK
            with pytest.raises(PeerError):
                await read(holder, owner, digest, len(data), wire.port)
        await eventually(lambda: holder.lane.connections == 0)
        assert await read(holder, owner, digest, len(data)) == data
        held = holder.store.held()
        assert len(held) == 1

    play(tmp_path, story, streams=1)
