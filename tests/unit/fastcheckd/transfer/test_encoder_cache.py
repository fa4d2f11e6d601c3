"""Chunks in the form in which they travel: encoded once, a little ahead, within bounds, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.eventually import until
from trained_state import TrainedState
from transfer_harness import CHUNK, Node, damage, idle, in_a_loop, manifest_of, running_nodes, some_bytes

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheckd.codec.chunk_plan import opaque
from fastcheckd.codec.decoder import decode, read_header
from fastcheckd.counters import Counters
from fastcheckd.errors import MispredictedError, NotHeldError, PeerError
from fastcheckd.store.replica import Replica
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import staging_pool
from fastcheckd.transfer import encoder_cache
from fastcheckd.transfer.channel import Channel
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.encoder_cache import AHEAD, EncoderCache, Payload, ShardEncoder
from fastcheckd.transfer.frames import Codec
from fastcheckd.transfer.outgoing import OutgoingShard
from fastcheckd.transfer.policy import RestorePolicy

COUNT = 12
OLD = some_bytes(COUNT * CHUNK)
NEW = bytearray(OLD)
NEW[7::CHUNK] = bytes(byte ^ 0x40 for byte in OLD[7::CHUNK])


class Bench:
    """A store with two steps of a shard, and the cache over it."""

    def __init__(self, directory: Path, threads: int = 2, codec: str = "auto") -> None:
        self.counters = Counters()
        self.store = ReplicaStore.open(directory / "ram", budget_bytes=16 << 20, counters=self.counters)
        self.pool = CodecPool(threads, 1)
        self.encoders = EncoderCache(self.store, self.pool, RestorePolicy(codec, threads), self.counters)
        self.old = self.publish(OLD, 5)
        self.new = self.publish(NEW, 6)
        self.ours, self.theirs = socket.socketpair()
        self.channel = Channel(self.ours, "the reader", 5.0)

    def publish(self, data: bytearray, step: int) -> Replica:
        segment = self.store.allocate(len(data), staging_pool("job", 0, 1))
        segment.view[:] = data
        replica = self.store.publish(manifest_of(data, step=step), segment, 0, verified=True)
        self.store.release(segment)
        return replica

    @contextlib.contextmanager
    def encoder(self, *, base: bool = True, **how: Any) -> Iterator[ShardEncoder]:
        """Of the newer step while it is being replicated."""
        shard = OutgoingShard([opaque(CHUNK)] * COUNT, **{"fraction": 1.0, **how})
        with (
            self.encoders.outgoing(self.new.key, self.new.manifest.digest, shard),
            self.encoders.opened(self.new, self.old if base else None, replicates=True) as encoder,
        ):
            assert encoder.outgoing is shard
            yield encoder

    def payloads(
        self,
        encoder: ShardEncoder,
        run: Any = range(COUNT),
        plain: Callable[[int], bool] = lambda _: False,
        *,
        lean: bool = False,
    ) -> Any:
        return contextlib.closing(encoder.payloads(run, self.channel, plain=plain, lean=lean))

    def check(self, index: int, payload: Payload, base: bytearray | None = OLD) -> None:
        """A payload decodes to the chunk."""
        span = slice(index * CHUNK, (index + 1) * CHUNK)
        if payload.codec == Codec.RAW:
            assert payload.data == NEW[span]
            return
        into = bytearray(CHUNK)
        assert read_header(payload.data).needs_base is (base is not None)
        decode(payload.data, None if base is None else base[span], memoryview(into))
        assert into == NEW[span]

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.pool.close()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The digests of what was encoded, in order."""
    found: list[bytes] = []
    real = encoder_cache.encode

    def counting(*args: Any, digest: bytes, **named: Any) -> Any:
        found.append(digest)
        return real(*args, digest=digest, **named)

    monkeypatch.setattr(encoder_cache, "encode", counting)
    return found


def test_each_chunk_is_encoded_once_for_two_holders(bench: Bench, encoded: list[bytes]) -> None:
    with bench.encoder(readers=2) as encoder:
        for _ in range(2):
            with bench.payloads(encoder) as payloads:
                for index, payload in payloads:
                    assert payload.codec == Codec.ENCODED
                    bench.check(index, payload)
        assert len(encoded) == COUNT
        assert not encoder._kept, "what all have taken is not kept"
        assert encoder._kept_bytes == 0
        with bench.payloads(encoder, [3]) as payloads:
            list(payloads)
        assert len(encoded) == COUNT + 1
    assert bench.counters.get("chunks_encoded") == COUNT + 1
    assert bench.counters.get("encode_cpu_ms") >= 0


