"""A shard from one or several real nodes over real lanes, and everything that may go wrong on the way."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trained_state import TrainedState
from transfer_harness import (
    BUDGET,
    CHUNK,
    FRAME,
    BadWire,
    Node,
    damage,
    eventually,
    idle,
    in_a_loop,
    manifest_of,
    running_node,
    running_nodes,
    some_bytes,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.chunks import ChunkTable
from fastcheckd.errors import CorruptError, InvalidRequestError, NotHeldError, PeerError
from fastcheckd.transfer.reader import FairTurns
from fastcheckd.transfer.scheduler import BAD_CHUNKS_MAX, WantedChunks

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 123]
COUNT = 60
DATA = some_bytes(COUNT * CHUNK - 100)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return int(closed.getsockname()[1])


async def none_comes(reader: Node, manifest: pb.ShardManifest, *sources: pb.Holder) -> str:
    """A fetch that finds the shard nowhere: what the sources said."""
    fetch = reader.begin_fetch(manifest)
    assert await reader.run(fetch, sources) is None
    assert fetch.bad_copies == len(sources)
    return "; ".join(fetch.failures.told)


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
@in_a_loop
async def test_shards_of_all_sizes_come_whole(tmp_path: Path, streams: int) -> None:
    async with running_nodes(tmp_path, "source", "reader", streams=streams) as (source, reader):
        for shard, size in enumerate(SIZES):
            data = some_bytes(size, seed=shard)
            manifest = source.publish(data, shard=shard)
            fetch = await reader.fetch(manifest, source.ref())
            assert fetch.wanted.into == data
            assert fetch.came.get("source", 0) == size
            assert fetch.progress.manifest(shard) == manifest
            assert fetch.progress.received_bytes == size
        await idle(source)
        assert reader.counters.get("bytes_received") == source.counters.get("bytes_sent") == sum(SIZES)
        assert source.counters.get("lane_rejected") == 0
        await eventually(lambda: source.server.connections == 0)


@in_a_loop
async def test_large_chunks_and_chunks_of_all_sizes_travel_whole(tmp_path: Path) -> None:
    state = TrainedState()
    async with running_nodes(tmp_path, "source", "reader") as (source, reader):
        for shard, lengths in enumerate(([4 << 20, 2 << 20], state.lengths, [1, CHUNK, 2])):
            data = some_bytes(sum(lengths), seed=shard)
            manifest = source.publish(data, lengths=lengths, shard=shard)
            assert (await reader.fetch(manifest, source.ref())).wanted.into == data


@in_a_loop
async def test_many_fetches_share_a_small_executor(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader", streams=4, threads=2) as (source, reader):
        shards = [some_bytes(3 * CHUNK, seed=number) for number in range(8)]
        manifests = [source.publish(data, shard=number) for number, data in enumerate(shards)]
        fetches = await asyncio.gather(*(reader.fetch(manifest, source.ref()) for manifest in manifests))
        assert [fetch.wanted.into for fetch in fetches] == shards


@in_a_loop
async def test_a_part_of_a_shard_costs_no_more_than_that(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader") as (source, reader):
        manifest = source.publish(DATA)
        part = WantedChunks(ChunkTable.of(manifest), (1, 2, 30, COUNT - 1))
        fetch = reader.begin_fetch(manifest, part=part)
        assert await reader.run(fetch, [source.ref()]) == manifest
        for chunk in part.chunks:
            start, stop = part.table.range(chunk)
            assert fetch.wanted.into[start:stop] == DATA[start:stop]
        assert fetch.wanted.into[3 * CHUNK : 30 * CHUNK] == bytes(27 * CHUNK)
        await idle(source)
        assert source.counters.get("bytes_sent") == part.bytes


# --- several sources --------------------------------------------------------------------------------


@in_a_loop
async def test_several_sources_give_a_shard_together(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "a", "b", "c", "reader") as (*sources, reader):
        manifests = [source.publish(DATA) for source in sources]
        with BadWire(sources[0].server.port) as one, BadWire(sources[1].server.port) as other:
            one.pause_s = other.pause_s = 0.002  # or the first is done before the others have begun
            fetch = await reader.fetch(
                manifests[0],
                sources[0].ref(one.port),
                sources[1].ref(other.port),
                sources[2].ref(),
                streams=3,
            )
        assert fetch.wanted.into == DATA
        assert sum(fetch.came.values()) == len(DATA)
        assert len(fetch.came) >= 2
        await eventually(lambda: all(source.server.connections == 0 for source in sources))
        assert all(source.counters.get("lane_rejected") == 0 for source in sources)
        assert fetch.bad_copies == 0


@in_a_loop
async def test_a_slow_source_gives_less_than_a_fast_one(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "slow", "fast", "reader", streams=2) as (slow, fast, reader):
        manifest = slow.publish(DATA)
        fast.publish(DATA)
        with BadWire(slow.server.port) as wire:
            wire.pause_s = 0.1
            fetch = await reader.fetch(manifest, slow.ref(wire.port), fast.ref())
        assert fetch.wanted.into == DATA
        assert fetch.came.get("slow", 0) < fetch.came["fast"]


@in_a_loop
async def test_a_source_gone_silent_costs_no_timeout_and_what_it_sent_stays(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "silent", "good", "reader", streams=2) as (silent, good, reader):
        manifest = silent.publish(DATA)
        good.publish(DATA)
        with BadWire(silent.server.port) as wire, BadWire(good.server.port) as other:
            wire.stall_at = 5 * FRAME + 1000
            other.pause_s = 0.01
            started = time.monotonic()
            fetch = await reader.fetch(manifest, silent.ref(wire.port), good.ref(other.port))
            assert time.monotonic() - started < 10, "half of the timeout of 20 s"
        assert fetch.wanted.into == DATA
        assert fetch.came["silent"] >= 3 * CHUNK
        assert sum(fetch.came.values()) == len(DATA)


@pytest.mark.parametrize("streams", [1, 3])
@in_a_loop
async def test_what_a_source_that_was_cut_off_did_not_bring_comes_from_another(
    tmp_path: Path, streams: int
) -> None:
    async with running_nodes(tmp_path, "cut", "good", "reader", streams=streams) as (cut, good, reader):
        manifest = cut.publish(DATA)
        good.publish(DATA)
        with BadWire(cut.server.port) as wire, BadWire(good.server.port) as other:
            wire.cut_at = 3 * FRAME + 5000
            other.pause_s = 0.005
            fetch = await reader.fetch(manifest, cut.ref(wire.port), good.ref(other.port))
        assert fetch.wanted.into == DATA
        assert sum(fetch.came.values()) == len(DATA)


@in_a_loop
async def test_a_source_that_dies_is_left_for_one_beyond_those_that_are_read(tmp_path: Path) -> None:
    """Of seven sources four are read at a time; the last one is the only one that answers."""
    async with running_nodes(tmp_path, "good", "reader", timeout_s=5.0) as (good, reader):
        manifest = good.publish(DATA)
        gone = []
        for number in range(6):
            ref = good.ref(lane_port=unused_port())
            ref.node.node_id = f"gone-{number}"
            gone.append(ref)
        fetch = await reader.fetch(manifest, *gone, good.ref())
        assert fetch.wanted.into == DATA
        assert reader.counters.get("copies_missing") >= 3, "before there was a turn for it"
        assert len(fetch.failures.unreached) >= 3


@in_a_loop
async def test_a_source_that_could_not_be_reached_is_tried_once_more_beside_the_others(
    tmp_path: Path,
) -> None:
    async with running_nodes(tmp_path, "late", "good", "reader", streams=2) as (late, good, reader):
        manifest = late.publish(DATA)
        good.publish(DATA)
        fetch = reader.begin_fetch(manifest)
        truth = reader.client.open

        async def late_comes_second(
            source: pb.Holder, request: peer_pb2.OpenRequest, timeout_s: float | None = None
        ) -> peer_pb2.OpenResponse:
            if source.node.node_id == "late":
                await eventually(lambda: fetch.progress.is_read(0))
            return await truth(source, request, timeout_s)

        reader.client.open = late_comes_second  # type: ignore[method-assign]
        with BadWire(late.server.port) as wire, BadWire(good.server.port) as other:
            wire.cut_at = 0
            other.pause_s = 0.05
            sources = [late.ref(wire.port), good.ref(other.port)]
            fetching = asyncio.create_task(reader.run(fetch, sources))
            await eventually(wire.was_cut.is_set)
            wire.cut_at = None
            assert await fetching is not None
        assert fetch.wanted.into == DATA
        assert fetch.came["late"] > 0
        assert fetch.bad_copies == 0


# --- bad bytes --------------------------------------------------------------------------------------


@in_a_loop
async def test_a_byte_flipped_on_the_wire_is_asked_for_again_from_the_only_source(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader", streams=1) as (source, reader):
        manifest = source.publish(DATA)
        with BadWire(source.server.port) as wire:
            wire.flip_at = [3 * FRAME + 100]
            fetch = await reader.fetch(manifest, source.ref(wire.port))
        assert fetch.wanted.into == DATA
        assert fetch.progress.bad_chunks(0, "source") == 1
        assert reader.counters.get("corrupt_received") == 1
        await idle(source)
        assert source.counters.get("chunks_resent") == 1
        assert len(source.store.held()) == 1, "the replica is good"


@in_a_loop
async def test_a_damaged_header_ends_the_connection(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader", streams=1) as (source, reader):
        manifest = source.publish(DATA)
        with BadWire(source.server.port) as wire:
            wire.flip_at = [FRAME + 20]
            told = await none_comes(reader, manifest, source.ref(wire.port))
        assert "protocol" in told
        await reader.fetch(manifest, source.ref())


@in_a_loop
async def test_a_wire_that_always_flips_is_given_up_and_another_source_brings_all(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "bad", "good", "reader", streams=1) as (bad, good, reader):
        manifest = bad.publish(DATA)
        good.publish(DATA)
        with BadWire(bad.server.port) as wire:
            wire.flips_all = True
            told = await none_comes(reader, manifest, bad.ref(wire.port))
            assert "bad copy" in told
            fetch = reader.begin_fetch(manifest)
            await reader.run(fetch, [bad.ref(wire.port), good.ref()])
        assert fetch.wanted.into == DATA
        assert fetch.came == {"good": len(DATA)}
        assert fetch.progress.bad_chunks(0, "bad") <= BAD_CHUNKS_MAX


@in_a_loop
async def test_a_bad_chunk_at_one_source_comes_from_the_other_and_the_source_is_told(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "rotten", "good", "reader", streams=2) as (rotten, good, reader):
        manifest = rotten.publish(DATA)
        good.publish(DATA)
        damage(rotten.store.held()[0], 9)  # in the first chunk, which whoever begins first is asked for
        with BadWire(good.server.port) as wire:
            wire.pause_s = 0.01
            fetch = reader.begin_fetch(manifest)
            fetching = asyncio.create_task(reader.run(fetch, [rotten.ref(), good.ref(wire.port)]))
            assert await fetching is not None
        assert fetch.wanted.into == DATA
        assert fetch.came["rotten"] >= CHUNK, "its other chunks are good"
        if fetch.progress.bad_chunks(0, "rotten"):  # unless the good one was asked first
            assert fetch.bad_copies == 1
            assert reader.counters.get("corrupt_reported") == 1
            await eventually(lambda: rotten.store.held() == [])
            assert rotten.counters.get("corrupt_found") == 1
        assert len(good.store.held()) == 1


@in_a_loop
async def test_a_replica_gone_bad_is_found_by_the_reader_and_dropped_by_its_node(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader") as (source, reader):
        manifest = source.publish(some_bytes(5 * CHUNK))
        damage(source.store.held()[0], 2 * CHUNK + 7)
        await none_comes(reader, manifest, source.ref())
        assert reader.counters.get("corrupt_reported") == 1
        await eventually(lambda: source.store.held() == [])
        assert "no job step 5" in await none_comes(reader, manifest, source.ref())


# --- lies -------------------------------------------------------------------------------------------


def lie(reader: Node, change: Callable[[peer_pb2.OpenResponse], None], about: str = "liar") -> None:
    """What one node answers is changed on its way."""
    truth = reader.client.open

    async def open_(
        source: pb.Holder, request: peer_pb2.OpenRequest, timeout_s: float | None = None
    ) -> peer_pb2.OpenResponse:
        answer = await truth(source, request, timeout_s)
        if source.node.node_id == about:
            change(answer)
        return answer

    reader.client.open = open_  # type: ignore[method-assign]


def more_bytes(answer: peer_pb2.OpenResponse) -> None:
    answer.manifest.bytes += 1


def other_digests(answer: peer_pb2.OpenResponse) -> None:
    digests = bytearray(answer.manifest.chunk_digests)
    digests[0] ^= 1
    answer.manifest.chunk_digests = bytes(digests)


def swapped_cut(answer: peer_pb2.OpenResponse) -> None:
    lengths = [CHUNK] * (COUNT - 1) + [CHUNK - 100]
    lengths[0], lengths[-1] = lengths[-1], lengths[0]
    answer.manifest.chunk_lengths.extend(lengths)


def a_base(answer: peer_pb2.OpenResponse) -> None:
    answer.base_step = 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (more_bytes, "wrongly|speaks of"),
        (other_digests, "not those of the committed digest"),
        (lambda a: a.manifest.key.MergeFrom(pb.ShardKey(step=6)), "not those of the committed digest"),
        (lambda a: setattr(a.manifest, "digest", bytes(16)), "not those of the committed digest"),
        (lambda a: setattr(a.manifest, "chunk_bytes", 1), "wrongly"),
        (lambda a: setattr(a.manifest, "chunk_bytes", 2 * CHUNK), "speaks of"),
        (lambda a: a.manifest.chunk_lengths.extend([1] * 10_000_000), "wrongly"),
        (a_base, "which was not named"),
    ],
    ids=["size", "digests", "key", "digest", "tiny chunks", "larger chunks", "too many chunks", "a base"],
)
@in_a_loop
async def test_a_source_that_lies_about_the_shard_is_found_out_and_another_one_is_read(
    tmp_path: Path, change: Callable[[peer_pb2.OpenResponse], None], why: str
) -> None:
    async with running_nodes(tmp_path, "liar", "good", "reader") as (liar, good, reader):
        manifest = liar.publish(DATA)
        good.publish(DATA)
        lie(reader, change)
        fetch = reader.begin_fetch(manifest)
        assert await reader.run(fetch, [liar.ref()]) is None
        assert re.search(why, "; ".join(fetch.failures.told)), fetch.failures.told
        assert await reader.run(fetch, [liar.ref(), good.ref()]) is not None
        assert fetch.wanted.into == DATA


@in_a_loop
async def test_one_that_cuts_the_shard_otherwise_is_useless_beside_the_truth(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "liar", "good", "reader", streams=2) as (liar, good, reader):
        manifest = liar.publish(DATA)
        good.publish(DATA)
        lie(reader, swapped_cut)
        with BadWire(good.server.port) as wire:
            wire.pause_s = 0.005
            fetch = await reader.fetch(manifest, good.ref(wire.port), liar.ref())
        assert fetch.wanted.into == DATA
        assert fetch.came == {"good": len(DATA)}
        assert len(liar.store.held()) == 1, "nothing was wrong with its bytes"


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
@in_a_loop
async def test_one_that_cuts_the_shard_otherwise_and_comes_first_keeps_nobody_out(
    tmp_path: Path, pause_s: float
) -> None:
    async with running_nodes(tmp_path, "liar", "good", "reader", streams=2) as (liar, good, reader):
        manifest = liar.publish(DATA)
        good.publish(DATA)
        lie(reader, swapped_cut)
        with BadWire(liar.server.port) as wire:
            wire.pause_s = pause_s
            fetch = await reader.fetch(manifest, liar.ref(wire.port), good.ref())
        assert fetch.wanted.into == DATA
        assert fetch.came == {"good": len(DATA)}


@in_a_loop
async def test_another_digest_or_cluster_is_not_what_is_held(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader") as (source, reader):
        manifest = source.publish(some_bytes(2 * CHUNK))
        other = manifest_of(some_bytes(2 * CHUNK, seed=2))
        await none_comes(reader, other, source.ref())
        with pytest.raises(NotHeldError):
            await reader.fetcher.describe(source.ref(), other.key, other.digest, other.bytes)
        with pytest.raises(CorruptError, match="speaks of"):
            await reader.fetcher.describe(source.ref(), manifest.key, manifest.digest, manifest.bytes + 7)
        found, table = await reader.fetcher.describe(
            source.ref(), manifest.key, manifest.digest, manifest.bytes
        )
        assert (found, len(table)) == (manifest, 2)
        request = peer_pb2.OpenRequest(cluster_id="elsewhere", key=manifest.key, digest=manifest.digest)
        with pytest.raises(InvalidRequestError, match="belongs to cluster"):
            await reader.client.open(source.ref(), request)
        assert source.store.held()


@in_a_loop
async def test_a_wire_gone_silent_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "source", "reader", timeout_s=0.3) as (source, reader):
        manifest = source.publish(DATA)
        started = time.monotonic()
        with BadWire(source.server.port) as wire:
            wire.stall_at = CHUNK
            await none_comes(reader, manifest, source.ref(wire.port))
        assert time.monotonic() - started < 30
        await eventually(lambda: source.server.connections == 0)


# --- nobody is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["auto", "always"])
@in_a_loop
async def test_a_cancelled_fetch_lets_go_of_the_memory_at_both_ends(tmp_path: Path, codec: str) -> None:
    async with running_nodes(tmp_path, "source", "reader", codec=codec) as (source, reader):
        manifest = source.publish(bytes(BUDGET // 4) + some_bytes(BUDGET // 4))
        fetch = reader.begin_fetch(manifest)
        into = fetch.wanted.into
        with BadWire(source.server.port) as wire:
            wire.stall_at = 300
            fetching = asyncio.create_task(reader.run(fetch, [source.ref(wire.port)]))
            await eventually(wire.stalled.is_set)
            started = time.monotonic()
            fetching.cancel()
            await asyncio.wait([fetching])
            assert fetching.cancelled()
            assert time.monotonic() - started < 10, "the timeout of 20 s has nothing to do with it"
            del fetching
            gc.collect()
            into.append(0)  # a BufferError, had any thread still a view of it
        await eventually(lambda: source.server.connections == 0)
        source.store.drop(source.store.held()[0])
        await eventually(lambda: source.reserved_bytes == 0)


@in_a_loop
async def test_a_reader_that_fails_for_want_of_room_ends_all_its_sources(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "a", "b", "reader") as (a, b, reader):
        manifest = a.publish(DATA)
        b.publish(DATA)
        fetch = reader.begin_fetch(manifest)

        async def no_room(*_: object) -> None:
            raise PeerError("this node is shutting down")

        fetch.wanted.target = no_room  # type: ignore[method-assign,assignment]
        assert await reader.run(fetch, [a.ref(), b.ref()]) is None
        for source in (a, b):
            await eventually(lambda source=source: source.server.connections == 0)  # type: ignore[misc]


# --- encoded ----------------------------------------------------------------------------------------

COMPRESSIBLE = 40 * CHUNK


def mixed() -> bytes:
    """Chunks of weights, which shrink by something, then some of noise, which do not."""
    state = TrainedState()
    weights = state.arrays["w"].tobytes()
    return (weights * (COMPRESSIBLE // len(weights) + 1))[:COMPRESSIBLE] + bytes(some_bytes(2 * CHUNK + 7))


@pytest.mark.parametrize("streams", [1, 3])
@in_a_loop
async def test_a_reader_that_can_decode_gets_fewer_bytes_and_the_same_shard(
    tmp_path: Path, streams: int
) -> None:
    data = mixed()
    async with running_nodes(tmp_path, "source", "reader", codec="always", streams=streams) as (
        source,
        reader,
    ):
        manifest = source.publish(data)
        fetch = await reader.fetch(manifest, source.ref())
        assert fetch.wanted.into == data
        assert fetch.came == {"source": len(data)}, "progress is told in bytes of the state"
        await idle(source)
        sent = source.counters.get("bytes_sent")
        assert sent < len(data) - 0.05 * COMPRESSIBLE
        assert reader.counters.get("bytes_received") == sent == fetch.progress.received_bytes
        assert source.counters.get("chunks_encoded") == COMPRESSIBLE // CHUNK
        assert source.counters.get("lane_rejected") == 0


@pytest.mark.parametrize(("source_codec", "reader_codec"), [("always", "never"), ("never", "always")])
@in_a_loop
async def test_chunks_come_raw_when_either_side_wants_them_so(
    tmp_path: Path, source_codec: str, reader_codec: str
) -> None:
    data = mixed()
    async with (
        running_node(tmp_path, "source", codec=source_codec) as source,
        running_node(tmp_path, "reader", codec=reader_codec) as reader,
    ):
        fetch = await reader.fetch(source.publish(data), source.ref())
        assert fetch.wanted.into == data
        await idle(source)
        assert source.counters.get("bytes_sent") == len(data)
        assert source.counters.get("chunks_encoded") == 0


@in_a_loop
async def test_a_byte_flipped_in_an_encoded_chunk_is_asked_for_again_and_comes_as_it_is(
    tmp_path: Path,
) -> None:
    data = mixed()
    async with running_nodes(tmp_path, "source", "reader", codec="always", streams=1) as (source, reader):
        manifest = source.publish(data)
        with BadWire(source.server.port) as wire:
            wire.flip_at = [64 + 500]
            fetch = await reader.fetch(manifest, source.ref(wire.port))
        assert fetch.wanted.into == data
        assert fetch.progress.bad_chunks(0, "source") == 0
        await idle(source)
        assert source.counters.get("chunks_resent") == 1
        assert reader.counters.get("corrupt_received") == 1
        assert len(source.store.held()) == 1


def test_each_load_may_ask_for_an_equal_part() -> None:
    turns = FairTurns(100)
    assert turns.allowance_bytes == 100
    with turns.taking_part():
        assert turns.allowance_bytes == 100
        with turns.taking_part(), turns.taking_part(), turns.taking_part():
            assert turns.allowance_bytes == 25
    assert turns.allowance_bytes == 100
