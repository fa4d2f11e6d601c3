"""A shard on its way out: each digest computed once, each chunk encoded once, and nothing kept for nobody."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastcheckd.transfer.shard_source import BaseSource, Payload, ShardSource
from hypothesis import given
from hypothesis import strategies as st
from trained_state import TrainedState
from transfer_harness import codec_pool

from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.chunk_plan import opaque
from fastcheckd.codec.decoder import decode, read_header
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.errors import InvalidRequestError, PeerError
from fastcheckd.transfer import shard_source
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.frames import Codec

WAIT_S = 5.0


def yes(_: int) -> bool:
    return True


def no(_: int) -> bool:
    return False


def source_of(data: bytes | bytearray, lengths: list[int], pool: CodecPool, **options: Any) -> ShardSource:
    settings: dict[str, Any] = {
        "step": 7, "plans": [opaque(length) for length in lengths], "base": None, "choose": no
    }  # fmt: skip
    return ShardSource(memoryview(data), ChunkTable(lengths), pool=pool, **(settings | options))


def base_of(data: bytes, lengths: list[int], step: int = 6) -> BaseSource:
    table = ChunkTable(lengths)
    digests = b"".join(chunk_digest(data[slice(*table.range(i))]) for i in range(len(table)))
    return BaseSource(step, shard_digest(digests), digests, memoryview(data), table)


class Gate:
    """Stands in the way of `encode` and counts who comes by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.calls: list[int] = []
        real = shard_source.encode

        def gated(new: memoryview, *rest: Any, **named: Any) -> Any:
            self.calls.append(len(new))
            assert self.open.wait(WAIT_S)
            return real(new, *rest, **named)

        monkeypatch.setattr(shard_source, "encode", gated)


