"""Puts as changes of the step before, over a real lane into a real store, and everything that may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fastcheckd.store.ram_store import HeldShard
from fastcheckd.transfer.put_tally import PutOutcome
from fastcheckd.transfer.shard_source import BaseSource, ShardSource
from trained_state import TrainedState
from transfer_harness import (
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
    source_of,
)

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.decoder import decode
from fastcheckd.codec.encoder import encode
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.errors import FastCheckdError, FrameError, PeerError
from fastcheckd.transfer import targets
from fastcheckd.transfer.frames import (
    FRAME_BYTES,
    Codec,
    FrameHeader,
    Hello,
    Kind,
    pack_frame,
    pack_hello,
    parse_frame,
    parse_result,
)

Story = Callable[[Holder, Owner], Coroutine[Any, Any, None]]
ALWAYS = lambda _: True  # noqa: E731  a choice, not a function


def play(tmp_path: Path, story: Story, **owner: Any) -> None:
    """Run a story between one holder and one owner."""

    async def whole() -> None:
        async with (
            running_holder(tmp_path, timeout_s=owner.get("timeout_s", 20.0)) as holder,
            running_owner(**owner) as sender,
        ):
            await story(holder, sender)

    asyncio.run(asyncio.wait_for(whole(), 60))


@dataclasses.dataclass
class Saved:
    """One step as its owner has it."""

    data: bytes
    manifest: pb.ShardManifest
    source: ShardSource

    def as_base(self) -> BaseSource:
        digests = self.source.complete()
        view = memoryview(self.data)
        return BaseSource(
            self.manifest.key.step, shard_digest(digests), digests, view, ChunkTable.of(self.manifest)
        )


def save(
    owner: Owner,
    state: TrainedState,
    *,
    base: Saved | None = None,
    choose: Callable[[int], bool] = ALWAYS,
    shard: int = 0,
) -> Saved:
    data = state.state()
    manifest = manifest_of(len(data), step=state.step, lengths=state.lengths, shard=shard)
    source = source_of(
        data,
        manifest,
        owner.codec,
        plans=state.plans,
        base=base.as_base() if base else None,
        choose=choose,
    )
    return Saved(data, manifest, source)


async def put(holder: Holder, owner: Owner, saved: Saved, port: int | None = None) -> PutOutcome:
    return await owner.send(holder.ref(port), saved.source, saved.manifest)


async def one_put_one_to_go(holder: Holder, owner: Owner) -> tuple[TrainedState, Saved, Saved]:
    """A state, the step of it that the holder has, and the next one, to be put against it."""
    state = TrainedState()
    first = save(owner, state)
    await put(holder, owner, first)
    state.train()
    return state, first, save(owner, state, base=first)


def copy_of(holder: Holder, saved: Saved) -> HeldShard:
    held = holder.store.find(saved.manifest.key, pb.REPLICA_KIND_COPY)
    assert held is not None
    return held


def read_here(holder: Holder, saved: Saved) -> bytes:
    with holder.store.reading(copy_of(holder, saved)) as held:
        return bytes(held.view)


async def read_there(holder: Holder, owner: Owner, saved: Saved) -> bytes:
    into = bytearray(len(saved.data))
    digest = shard_digest(saved.source.complete())
    await owner.client.get_shard(holder.ref(), saved.manifest.key, digest, memoryview(into), lambda _: None)
    return bytes(into)


def codecs_of(outcome: PutOutcome) -> set[str]:
    return {use.codec for use in outcome.uses}


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_three_steps_in_a_row_patch_one_replica_and_all_come_back(tmp_path: Path, streams: int) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        outcome = await put(holder, owner, first)
        assert outcome.base_step is None
        assert outcome.digest == shard_digest(first.source.complete())
        assert codecs_of(outcome) <= {"raw", "planes", "rounded"}
        assert outcome.sent_bytes < outcome.raw_bytes == len(first.data)
        assert outcome.send_s > 0
        steps = [first]
        for _ in range(3):
            state.train()
            saved = save(owner, state, base=steps[-1])
            owner.progress.clear()
            outcome = await put(holder, owner, saved)
            assert outcome.base_step == steps[-1].manifest.key.step
            assert {"adam", "sgd", "rounded", "rows", "same", "raw"} <= codecs_of(outcome)
            assert sum(owner.progress) == outcome.sent_bytes < 0.7 * outcome.raw_bytes
            assert sum(use.raw_bytes for use in outcome.uses) == len(saved.data)
            held = copy_of(holder, saved)
            assert held.is_full
            assert held.view == saved.data
            here = {c.codec: (c.raw_bytes, c.encoded_bytes) for c in held.manifest.codecs}
            assert here == {u.codec: (u.raw_bytes, u.encoded_bytes) for u in outcome.uses}
            assert not copy_of(holder, steps[-1]).is_full
            steps.append(saved)
        assert holder.counters.get("patches_applied") == 3
        assert holder.counters.get("patches_undone") == 0
        assert holder.counters.get("corrupt_received") == 0
        assert holder.counters.get("chunks_mispredicted") == 0
        for saved in reversed(steps):
            assert await read_there(holder, owner, saved) == saved.data
        replicas = await owner.client.list_replicas(
            "holder", holder.data_address, "job", steps[-1].manifest.key.step, 5.0
        )
        assert {c.codec for c in replicas[0].codecs} == codecs_of(outcome)
        assert replicas[0].stored_bytes == len(first.data)
        assert not replicas[0].lossy

    play(tmp_path, story, streams=streams)


def test_a_planner_that_mixes_sends_some_chunks_raw_into_the_patch(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        state.train()
        second = save(owner, state, base=first, choose=lambda index: index % 2 == 0)
        outcome = await put(holder, owner, second)
        assert outcome.base_step == first.manifest.key.step
        assert {"raw", "adam", "same"} <= codecs_of(outcome)
        assert copy_of(holder, second).view == second.data
        assert not copy_of(holder, first).is_full
        assert read_here(holder, first) == first.data

    play(tmp_path, story)


def test_of_two_holders_each_is_sent_what_it_can_use(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        async with running_holder(tmp_path / "other") as other:
            state, first, second = await one_put_one_to_go(holder, owner)
            with_base, without = await asyncio.gather(put(holder, owner, second), put(other, owner, second))
            assert with_base.base_step == first.manifest.key.step
            assert without.base_step is None
            assert with_base.sent_bytes < without.sent_bytes
            for at in (holder, other):
                assert copy_of(at, second).view == second.data
            state.train()
            third = save(owner, state, base=second)
            both = await asyncio.gather(put(holder, owner, third), put(other, owner, third))
            assert [o.base_step for o in both] == [second.manifest.key.step] * 2
            for at in (holder, other):
                assert copy_of(at, third).view == third.data

    play(tmp_path, story)


Change = Callable[[Saved], BaseSource]


@pytest.mark.parametrize(
    "change",
    [
        lambda first: dataclasses.replace(first.as_base(), digest=bytes(16)),
        lambda first: dataclasses.replace(first.as_base(), step=first.manifest.key.step - 1),
    ],
    ids=["another digest", "another step"],
)
def test_a_base_that_the_holder_does_not_have_is_not_used(tmp_path: Path, change: Change) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        second.source.base = change(first)
        assert (await put(holder, owner, second)).base_step is None
        assert copy_of(holder, second).view == second.data
        assert copy_of(holder, first).view == first.data

    play(tmp_path, story)


def test_a_base_that_is_cut_otherwise_is_refused_by_either_end(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        second.manifest.ClearField("chunk_lengths")
        uniform = source_of(second.data, second.manifest, owner.codec, base=first.as_base(), choose=ALWAYS)
        assert uniform.base is None
        uniform.base = first.as_base()  # as an owner that errs would
        assert (await owner.send(holder.ref(), uniform, second.manifest)).base_step is None
        assert copy_of(holder, second).view == second.data

    play(tmp_path, story)


def test_a_base_that_is_being_read_stays_and_the_put_is_whole(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        with holder.store.pinned(copy_of(holder, first)):
            assert (await put(holder, owner, second)).base_step is None
        assert copy_of(holder, first).view == first.data
        assert copy_of(holder, second).view == second.data

    play(tmp_path, story)


def test_a_step_that_is_put_again_comes_whole_and_takes_the_place_of_the_other(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        await put(holder, owner, second)
        assert (await put(holder, owner, second)).base_step is None
        assert copy_of(holder, second).view == second.data
        assert read_here(holder, first) == first.data

    play(tmp_path, story)


@pytest.mark.parametrize("with_base", [False, True])
def test_encoded_bytes_flipped_on_the_way_are_sent_again_as_they_are(tmp_path: Path, with_base: bool) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        if with_base:
            await put(holder, owner, first)
            state.train()
        second = save(owner, state, base=first if with_base else None)
        with BadWire(holder.lane.port) as wire:
            wire.flip_at = [64 + 64 + 300]  # in the first payload
            outcome = await put(holder, owner, second, wire.port)
        assert (outcome.base_step is not None) is with_base
        assert copy_of(holder, second).view == second.data
        assert owner.counters.get("chunks_resent") == 1
        assert holder.counters.get("corrupt_received") == 1
        assert holder.counters.get("chunks_mispredicted") == 0
        if with_base:
            assert read_here(holder, first) == first.data

    play(tmp_path, story, streams=1)


def test_an_owner_whose_base_is_not_what_it_says_is_found_out_and_the_chunk_comes_raw(tmp_path: Path) -> None:
    """Well-formed chunks, encoded against other bytes than the digests say: as if both ends computed differently."""

    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        base = first.as_base()
        other = bytearray(base.view)
        other[5 : 12 * 8192 : 64] = bytes(len(range(5, 12 * 8192, 64)))
        second.source.base = dataclasses.replace(base, view=memoryview(other))
        outcome = await put(holder, owner, second)
        assert outcome.base_step == first.manifest.key.step
        assert copy_of(holder, second).view == second.data
        assert holder.counters.get("chunks_mispredicted") == 1
        assert holder.counters.get("corrupt_received") == 0
        assert owner.counters.get("chunks_resent") == 1
        assert read_here(holder, first) == first.data

    play(tmp_path, story)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_wire_cut_in_the_middle_leaves_the_base_as_it_was(tmp_path: Path, streams: int) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        used = holder.reserved_bytes
        state.train()
        second = save(owner, state, base=first)
        with BadWire(holder.lane.port) as wire:
            wire.cut_at = 64 + 64 + 60_000 // streams
            with pytest.raises(PeerError):
                await put(holder, owner, second, wire.port)
        await eventually(lambda: holder.counters.get("patches_undone") == 1)
        await eventually(lambda: holder.reserved_bytes == used and holder.desk.transfers == 0)
        held = copy_of(holder, first)
        assert held.is_full
        assert held.view == first.data
        assert holder.store.find(second.manifest.key, pb.REPLICA_KIND_COPY) is None
        assert (await put(holder, owner, second)).base_step == first.manifest.key.step
        assert copy_of(holder, second).view == second.data

    play(tmp_path, story, streams=streams)


def test_a_cancelled_patch_is_undone_and_lets_go_of_the_source(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        state.train()
        data = bytearray(state.state())
        manifest = manifest_of(len(data), step=state.step, lengths=state.lengths)
        source = source_of(
            data, manifest, owner.codec, plans=state.plans, base=first.as_base(), choose=ALWAYS
        )
        with BadWire(holder.lane.port) as wire:
            wire.stall_at = 64 + 64 + 50_000
            task = asyncio.create_task(owner.send(holder.ref(wire.port), source, manifest))
            await eventually(wire.stalled.is_set)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            del task, source
            gc.collect()
            data.append(0)  # a BufferError, had any thread still a view of it
            await eventually(lambda: holder.counters.get("patches_undone") == 1)
        await eventually(lambda: holder.desk.transfers == 0)
        assert read_here(holder, first) == first.data

    play(tmp_path, story, streams=2, timeout_s=20.0)


@pytest.mark.parametrize("with_base", [False, True])
def test_memory_goes_back_only_when_the_decoder_has_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_base: bool
) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        used = holder.reserved_bytes
        state.train()
        second = save(owner, state, base=first if with_base else None)
        began, go_on = threading.Event(), threading.Event()

        def slow(*args: Any, **named: Any) -> Any:
            began.set()
            assert go_on.wait(10)
            return decode(*args, **named)

        with monkeypatch.context() as slower:
            slower.setattr(targets, "decode", slow)
            task = asyncio.create_task(put(holder, owner, second))
            await eventually(began.is_set)
            task.cancel()
            await asyncio.wait([task])
            await eventually(lambda: holder.desk.transfers == 0)
            await asyncio.sleep(0.3)  # time enough to do what must not be done
            assert holder.lane.connections == 1
            assert holder.reserved_bytes > used
            assert holder.counters.get("patches_undone") == 0
            go_on.set()
            await eventually(lambda: holder.reserved_bytes == used)
        await eventually(lambda: holder.lane.connections == 0)
        assert holder.counters.get("patches_undone") == with_base
        assert copy_of(holder, first).view == first.data

    play(tmp_path, story, streams=1, timeout_s=20.0)


def test_a_reader_ends_a_patch_and_gets_the_older_step(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        with BadWire(holder.lane.port) as wire:
            wire.stall_at = 64 + 64 + 60_000
            task = asyncio.create_task(put(holder, owner, second, wire.port))
            await eventually(wire.stalled.is_set)
            assert await asyncio.to_thread(read_here, holder, first) == first.data
            with pytest.raises(PeerError):
                await task
        assert holder.counters.get("patches_undone") == 1
        assert (await put(holder, owner, second)).base_step == first.manifest.key.step
        assert copy_of(holder, second).view == second.data

    play(tmp_path, story, streams=2, timeout_s=20.0)


def test_a_reader_ends_a_patch_that_no_connection_has_joined_yet(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        state.train()
        begun = await begin(holder, owner, save(owner, state, base=first), first)
        assert begun.HasField("base_step")
        assert await read_there(holder, owner, first) == first.data
        assert holder.counters.get("patches_undone") == 1
        assert holder.desk.transfers == 0

    play(tmp_path, story, timeout_s=20.0)


def test_an_idle_patch_expires_and_is_undone(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        state.train()
        await begin(holder, owner, save(owner, state, base=first), first)
        await eventually(lambda: holder.counters.get("patches_undone") == 1)
        assert copy_of(holder, first).view == first.data

    play(tmp_path, story, timeout_s=0.1)


def test_shards_put_at_once_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        states = [TrainedState(seed=n) for n in range(4)]
        before = [save(owner, state, shard=n) for n, state in enumerate(states)]
        await asyncio.gather(*(put(holder, owner, saved) for saved in before))
        for state in states:
            state.train()
        after = [
            save(owner, state, base=old, shard=n)
            for n, (state, old) in enumerate(zip(states, before, strict=True))
        ]
        outcomes = await asyncio.gather(*(put(holder, owner, saved) for saved in after))
        assert all(outcome.base_step is not None for outcome in outcomes)
        for old, new in zip(before, after, strict=True):
            assert copy_of(holder, new).view == new.data
            assert read_here(holder, old) == old.data

    play(tmp_path, story, streams=3, threads=6)


def test_a_closed_codec_pool_ends_puts_at_either_end(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        saved = save(owner, state)
        holder.codec.close()
        with pytest.raises(PeerError):
            await put(holder, owner, saved)
        await eventually(lambda: holder.reserved_bytes == 0)
        owner.codec.close()
        with pytest.raises(PeerError, match="shutting down"):
            await put(holder, owner, save(owner, state))
        await eventually(lambda: holder.reserved_bytes == 0)

    play(tmp_path, story)


def test_a_fenced_patch_is_refused_and_a_new_life_undoes_it(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        with pytest.raises(FastCheckdError):
            await owner.send(holder.ref(incarnation=INCARNATION - 1), second.source, second.manifest)
        assert copy_of(holder, first).view == first.data
        lane, ticket, begun = await connected(holder, owner, second, first)
        with lane:
            await asyncio.to_thread(send_all_raw, lane, ticket, second)
        holder.incarnation += 1
        digests = second.source.complete()
        finish = peer_pb2.FinishPutRequest(
            transfer_id=begun.transfer_id, chunk_digests=digests, digest=shard_digest(digests)
        )
        with pytest.raises(Exception, match="incarnation"):
            await owner.client._stub("holder", holder.data_address).FinishPut(finish, timeout=60)
        assert holder.counters.get("patches_undone") == 1
        assert copy_of(holder, first).view == first.data

    play(tmp_path, story)


# --- by hand, one connection -----------------------------------------------------------------------


async def begin(holder: Holder, owner: Owner, saved: Saved, base: Saved | None) -> peer_pb2.BeginPutResponse:
    request = peer_pb2.BeginPutRequest(
        cluster_id="fastcheck",
        epoch=EPOCH,
        holder_incarnation=holder.incarnation,
        owner=pb.NodeRef(node_id="owner", incarnation=1),
        manifest=saved.manifest,
        streams=1,
    )
    if base is not None:
        offered = base.as_base()
        request.bases.add(step=offered.step, digest=offered.digest)
    return await owner.client._stub("holder", holder.data_address).BeginPut(request, timeout=60)


async def connected(
    holder: Holder, owner: Owner, saved: Saved, base: Saved | None
) -> tuple[socket.socket, bytes, peer_pb2.BeginPutResponse]:
    begun = await begin(holder, owner, saved, base)
    sock = socket.create_connection(("127.0.0.1", holder.lane.port), timeout=60)
    return sock, begun.tickets[0], begun


def frame(saved: Saved, index: int, payload: bytes, codec: Codec = Codec.ENCODED, **changes: Any) -> bytes:
    start, stop = saved.source.table.range(index)
    fields: dict[str, Any] = {
        "kind": Kind.DATA,
        "chunk": index,
        "raw_bytes": stop - start,
        "encoded_bytes": len(payload),
        "offset": start,
        "digest": saved.source.digest(index),
        "codec": codec,
    }
    return pack_frame(FrameHeader(**(fields | changes))) + payload


def raw_frame(saved: Saved, index: int) -> bytes:
    start, stop = saved.source.table.range(index)
    return frame(saved, index, saved.data[start:stop], Codec.RAW)


def receive(sock: socket.socket) -> tuple[FrameHeader, bytes]:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = sock.recv(size - len(data))
            assert piece, "closed early"
            data += piece
        return data

    header = parse_frame(exactly(FRAME_BYTES))
    return header, exactly(header.encoded_bytes)


def end(chunks: int) -> bytes:
    return pack_frame(FrameHeader(kind=Kind.END, chunk=chunks))


def send_all_raw(sock: socket.socket, ticket: bytes, saved: Saved) -> None:
    count = len(saved.source.table)
    sock.sendall(pack_hello(Hello(first=0, stride=1, ticket=ticket)))
    for index in range(count):
        sock.sendall(raw_frame(saved, index))
    sock.sendall(end(count))
    header, _ = receive(sock)
    assert (header.kind, header.chunk) == (Kind.RESULT, 0)


def encoded(saved: Saved, base: Saved | None, index: int, **changes: Any) -> bytes:
    """A chunk, encoded with its own numbers or with others."""
    start, stop = saved.source.table.range(index)
    fields: dict[str, Any] = {
        "step": saved.manifest.key.step,
        "base_step": base.manifest.key.step if base else 0,
        "digest": saved.source.digest(index),
        "base_digest": base.source.digest(index) if base else bytes(16),
    }
    made = encode(
        memoryview(saved.data)[start:stop],
        memoryview(base.data)[start:stop] if base else None,
        saved.source._plans[index],
        **(fields | changes),
    )
    assert made is not None
    return made.payload


OTHER = chunk_digest(b"other bytes")


@pytest.mark.parametrize("against", [False, True])
def test_encoded_chunks_that_are_not_what_they_should_be_are_named_and_counted(
    tmp_path: Path, against: bool
) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        base = first if against else None
        good = encoded(second, base, 0)
        damaged = bytearray(good)
        damaged[-1] ^= 1
        corrupt = [
            bytes(damaged),
            good[:-1],
            good[:40],
            b"x",
            encoded(second, base, 0, step=second.manifest.key.step + 1),
            encoded(second, base, 0, digest=OTHER),  # not the digest in the frame
            encoded(second, base, 1),
        ]
        corrupt += [encoded(second, first, 0, base_step=1), encoded(second, first, 0, base_digest=OTHER)]
        if not against:
            corrupt.append(encoded(second, first, 0))
        mispredicted = frame(second, 0, encoded(second, base, 0, digest=OTHER), digest=OTHER)
        frames = [frame(second, 0, payload) for payload in corrupt] + [mispredicted]
        expected = {"corrupt_received": 0, "chunks_mispredicted": 0}
        for each in frames:
            lane, ticket, begun = await connected(holder, owner, second, base)
            assert begun.HasField("base_step") is against
            with lane:
                lane.sendall(pack_hello(Hello(first=0, stride=1, ticket=ticket)) + each)
                count = len(second.source.table)
                lane.sendall(b"".join(raw_frame(second, i) for i in range(1, count)) + end(count))
                header, payload = await asyncio.to_thread(receive, lane)
                assert header.kind == Kind.RESULT
                assert parse_result(payload, range(count)) == [0]
                expected["chunks_mispredicted" if each is mispredicted else "corrupt_received"] += 1
                for name, value in expected.items():
                    assert holder.counters.get(name) == value
            await eventually(lambda: holder.desk.transfers == 0)
            assert read_here(holder, first) == first.data

    play(tmp_path, story)


@pytest.mark.parametrize("against", [False, True])
def test_a_chunk_that_came_already_ends_the_put(tmp_path: Path, against: bool) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        _, first, second = await one_put_one_to_go(holder, owner)
        base = first if against else None
        for again in (raw_frame(second, 0), frame(second, 0, encoded(second, base, 0))):
            lane, ticket, _ = await connected(holder, owner, second, base)
            with lane:
                lane.sendall(pack_hello(Hello(first=0, stride=1, ticket=ticket)))
                lane.sendall(frame(second, 0, encoded(second, base, 0)) + again)
                header, sentence = await asyncio.to_thread(receive, lane)
                assert header.kind == Kind.ERROR
                assert b"came already" in sentence
            await eventually(lambda: holder.desk.transfers == 0)
            assert read_here(holder, first) == first.data
        assert holder.counters.get("lane_rejected") == 2

    play(tmp_path, story)


def test_a_chunk_claimed_to_be_unchanged_is_hashed_before_it_counts(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        first = save(owner, state)
        await put(holder, owner, first)
        held = copy_of(holder, first)
        start, _ = first.source.table.range(4)
        held.segment.view[held.offset + start] ^= 1  # in the chunk that never changes
        state.train()
        second = save(owner, state, base=first)
        outcome = await put(holder, owner, second)
        assert outcome.base_step == first.manifest.key.step
        assert owner.counters.get("chunks_resent") == 1
        assert copy_of(holder, second).view == second.data

    play(tmp_path, story)


def test_a_reader_may_not_be_sent_encoded_chunks(tmp_path: Path) -> None:
    """A get is raw: what a hostile holder encodes is not even read."""

    async def story(holder: Holder, owner: Owner) -> None:
        state = TrainedState()
        saved = save(owner, state)
        await put(holder, owner, saved)
        payload = encoded(saved, None, 0)
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(64)
                    sock.sendall(frame(saved, 0, payload))
                    with contextlib.suppress(ConnectionResetError):  # hung up with our bytes unread
                        sock.recv(1)

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            ref = holder.ref(listener.getsockname()[1])
            into = memoryview(bytearray(len(saved.data)))
            digest = shard_digest(saved.source.complete())
            with pytest.raises((PeerError, FrameError), match="not asked for"):
                await owner.client.get_shard(ref, saved.manifest.key, digest, into, lambda _: None)
            thread.join(5)

    play(tmp_path, story, streams=1)


def test_an_empty_shard_and_one_of_uniform_chunks_travel_too(tmp_path: Path) -> None:
    async def story(holder: Holder, owner: Owner) -> None:
        for size in (0, 3 * CHUNK + 7):
            older = manifest_of(size, step=5, shard=size % 2)
            newer = manifest_of(size, step=6, shard=size % 2)
            zeros, ones = bytes(size), b"\1" * size
            first = Saved(zeros, older, source_of(zeros, older, owner.codec, choose=ALWAYS))
            await put(holder, owner, first)
            source = source_of(ones, newer, owner.codec, base=first.as_base(), choose=ALWAYS)
            outcome = await put(holder, owner, Saved(ones, newer, source))
            assert outcome.base_step == (5 if size else None)
            assert outcome.sent_bytes <= size / 10
            assert copy_of(holder, Saved(ones, newer, source)).view == ones

    play(tmp_path, story)
