"""How far ahead a connection encodes, and that nothing is left of it when it ends early."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastcheckd.transfer.lane_client import AHEAD, _made_ahead
from fastcheckd.transfer.put_tally import PutTally
from fastcheckd.transfer.shard_source import ShardSource
from transfer_harness import CHUNK, codec_pool, manifest_of, source_of

from fastcheckd.errors import PeerError
from fastcheckd.transfer import shard_source
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.frames import Codec

COUNT = 12


def of_zeros(pool: CodecPool) -> ShardSource:
    return source_of(bytes(COUNT * CHUNK), manifest_of(COUNT * CHUNK), pool, choose=lambda _: True)


def ahead(source: ShardSource, still_wanted: Callable[[], None] = lambda: None) -> Any:
    return _made_ahead(
        source,
        range(COUNT),
        against_base=False,
        plain=False,
        tally=PutTally(),
        still_wanted=still_wanted,
    )


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_while_one_chunk_is_sent_the_next_two_are_made_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = shard_source.encode

    def counting(*args: Any, **named: Any) -> Any:
        made.append(1)
        return real(*args, **named)

    monkeypatch.setattr(shard_source, "encode", counting)
    with codec_pool(2) as pool, contextlib.closing(ahead(of_zeros(pool))) as payloads:
        for sent in range(COUNT):
            index, payload = next(payloads)
            assert (index, payload.codec) == (sent, Codec.ENCODED)
            due = min(COUNT, sent + 1 + AHEAD)
            eventually(lambda due=due: len(made) == due)  # type: ignore[misc]
            assert not pool.busy or len(made) == due
        assert next(payloads, None) is None
    assert len(made) == COUNT


def test_a_connection_that_ends_while_it_waits_for_the_encoder_calls_the_rest_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, began = threading.Event(), threading.Event()
    real = shard_source.encode
    made: list[int] = []

    def slow(*args: Any, **named: Any) -> Any:
        made.append(1)
        began.set()
        assert go_on.wait(5)
        return real(*args, **named)

    monkeypatch.setattr(shard_source, "encode", slow)

    def ended() -> None:
        began.wait(5)
        threading.Timer(0.2, go_on.set).start()
        raise PeerError("the peer hung up")

    with codec_pool(1) as pool:
        source = of_zeros(pool)
        with contextlib.closing(ahead(source, ended)) as payloads, pytest.raises(PeerError, match="hung up"):
            next(payloads)
        assert source._kept == {}
        assert not pool.busy
    assert len(made) == 1