def test_two_holders_at_the_same_time_share_what_is_encoded(bench: Bench, encoded: list[bytes]) -> None:
    with bench.encoder(readers=2) as encoder:

        def read() -> None:
            with bench.payloads(encoder) as payloads:
                for index, payload in payloads:
                    bench.check(index, payload)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(encoded) == len(set(encoded)) == COUNT


def test_while_one_chunk_is_sent_the_next_two_are_encoded_and_no_more(
    bench: Bench, encoded: list[bytes]
) -> None:
    with bench.encoder() as encoder, bench.payloads(encoder) as payloads:
        for sent in range(COUNT):
            index, _ = next(payloads)
            assert index == sent
            due = min(COUNT, sent + 1 + AHEAD)
            until(lambda due=due: len(encoded) == due)  # type: ignore[misc]
        assert next(payloads, None) is None
    assert len(encoded) == COUNT


def test_a_connection_that_ends_while_it_waits_calls_the_rest_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, threads=1)
    go_on, began = threading.Event(), threading.Event()
    made: list[int] = []

    def slow(*_: Any, **__: Any) -> None:
        made.append(1)
        began.set()
        assert go_on.wait(30)

    monkeypatch.setattr(encoder_cache, "encode", slow)
    with bench.encoder() as encoder:

        def hang_up() -> None:
            assert began.wait(30)
            bench.channel.end()
            time.sleep(0.3)
            go_on.set()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with bench.payloads(encoder) as payloads, pytest.raises(PeerError, match="ended"):
            next(payloads)
        thread.join(30)
        assert go_on.is_set(), "one that is being encoded is waited for: it reads the replica"
        assert not encoder._kept
        assert not bench.pool.busy
    assert len(made) == 1
    bench.store.drop(bench.new)
    bench.close()


def test_one_that_leaves_does_not_take_away_what_another_waits_for(
    tmp_path: Path, encoded: list[bytes]
) -> None:
    bench = Bench(tmp_path, threads=1)
    with bench.encoder(readers=2) as encoder:
        may_go = threading.Event()
        busy = bench.pool.submit(may_go.wait, 30)
        leaving, staying = bench.payloads(encoder), bench.payloads(encoder)
        with staying as payloads:
            found: list[tuple[int, Payload]] = []
            reader = threading.Thread(target=lambda: found.extend(payloads))
            reader.start()
            until(lambda: len(encoder._kept) == AHEAD + 1)
            bench_channel, other = bench.channel, socket.socketpair()
            bench.channel = Channel(other[0], "another", 5.0)
            bench.channel.end()
            with leaving, bench.payloads(encoder) as ended, pytest.raises(PeerError):
                next(ended)
            bench.channel = bench_channel
            may_go.set()
            busy.result()
            reader.join(30)
            assert [index for index, _ in found] == list(range(COUNT))
        for end in other:
            end.close()
    assert len(encoded) == COUNT
    bench.close()


def test_what_is_kept_for_holders_that_are_late_is_bounded(
    bench: Bench, encoded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        encoder_cache, "KEPT_BYTES_MAX", 5 * 1400
    )  # a chunk here takes some hundred, and 1024
    with bench.encoder(readers=2) as encoder:
        with bench.payloads(encoder) as payloads:
            for _ in payloads:
                assert encoder._kept_bytes <= 5 * 1400
        kept = len(encoder._kept)
        assert 3 <= kept < COUNT
        with bench.payloads(encoder) as payloads:
            for index, payload in payloads:
                bench.check(index, payload)
        assert COUNT < len(encoded) <= 2 * COUNT


def test_what_has_to_go_plain_is_not_encoded(bench: Bench, encoded: list[bytes]) -> None:
    with (
        bench.encoder() as encoder,
        bench.payloads(encoder, plain=lambda index: index % 2 == 0) as payloads,
    ):
        for index, payload in payloads:
            assert payload.codec == (Codec.RAW if index % 2 == 0 else Codec.ENCODED)
            bench.check(index, payload)
    assert len(encoded) == COUNT // 2


