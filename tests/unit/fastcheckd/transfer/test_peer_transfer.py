"""A shard there and back over a real lane and real gRPC, and everything that may go wrong on the way."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fastcheckd.store.ram_store import Segment
from transfer_harness import (
    BUDGET,
    CHUNK,
    EPOCH,
    INCARNATION,
    BadWire,
    Holder,
    Owner,
    eventually,
    manifest_of,
    running_holder,
    running_owner,
    some_bytes,
    source_of,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.errors import (
    CorruptError,
    FencedError,
    InvalidRequestError,
    NotHeldError,
    OverBudgetError,
    PeerError,
)

Story = Callable[[Holder, Owner], Coroutine[Any, Any, None]]


def play(tmp_path: Path, story: Story, **owner: Any) -> None:
    """Run a story between one holder and one owner."""

    async def whole() -> None:
        async with (
            running_holder(tmp_path, timeout_s=owner.get("timeout_s", 20.0)) as holder,
            running_owner(**owner) as sender,
        ):
            await story(holder, sender)

    asyncio.run(asyncio.wait_for(whole(), 60))


def digest_of(data: bytearray, chunk_bytes: int = CHUNK) -> bytes:
    pieces = [bytes(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes)]
    return shard_digest(b"".join(chunk_digest(piece) for piece in pieces))


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel and wait, without an exception whose traceback would keep buffers alive."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 123]


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_a_shard_goes_there_and_comes_back(tmp_path: Path, streams: int) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        for shard, size in enumerate(SIZES):
            data = some_bytes(size, seed=shard)
            manifest = manifest_of(size, shard=shard)
            manifest.shard_count = len(SIZES)
            owner.progress.clear()
            digest = await owner.put(holder.ref(), data, manifest=manifest)
            assert digest == digest_of(data)
            assert sum(owner.progress) == size
            held = holder.store.find(manifest.key, pb.REPLICA_KIND_COPY)
            assert held is not None
            assert held.view == data
            into, got = bytearray(size), list[int]()
            back = await owner.client.get_shard(
                holder.ref(), manifest.key, digest, memoryview(into), got.append
            )
            assert into == data
            assert sum(got) == size
            assert back == held.manifest
            assert (back.owner, back.session, back.kind) == ("owner", 1, pb.REPLICA_KIND_COPY)
        for counters in (owner.counters, holder.counters):
            assert counters.get("bytes_sent") == sum(SIZES)
            assert counters.get("bytes_received") == sum(SIZES)
            assert counters.get("lane_rejected") == 0
        assert holder.counters.get("shards_received") == len(SIZES)
        assert holder.desk.transfers == 0
        await eventually(lambda: holder.lane.connections == 0)

    play(tmp_path, story, streams=streams)


def test_large_chunks_travel_whole(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(6 << 20)
        manifest = manifest_of(len(data), chunk_bytes=4 << 20)
        digest = await owner.put(holder.ref(), data, manifest=manifest)
        into = bytearray(len(data))
        await owner.client.get_shard(holder.ref(), manifest.key, digest, memoryview(into), lambda _: None)
        assert into == data

    play(tmp_path, story)


def test_many_transfers_share_a_small_executor(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        shards = [some_bytes(3 * CHUNK, seed=n) for n in range(8)]

        async def one(number: int) -> bytes:
            manifest = manifest_of(3 * CHUNK)
            manifest.key.rank, manifest.world_size = number, 8
            return await owner.put(holder.ref(), shards[number], manifest=manifest)

        digests = await asyncio.gather(*(one(n) for n in range(8)))
        assert digests == [digest_of(s) for s in shards]

    play(tmp_path, story, streams=4, threads=2)


def test_a_byte_flipped_on_the_way_is_sent_again(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(5 * CHUNK)
        with BadWire(holder.lane.port) as wire:
            wire.flip_at = [64 + 64 + 1000]  # in the first payload
            digest = await owner.put(holder.ref(wire.port), data)
        assert digest == digest_of(data)
        (held,) = holder.store.held()
        assert held.view == data
        assert owner.counters.get("chunks_resent") == 1
        assert holder.counters.get("corrupt_received") == 1

    play(tmp_path, story, streams=1)


def test_a_wire_that_always_flips_is_given_up(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(CHUNK)
        once = 64 + CHUNK + 64  # DATA and END
        with BadWire(holder.lane.port) as wire:
            wire.flip_at = [64 + sending * once + 64 + 10 for sending in range(3)]
            with pytest.raises(CorruptError):
                await owner.put(holder.ref(wire.port), data)
        await eventually(lambda: holder.reserved_bytes == 0)
        assert holder.store.held() == []
        assert owner.counters.get("chunks_resent") == 2

    play(tmp_path, story, streams=1)


def test_bytes_that_change_while_they_are_sent_are_never_acknowledged(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(CHUNK)
        manifest = manifest_of(CHUNK)
        source = source_of(data, manifest, owner.codec)
        source.complete()
        data[5] ^= 1
        with pytest.raises(CorruptError):
            await owner.send(holder.ref(), source, manifest)
        assert holder.store.held() == []
        assert owner.counters.get("chunks_resent") == 2
        assert holder.counters.get("corrupt_received") == 3
        await eventually(lambda: holder.reserved_bytes == 0)

    play(tmp_path, story)


def test_a_damaged_header_ends_the_put_with_the_reason(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        with BadWire(holder.lane.port) as wire:
            wire.flip_at = [64 + 20]
            with pytest.raises(PeerError):
                await owner.put(holder.ref(wire.port), some_bytes(CHUNK))
        assert holder.counters.get("lane_rejected") == 1
        await eventually(lambda: holder.reserved_bytes == 0)
        await owner.put(holder.ref(), some_bytes(CHUNK))

    play(tmp_path, story, streams=1)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_connection_cut_in_the_middle_fails_the_put_and_frees_the_memory(
    tmp_path: Path, streams: int
) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        with BadWire(holder.lane.port) as wire:
            wire.cut_at = CHUNK + 5000
            with pytest.raises(PeerError):
                await owner.put(holder.ref(wire.port), some_bytes(9 * CHUNK))
        assert holder.store.held() == []
        await eventually(lambda: holder.reserved_bytes == 0 and holder.desk.transfers == 0)
        await eventually(lambda: holder.lane.connections == 0)

    play(tmp_path, story, streams=streams)


def test_a_wire_gone_silent_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        started = time.monotonic()
        with BadWire(holder.lane.port) as wire:
            wire.stall_at = CHUNK
            with pytest.raises(PeerError):
                await owner.put(holder.ref(wire.port), some_bytes(9 * CHUNK))
            assert time.monotonic() - started < 30
            await eventually(lambda: holder.reserved_bytes == 0)

    play(tmp_path, story, streams=2, timeout_s=0.3)


def test_a_cancelled_put_lets_go_of_the_source_and_of_the_holders_memory(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(BUDGET // 2)
        with BadWire(holder.lane.port) as wire:
            wire.stall_at = CHUNK
            task = asyncio.create_task(owner.put(holder.ref(wire.port), data))
            await eventually(wire.stalled.is_set)
            started = time.monotonic()
            await cancel(task)
            assert time.monotonic() - started < 30
            del task
            gc.collect()
            data.append(0)  # a BufferError, had any thread still a view of it
            # Long before the holder's own patience of 100 s is at its end.
            await eventually(lambda: holder.reserved_bytes == 0 and holder.desk.transfers == 0, within_s=60)

    play(tmp_path, story, streams=2, timeout_s=100.0)


def test_a_cancelled_get_lets_go_of_the_destination(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(BUDGET // 2)
        digest = await owner.put(holder.ref(), data)
        into = bytearray(len(data))
        with BadWire(holder.lane.port, towards_client=True) as wire:
            wire.stall_at = 2 * CHUNK
            task = asyncio.create_task(
                owner.client.get_shard(
                    holder.ref(wire.port), manifest_of(0).key, digest, memoryview(into), lambda _: None
                )
            )
            await eventually(wire.stalled.is_set)
            await cancel(task)
            del task
            gc.collect()
            into.append(0)
        await eventually(lambda: holder.lane.connections == 0)

    play(tmp_path, story, streams=2, timeout_s=20.0)


def test_a_put_for_another_life_epoch_or_cluster_is_refused(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(CHUNK)
        with pytest.raises(FencedError):
            await owner.put(holder.ref(incarnation=INCARNATION - 1), data)
        with pytest.raises(FencedError):
            await owner.put(holder.ref(), data, epoch=EPOCH - 1)
        async with running_owner(cluster_id="elsewhere") as stranger:
            with pytest.raises(InvalidRequestError):
                await stranger.put(holder.ref(), data)
            with pytest.raises(InvalidRequestError):
                await stranger.client.get_shard(
                    holder.ref(), manifest_of(0).key, bytes(16), memoryview(bytearray(5)), lambda _: None
                )
        holder.incarnation = 0
        with pytest.raises(FencedError):
            await owner.put(holder.ref(), data)
        assert holder.counters.get("puts_refused") == 4
        assert holder.store.usage().used_bytes == 0

    play(tmp_path, story)


def test_too_much_is_refused_before_any_memory_is_taken(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(0) + bytearray(BUDGET + CHUNK)
        with pytest.raises(OverBudgetError):
            await owner.put(holder.ref(), data)
        assert holder.store.usage().used_bytes == 0

    play(tmp_path, story)


def test_a_holder_that_is_not_there_is_a_peer_error(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        no_control, no_lane = holder.ref(), holder.ref(lane_port=port)
        no_control.data_address = f"127.0.0.1:{port}"
        for target in (no_control, no_lane):
            with pytest.raises(PeerError):
                await owner.put(target, some_bytes(CHUNK))
        await eventually(lambda: holder.reserved_bytes == 0)

    play(tmp_path, story, timeout_s=1.0)


def test_a_replica_gone_bad_is_found_by_the_reader_and_dropped_by_its_holder(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(5 * CHUNK)
        digest = await owner.put(holder.ref(), data)
        (held,) = holder.store.held()
        held.segment.view[held.offset + 2 * CHUNK + 7] ^= 1
        key, into = manifest_of(0).key, memoryview(bytearray(len(data)))
        with pytest.raises(CorruptError):
            await owner.client.get_shard(holder.ref(), key, digest, into, lambda _: None)
        assert owner.counters.get("corrupt_reported") == 1
        await eventually(lambda: holder.store.held() == [])
        assert holder.counters.get("corrupt_found") == 1
        with pytest.raises(NotHeldError):
            await owner.client.get_shard(holder.ref(), key, digest, into, lambda _: None)

    play(tmp_path, story)


def test_a_byte_flipped_towards_the_reader_costs_the_holder_nothing(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(5 * CHUNK)
        digest = await owner.put(holder.ref(), data)
        key, into = manifest_of(0).key, bytearray(len(data))
        with BadWire(holder.lane.port, towards_client=True) as wire:
            wire.flip_at = [64 + 99]
            with pytest.raises(CorruptError):
                await owner.client.get_shard(
                    holder.ref(wire.port), key, digest, memoryview(into), lambda _: None
                )
        assert len(holder.store.held()) == 1
        await owner.client.get_shard(holder.ref(), key, digest, memoryview(into), lambda _: None)
        assert into == data

    play(tmp_path, story, streams=1)


def test_another_digest_or_another_size_is_not_what_is_held(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(2 * CHUNK)
        digest = await owner.put(holder.ref(), data)
        key = manifest_of(0).key
        with pytest.raises(NotHeldError):
            await owner.client.get_shard(
                holder.ref(), key, bytes(16), memoryview(bytearray(len(data))), lambda _: None
            )
        with pytest.raises(CorruptError):
            await owner.client.get_shard(holder.ref(), key, digest, memoryview(bytearray(7)), lambda _: None)
        assert len(holder.store.held()) == 1

    play(tmp_path, story)


def test_the_owners_own_replica_is_served_and_checked_too(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(2 * CHUNK + 1)
        digests = b"".join(chunk_digest(bytes(data[i : i + CHUNK])) for i in range(0, len(data), CHUNK))
        manifest = manifest_of(len(data), owner="holder")
        manifest.kind = pb.REPLICA_KIND_OWNER
        manifest.chunk_digests, manifest.digest = digests, shard_digest(digests)
        segment = holder.store.allocate(len(data) + 4096, "staging.job.0.1")
        segment.view[4096 : 4096 + len(data)] = data
        holder.store.publish(manifest, segment, 4096, verified=True)
        into = bytearray(len(data))
        got = await owner.client.get_shard(
            holder.ref(), manifest.key, manifest.digest, memoryview(into), lambda _: None
        )
        assert into == data
        assert got.kind == pb.REPLICA_KIND_OWNER
        segment.view[4096] ^= 1
        with pytest.raises(CorruptError):
            await owner.client.get_shard(
                holder.ref(), manifest.key, manifest.digest, memoryview(into), lambda _: None
            )
        await eventually(lambda: holder.store.held() == [])
        holder.store.release(segment)

    play(tmp_path, story)


def test_a_reported_replica_that_is_good_stays(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        digest = await owner.put(holder.ref(), some_bytes(CHUNK))
        stub = owner.client._stub("holder", holder.data_address)
        answer = await stub.ReportCorrupt(
            peer_pb2.ReportCorruptRequest(key=manifest_of(0).key, digest=digest), timeout=5
        )
        assert not answer.dropped
        assert len(holder.store.held()) == 1

    play(tmp_path, story)


def test_replicas_and_stats_are_told(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        data = some_bytes(CHUNK + 1)
        digest = await owner.put(holder.ref(), data)
        for job, step, expected in (
            ("", None, 1),
            ("job", None, 1),
            ("job", 5, 1),
            ("job", 0, 0),
            ("x", 5, 0),
        ):
            replicas = await owner.client.list_replicas("holder", holder.data_address, job, step, 5.0)
            assert len(replicas) == expected, (job, step)
        (replica,) = await owner.client.list_replicas("holder", holder.data_address, "", None, 5.0)
        assert (replica.key, replica.kind, replica.owner) == (
            manifest_of(0).key,
            pb.REPLICA_KIND_COPY,
            "owner",
        )
        assert (replica.bytes, replica.digest) == (len(data), digest)
        assert replica.verified_at_ms > 0
        stats = await owner.client.get_stats("holder", holder.data_address, 5.0)
        assert stats.ram_budget_bytes == BUDGET
        assert len(data) <= stats.ram_used_bytes <= BUDGET
        assert stats.counters["shards_received"] == 1
        with pytest.raises(PeerError):
            await owner.client.get_stats("holder", "127.0.0.1:1", 1.0)

    play(tmp_path, story)


def begin_request() -> peer_pb2.BeginPutRequest:
    return peer_pb2.BeginPutRequest(
        cluster_id="fastcheck",
        epoch=EPOCH,
        holder_incarnation=INCARNATION,
        owner=pb.NodeRef(node_id="owner", incarnation=1),
        manifest=manifest_of(CHUNK),
        streams=1,
    )


def test_a_put_that_is_begun_and_forgotten_gives_its_memory_back(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        await owner.client._stub("holder", holder.data_address).BeginPut(begin_request(), timeout=60)
        assert holder.reserved_bytes == CHUNK
        await eventually(lambda: holder.reserved_bytes == 0 and holder.desk.transfers == 0)

    play(tmp_path, story, timeout_s=0.1)


def test_a_put_whose_caller_left_while_memory_was_made_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        allocate = holder.store.allocate
        asked, go_on, made = threading.Event(), threading.Event(), threading.Event()

        def slow(size_bytes: int, pool: str, **options: float) -> Segment:
            asked.set()
            go_on.wait(10)
            segment = allocate(size_bytes, pool, **options)
            made.set()
            return segment

        monkeypatch.setattr(holder.store, "allocate", slow)
        call = owner.client._stub("holder", holder.data_address).BeginPut(begin_request(), timeout=60)
        await eventually(asked.is_set)
        call.cancel()
        # Same connection, so what comes later arrives later: the server knows of the cancellation then.
        await owner.client.get_stats("holder", holder.data_address, 5.0)
        go_on.set()
        await eventually(made.is_set)
        await eventually(lambda: holder.reserved_bytes == 0 and holder.desk.transfers == 0)

    play(tmp_path, story, timeout_s=60.0)
