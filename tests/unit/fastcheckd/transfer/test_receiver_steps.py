"""Steps of one job at a holder, one after the other: encoded, changed a little or wholly, and holders that die."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transfer_harness import (
    CHUNK,
    BadWire,
    damage,
    eventually,
    idle,
    in_a_loop,
    running_node,
    running_nodes,
    some_bytes,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.errors import FastCheckdError, PeerError

SIZE = 5 * CHUNK + 17
PAGE = 4096
DATA = some_bytes(SIZE)


def slightly_changed(data: bytearray, seed: int) -> bytearray:
    """Another byte in each chunk."""
    changed = bytearray(data)
    for at in range(seed, len(data), CHUNK):
        changed[at] ^= 0x55
    return changed


@in_a_loop
async def test_chunks_come_encoded_against_the_step_that_both_have(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        data = {5: DATA}
        manifests = {5: owner.publish(DATA, step=5)}
        await owner.offer(holder, manifests[5])
        for step in (6, 7, 8):
            data[step] = slightly_changed(data[step - 1], step)
            manifests[step] = owner.publish(data[step], step=step)
            with owner.announced(manifests[step]) as shard:
                answer = await owner.offer(holder, manifests[step])
            assert answer.received_bytes < SIZE / 10
            await idle(owner)
            assert shard.sent_bytes == answer.received_bytes
            assert shard.chunks_encoded >= 5, "17 bytes are hardly worth it"
            assert shard.moved_at("holder") > 0
            assert shard.encoding[0] == SIZE
            assert sum(use.raw_bytes for use in answer.codecs) == SIZE
        for step, manifest in manifests.items():
            assert holder.has_exactly(manifest, data[step]), step
        assert holder.counters.get("corrupt_received") == 0


@in_a_loop
async def test_a_holder_short_of_room_keeps_both_steps_and_both_are_exact(tmp_path: Path) -> None:
    size = 40 * CHUNK
    async with (
        running_node(tmp_path, "owner") as owner,
        running_node(tmp_path, "holder", budget_bytes=4 << 20) as holder,
    ):
        data = {5: some_bytes(size)}
        manifests = {5: owner.publish(data[5], step=5)}
        await owner.offer(holder, manifests[5])
        for step in (6, 7):
            data[step] = slightly_changed(data[step - 1], step)
            manifests[step] = owner.publish(data[step], step=step)
            with owner.announced(manifests[step], fraction=0.0):  # lean, whatever the policy says
                answer = await owner.offer(holder, manifests[step])
            assert answer.received_bytes < size / 10
            assert holder.copy(manifests[step]).is_whole
            assert not holder.copy(manifests[step - 1]).is_whole, "the step before is reverse deltas now"
        for step, manifest in manifests.items():
            assert holder.has_exactly(manifest, data[step]), step
        assert holder.store.usage().used_bytes <= 4 << 20
        reader = holder.begin_fetch(manifests[5])
        assert await owner.run(reader, [holder.ref()]) is not None
        assert reader.wanted.into == data[5], "an older step is read like any other"


@pytest.mark.parametrize("offered_next", [6, 7])
@in_a_loop
async def test_a_lean_copy_that_fails_in_the_middle_leaves_the_step_before_exact(
    tmp_path: Path, offered_next: int
) -> None:
    size = 40 * CHUNK
    async with (
        running_node(tmp_path, "owner", streams=1) as owner,
        running_node(tmp_path, "holder", budget_bytes=4 << 20, streams=1, timeout_s=2.0) as holder,
    ):
        data = some_bytes(size)
        first = owner.publish(data, step=5)
        await owner.offer(holder, first)
        changed = slightly_changed(data, 9)
        second = owner.publish(changed, step=6)
        with owner.announced(second), BadWire(owner.server.port) as wire:
            wire.cut_at = 2000
            with pytest.raises(PeerError):
                await owner.offer(holder, second, sources=[owner.ref(wire.port)])
        assert holder.has_exactly(first, data)
        assert len(holder.store.held()) == 1
        if offered_next != second.key.step:  # it is given up, and the next one has the same base
            changed = slightly_changed(changed, 4)
            second = owner.publish(changed, step=offered_next)
        with owner.announced(second):
            await owner.offer(holder, second)
        assert holder.has_exactly(first, data)
        assert holder.has_exactly(second, changed)


@pytest.mark.parametrize("streams", [1, 2, 4])
@in_a_loop
async def test_a_chunk_that_the_holder_decodes_otherwise_comes_again_as_it_is(
    tmp_path: Path, streams: int
) -> None:
    """The holder's base is not what its digests say: as if both ends computed differently."""
    count = 60
    async with running_nodes(tmp_path, "owner", "holder", streams=streams) as (owner, holder):
        data = some_bytes(count * CHUNK)
        first = owner.publish(data, step=5)
        await owner.offer(holder, first)
        bad = range(0, count, 3)
        for index in bad:
            damage(holder.copy(first), index * CHUNK + 9)
        changed = slightly_changed(data, 1)
        second = owner.publish(changed, step=6)
        with owner.announced(second):
            answer = await owner.offer(holder, second)
        assert holder.has_exactly(second, changed)
        assert len(bad) * CHUNK < answer.received_bytes < (len(bad) + 5) * CHUNK
        assert holder.counters.get("corrupt_received") == len(bad)
        await idle(owner)
        assert owner.counters.get("chunks_resent") == len(bad)
        assert holder.counters.get("corrupt_reported") == 0
        assert len(owner.store.held()) == 2