def test_the_share_decides_and_a_reader_short_of_memory_overrules_it(
    bench: Bench, encoded: list[bytes]
) -> None:
    for fraction, lean, at_least, at_most in (
        (0.0, False, 0, 0),
        (0.5, False, 4, 8),
        (0.0, True, COUNT, COUNT),
    ):
        encoded.clear()
        with bench.encoder(fraction=fraction) as encoder, bench.payloads(encoder, lean=lean) as payloads:
            for index, payload in payloads:
                bench.check(index, payload)
        assert at_least <= len(encoded) <= at_most


def test_without_a_base_a_save_is_encoded_only_where_the_operator_wants_it(
    bench: Bench, encoded: list[bytes]
) -> None:
    for alone in (False, True):
        with (
            bench.encoder(base=False, alone=alone) as encoder,
            bench.payloads(encoder, lean=True) as payloads,
        ):
            for index, payload in payloads:
                bench.check(index, payload, base=None)
        assert len(encoded) == alone * COUNT


def test_an_older_step_that_is_read_is_not_encoded_as_the_save_under_way(bench: Bench) -> None:
    shard = OutgoingShard([opaque(CHUNK)] * COUNT, fraction=1.0)
    digest = bench.new.manifest.digest
    with bench.encoders.outgoing(bench.new.key, digest, shard):
        with bench.encoders.opened(bench.old, None, replicates=True) as encoder:
            assert encoder.outgoing is None
        with bench.encoders.opened(bench.new, None, replicates=False) as encoder:
            assert encoder.outgoing is None, "a restore"
    with bench.encoders.opened(bench.new, None, replicates=True) as encoder:
        assert encoder.outgoing is None, "the save is done"


def test_all_connections_against_one_base_share_an_encoder_and_the_last_one_ends_it(bench: Bench) -> None:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(bench.encoders.opened(bench.new, bench.old))
        with bench.encoders.opened(bench.new, bench.old) as two:
            assert one is two
        assert stack.enter_context(bench.encoders.opened(bench.new, bench.old)) is one
        assert stack.enter_context(bench.encoders.opened(bench.new, None)) is not one
        bench.store.drop(bench.new)
        with bench.payloads(one, [0], plain=lambda _: True) as payloads:
            bench.check(*next(payloads))  # dropped, and readable as long as it is open
    assert not bench.encoders._encoders and not bench.encoders._users
    with pytest.raises(NotHeldError), bench.encoders.opened(bench.new, bench.old):
        pass
    assert not bench.encoders._encoders and not bench.encoders._users


def test_the_owner_is_told_of_each_chunk_that_was_encoded_against_the_base(bench: Bench) -> None:
    told: dict[int, bytes] = {}

    def on_encoded(index: int, payload: memoryview | bytes, new: memoryview) -> None:
        told[index] = bytes(new)

    with bench.encoder(readers=2, on_encoded=on_encoded) as encoder, bench.payloads(encoder) as payloads:
        list(payloads)
    assert told == {index: NEW[index * CHUNK : (index + 1) * CHUNK] for index in range(COUNT)}


def test_a_chunk_gone_bad_here_does_not_pass_for_what_it_was(bench: Bench) -> None:
    damage(bench.new, 100)
    with bench.encoder() as encoder, bench.payloads(encoder) as payloads:
        index, payload = next(payloads)
        with pytest.raises(MispredictedError):
            bench.check(index, payload)
        for index, payload in payloads:
            bench.check(index, payload)


def test_how_the_sending_went_is_known() -> None:
    shard = OutgoingShard([], fraction=1.0)
    assert (shard.busy_s, shard.sent_bytes, shard.encoding, shard.moved_at("a")) == (0.0, 0, (0, 0, 0.0), 0.0)
    started = time.monotonic()
    with shard.connection_sends():
        with shard.connection_sends():
            time.sleep(0.05)
        time.sleep(0.05)
    took = time.monotonic() - started
    time.sleep(0.1)
    assert 0.1 <= shard.busy_s <= took, "two connections at once count once, and pauses do not"
    shard.sent("a", raw_bytes=100, sent_bytes=10)
    shard.sent("b", raw_bytes=100, sent_bytes=20)
    assert shard.sent_bytes == 30
    assert started < shard.moved_at("a") <= shard.moved_at("b")
    shard.encoded(100, 10, 0.5, shrunk=True)
    shard.encoded(100, 100, 0.5, shrunk=False)
    assert (shard.encoding, shard.encode_s, shard.chunks_encoded) == ((200, 110, 1.0), 1.0, 1)


