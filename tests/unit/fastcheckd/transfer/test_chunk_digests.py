"""The table of chunk digests: right, and each computed once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.digests import chunk_digest
from fastcheckd.transfer import chunk_digests
from fastcheckd.transfer.chunk_digests import ChunkDigests


@given(st.binary(max_size=500), st.integers(1, 100), st.randoms())
def test_any_order_gives_the_same_table(data: bytes, chunk_bytes: int, order: object) -> None:
    expected = [chunk_digest(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes)]
    table = ChunkDigests(memoryview(data), chunk_bytes)
    assert len(table) == len(expected)
    some = list(range(len(table)))
    order.shuffle(some)  # type: ignore[attr-defined]
    for index in some[: len(some) // 2]:
        assert table.chunk(index) == expected[index]
    assert table.complete() == b"".join(expected)


def test_many_threads_compute_each_digest_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    together = threading.Barrier(4)

    def counting(data: memoryview) -> bytes:
        calls.append(data[0])
        return chunk_digest(data)

    monkeypatch.setattr(chunk_digests, "chunk_digest", counting)
    data = bytes(range(200))
    table = ChunkDigests(memoryview(data), 1)

    def all_of_them() -> bytes:
        together.wait(5)
        return table.complete()

    with ThreadPoolExecutor(4) as pool:
        results = {f.result() for f in [pool.submit(all_of_them) for _ in range(4)]}
    assert len(results) == 1
    assert sorted(calls) == list(range(200))