@given(st.lists(st.integers(1, 60), max_size=12), st.randoms())
def test_digests_in_any_order_give_the_same_table(lengths: list[int], order: Any) -> None:
    data = bytes(order.randbytes(sum(lengths)))
    with codec_pool(1) as pool:
        source = source_of(data, lengths, pool)
        expected = [chunk_digest(data[slice(*source.table.range(i))]) for i in range(len(lengths))]
        some = list(range(len(lengths)))
        order.shuffle(some)
        for index in some[: len(some) // 2]:
            assert source.digest(index) == expected[index]
        assert source.complete() == b"".join(expected)
        assert len(source) == len(lengths)


def test_many_threads_prepare_and_hash_each_chunk_once_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(range(200))
    prepared: list[int] = []
    hashed: list[int] = []
    together = threading.Barrier(4)

    def prepare(index: int) -> None:
        prepared.append(index)
        data[index] = 255 - data[index]

    def counting(chunk: memoryview) -> bytes:
        hashed.append(255 - chunk[0])
        return chunk_digest(chunk)

    monkeypatch.setattr(shard_source, "chunk_digest", counting)
    with codec_pool(1) as codec, ThreadPoolExecutor(4) as pool:
        source = source_of(data, [1] * 200, codec, prepare=prepare)

        def all_of_them() -> bytes:
            together.wait(WAIT_S)
            return source.complete()

        results = {f.result() for f in [pool.submit(all_of_them) for _ in range(4)]}
    assert len(results) == 1
    assert sorted(prepared) == sorted(hashed) == list(range(200))


def test_what_does_not_describe_one_shard_is_refused() -> None:
    with codec_pool(1) as pool:
        for lengths, plans in (([5, 6], [opaque(5), opaque(6)]), ([5, 5], [opaque(10)])):
            with pytest.raises(InvalidRequestError):
                ShardSource(
                    memoryview(bytes(10)), ChunkTable(lengths), step=1, plans=plans, base=None, pool=pool, choose=no
                )  # fmt: skip


def test_a_chunk_goes_raw_encoded_or_unchanged() -> None:
    state = TrainedState()
    old, lengths = state.state(), list(state.lengths)
    state.train()
    new, plans = state.state(), state.plans
    table = ChunkTable(lengths)
    with codec_pool() as pool:
        base = base_of(old, lengths)
        source = source_of(new, lengths, pool, plans=plans, base=base, choose=yes)
        assert source.base is base
        for against_base in (False, True):
            with source.put_under_way(against_base=against_base):
                for index in range(len(table)):
                    start, stop = table.range(index)
                    payload = source.payload(index, against_base=against_base)
                    if payload.codec == Codec.RAW:
                        assert payload.data == new[start:stop]
                        continue
                    header = read_header(memoryview(payload.data))
                    assert header.digest == source.digest(index)
                    assert (header.needs_base, header.step) == (against_base, 7)
                    out = memoryview(bytearray(stop - start))
                    decode(
                        memoryview(payload.data), memoryview(old)[start:stop] if against_base else None, out
                    )
                    assert out == new[start:stop]
        assert [use.codec for use in source.payload(4, against_base=True).uses] == ["same"]
        assert source.payload(5, against_base=True).codec == Codec.RAW  # noise
        for index in range(len(table)):
            plain = source.payload(index, against_base=True, plain=True)
            assert plain.codec == Codec.RAW
            assert plain.data == new[slice(*table.range(index))]
        assert source.encoded_chunks > 0
        assert source.encode_s > 0


def test_an_unchanged_chunk_asks_nobody_and_a_chosen_not_to_be_encoded_one_goes_raw() -> None:
    lengths = [70_000, 70_000]
    old = bytes(140_000)
    new = bytes(70_000) + b"\1" * 70_000
    asked: list[int] = []

    def choose(index: int) -> bool:
        asked.append(index)
        return False

    with codec_pool(1) as pool:
        source = source_of(new, lengths, pool, base=base_of(old, lengths), choose=choose)
        assert source.payload(0, against_base=True).codec == Codec.ENCODED
        assert asked == []
        assert source.payload(1, against_base=True).codec == Codec.RAW
        assert asked == [1]


def test_a_base_that_is_cut_otherwise_is_none() -> None:
    with codec_pool(1) as pool:
        base = base_of(bytes(10), [5, 5])
        assert source_of(bytes(10), [4, 6], pool, base=base).base is None
        assert source_of(bytes(10), [5, 5], pool, base=base).base is base


def test_holders_with_the_same_base_share_one_encoding_and_it_is_then_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    with codec_pool(2) as pool:
        source = source_of(bytes(70_000), [70_000], pool, choose=yes)
        with source.put_under_way(against_base=False), source.put_under_way(against_base=False):
            first, second = (source.order(0, against_base=False) for _ in range(2))
            gate.open.set()
            one = first.take(lambda: None)
            assert len(source._kept) == 1
            two = second.take(lambda: None)
            assert one is two
            assert source._kept == {}
            assert source._kept_bytes == 0
    assert gate.calls == [70_000]


def test_a_slow_holder_has_chunks_encoded_again_instead_of_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    count, size = 20, 70_000
    monkeypatch.setattr(shard_source, "KEPT_BYTES_MAX", 5_000)
    with codec_pool(2) as pool:
        source = source_of(bytes(count * size), [size] * count, pool, choose=yes)
        with source.put_under_way(against_base=False), source.put_under_way(against_base=False):
            for index in range(count):
                source.payload(index, against_base=False)
                assert source._kept_bytes <= 5_000
            kept = len(source._kept)
            assert 0 < kept < count
            for index in reversed(range(count)):  # those that are kept first
                source.payload(index, against_base=False)
            assert len(gate.calls) == 2 * count - kept
        assert source._kept == {}


def test_what_is_kept_goes_when_the_last_put_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(70_000)
    with codec_pool(1) as pool:
        source = source_of(data, [70_000], pool, choose=yes)
        with source.put_under_way(against_base=False), source.put_under_way(against_base=False):
            source.payload(0, against_base=False)
            assert source._kept_bytes > 0
        assert source._kept == {}
        assert source._kept_bytes == 0
        del source
        gc.collect()
        data.append(0)  # a BufferError, had anything still a view of it


def test_a_dropped_order_is_called_off_unless_somebody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with codec_pool(1) as pool:
        source = source_of(bytes(210_000), [70_000] * 3, pool, choose=yes)
        with source.put_under_way(against_base=False), source.put_under_way(against_base=False):
            orders = [source.order(index, against_base=False) for index in (0, 1, 1, 2)]
            orders[1].drop()
            orders[3].drop()  # still waits for a thread: never begun
            orders[3].drop()
            gate.open.set()
            assert orders[0].take(lambda: None).codec == Codec.ENCODED
            assert orders[2].take(lambda: None).codec == Codec.ENCODED
        assert gate.calls == [70_000] * 2


def test_dropping_waits_for_a_thread_that_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with codec_pool(1) as pool:
        source = source_of(bytes(70_000), [70_000], pool, choose=yes)
        order = source.order(0, against_base=False)
        while not gate.calls:
            pass
        dropping = threading.Thread(target=order.drop)
        dropping.start()
        dropping.join(0.05)
        assert dropping.is_alive()
        gate.open.set()
        dropping.join(WAIT_S)
        assert not dropping.is_alive()
        assert source._kept == {}


def test_an_encoder_that_fails_is_heard_by_all_and_the_next_order_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails: list[Callable[[], None]] = []

    def failing(*_: Any, **__: Any) -> None:
        fails.append(failing)
        raise RuntimeError("a defect")

    with codec_pool(1) as pool:
        source = source_of(bytes(70_000), [70_000], pool, choose=yes)
        with monkeypatch.context() as broken, source.put_under_way(against_base=False):
            broken.setattr(shard_source, "encode", failing)
            orders = [source.order(0, against_base=False) for _ in range(2)]
            for order in orders:
                with pytest.raises(RuntimeError, match="a defect"), order:
                    order.take(lambda: None)
        assert len(fails) == 1
        assert source._kept == {}
        assert source.payload(0, against_base=False).codec == Codec.ENCODED


def test_with_a_preparation_chunks_are_made_in_the_pool_from_what_it_left() -> None:
    data = bytearray(b"ab" * 35_000)
    threads: set[str] = set()

    def prepare(index: int) -> None:
        threads.add(threading.current_thread().name)
        data[:] = b"\2" * 70_000

    with codec_pool(1) as pool:
        source = source_of(
            data, [70_000], pool, choose=no, prepare=prepare, base=base_of(b"\2" * 70_000, [70_000])
        )
        payload: Payload = source.payload(0, against_base=True)
        assert [use.codec for use in payload.uses] == ["same"]
        assert source.payload(0, against_base=False).data == b"\2" * 70_000
    assert all(name.startswith("codec") for name in threads)


def test_a_closed_pool_is_said_so() -> None:
    pool = CodecPool(1, 1)
    source = source_of(bytes(70_000), [70_000], pool, choose=yes)
    pool.close()
    with pytest.raises(PeerError, match="shutting down"):
        source.order(0, against_base=False)
    assert source.payload(0, against_base=False, plain=True).codec == Codec.RAW