# --- between nodes ----------------------------------------------------------------------------------


def opened(
    manifest: pb.ShardManifest, *bases: pb.ShardManifest, step: int | None = None
) -> peer_pb2.OpenRequest:
    return peer_pb2.OpenRequest(
        cluster_id="fastcheck",
        key=manifest.key,
        digest=manifest.digest,
        streams=1,
        purpose=peer_pb2.PURPOSE_REPLICATE,
        bases=[peer_pb2.Base(step=step or base.key.step, digest=base.digest) for base in bases],
        accept_encoded=True,
        reader="holder",
    )


@in_a_loop
async def test_a_base_is_chosen_only_if_both_have_it_and_it_is_an_older_step_cut_alike(
    tmp_path: Path,
) -> None:
    async with running_nodes(tmp_path, "owner", "reader") as (owner, reader):
        steps = {step: owner.publish(some_bytes(3 * CHUNK, seed=step), step=step) for step in (4, 5, 6, 7)}
        longer = owner.publish(some_bytes(3 * CHUNK + 1), step=3)
        elsewhere = owner.publish(some_bytes(3 * CHUNK), step=2, shard=1)

        async def base_of(*bases: pb.ShardManifest, step: int | None = None) -> int | None:
            answer = await reader.client.open(owner.ref(), opened(steps[6], *bases, step=step))
            return answer.base_step if answer.HasField("base_step") else None

        assert await base_of() is None
        assert await base_of(steps[5], steps[4]) == 5
        assert await base_of(steps[4], steps[5]) == 4, "the reader's order counts"
        assert await base_of(steps[5], step=4) is None, "another digest under that step"
        assert await base_of(steps[7]) is None
        assert await base_of(steps[6]) is None
        assert await base_of(longer) is None
        assert await base_of(elsewhere) is None
        assert await base_of(longer, steps[4]) == 4
        owner.store.drop(owner.store.find(steps[5].key, pb.REPLICA_KIND_OWNER) or pytest.fail("gone"))
        assert await base_of(steps[5], steps[4]) == 4


async def replicate(
    owner: Node, holders: list[Node], state: TrainedState
) -> tuple[bytes, pb.ShardManifest, int]:
    data = state.state()
    manifest = owner.publish(data, step=state.step, lengths=state.lengths)
    with owner.announced(manifest, state.plans, readers=len(holders)) as shard:
        answers = await asyncio.gather(*(owner.offer(holder, manifest) for holder in holders))
        for holder, answer in zip(holders, answers, strict=True):
            assert holder.has_exactly(manifest, data)
            assert answer.received_bytes <= len(data)
        await idle(owner)
        assert shard.sent_bytes == sum(answer.received_bytes for answer in answers)
    return data, manifest, shard.sent_bytes


@pytest.mark.parametrize("streams", [1, 3])
@in_a_loop
async def test_steps_of_a_training_shrink_by_all_codecs_and_every_step_is_exact(
    tmp_path: Path, streams: int
) -> None:
    async with running_nodes(tmp_path, "owner", "a", "b", streams=streams) as (owner, *holders):
        state = TrainedState()
        saved = [await replicate(owner, holders, state)]
        assert saved[0][2] == 2 * len(saved[0][0])
        for _ in range(3):
            state.train()
            saved.append(await replicate(owner, holders, state))
            assert saved[-1][2] < 0.7 * 2 * len(saved[-1][0])
        codecs = {use.codec for use in holders[0].copy(saved[-1][1]).manifest.codecs}
        assert {"adam", "sgd", "rounded", "rows", "same", "raw"} <= codecs
        for data, manifest, _ in saved:
            for holder in holders:
                assert holder.has_exactly(manifest, data)
        assert all(holder.counters.get("corrupt_received") == 0 for holder in holders)
        assert owner.counters.get("chunks_resent") == 0


@in_a_loop
async def test_of_two_holders_each_gets_what_it_can_use(tmp_path: Path) -> None:
    async with running_nodes(tmp_path, "owner", "with", "without") as (owner, having, lacking):
        state = TrainedState()
        await replicate(owner, [having], state)
        state.train()
        data, manifest, _ = await replicate(owner, [having, lacking], state)
        received = [holder.counters.get("bytes_received") for holder in (having, lacking)]
        assert received[1] == len(data)
        assert received[0] < 1.7 * len(data)
        assert lacking.copy(manifest).is_whole