#: How much of the state each step changes, in chunks of six.
COURSE = [6, 0, 3, 0, 6, 3, 3, 6, 0, 0, 3]


@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["raw", "encoded"])
@in_a_loop
async def test_unchanged_half_changed_and_wholly_changed_steps_alternate_and_take_what_they_change(
    tmp_path: Path, fraction: float
) -> None:
    async with running_nodes(tmp_path, "owner", "holder") as (owner, holder):
        data, kept = DATA, {}
        for step, changed in enumerate(COURSE, start=5):
            new = some_bytes(SIZE, seed=step)
            data = new[: changed * CHUNK] + data[changed * CHUNK :]
            manifest = owner.publish(data, step=step)
            with owner.announced(manifest, fraction=fraction):
                answer = await owner.offer(holder, manifest)
            # New bytes are noise, which no codec shrinks.
            assert answer.received_bytes == min(changed * CHUNK, SIZE), step
            kept[step] = manifest, data
            if len(kept) > 2:
                oldest, _ = kept.pop(min(kept))
                holder.store.drop(holder.copy(oldest))
                owner.store.drop(owner.store.find(oldest.key, pb.REPLICA_KIND_OWNER) or pytest.fail("gone"))
            for manifest, wanted in kept.values():
                assert holder.has_exactly(manifest, wanted)
            assert holder.reserved_bytes <= 2 * (5 * CHUNK + PAGE), "two states, whatever came before"
        assert holder.counters.get("corrupt_received") == 0
        for manifest, _ in kept.values():
            holder.store.drop(holder.copy(manifest))
        assert holder.reserved_bytes == 0


@in_a_loop
async def test_a_second_holder_that_dies_while_it_pulls_from_the_first_leaves_nothing_open_there(
    tmp_path: Path,
) -> None:
    """The owner's bytes are gone, so the first holder is the only source. Another node makes the copy instead."""
    async with running_nodes(tmp_path, "owner", "first", "third") as (owner, first, third):
        manifest = owner.publish(DATA)
        await owner.offer(first, manifest)
        owner.store.drop(owner.store.held()[0])
        with BadWire(first.server.port) as wire:
            wire.stall_at = CHUNK + 5000
            async with running_node(tmp_path, "second") as second:
                offer = asyncio.create_task(
                    owner.offer(second, manifest, sources=[first.ref(wire.port)], repair=True)
                )
                await eventually(wire.stalled.is_set)
                assert first.server.connections > 0
            with pytest.raises(FastCheckdError):
                await offer
            await idle(first)
        await owner.offer(third, manifest, sources=[first.ref()], repair=True)
        assert third.has_exactly(manifest, DATA)
        assert first.has_exactly(manifest, DATA)
        first.store.drop(first.copy(manifest))
        assert first.reserved_bytes == 0, "no reader that is gone keeps its chunks"
        assert first.counters.get("corrupt_found") == 0
