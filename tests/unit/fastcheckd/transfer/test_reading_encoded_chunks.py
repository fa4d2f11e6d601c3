"""One connection's encoded chunks, at both ends: a wrong one is seen, and what is called off touches no memory."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from fastcheckd.codec.get_planner import GetPlanner
from fastcheckd.transfer.arriving import Arriving
from fastcheckd.transfer.lane import Lane
from fastcheckd.transfer.outgoing import Outgoing

from fastcheckd.chunks import ChunkTable
from fastcheckd.codec.standalone import encode_alone
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import PeerError
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.frames import Codec, FrameHeader, Kind

CHUNK = 64 << 10
TABLE = ChunkTable.uniform(CHUNK, CHUNK)


def weights(seed: int) -> bytes:
    return (np.random.default_rng(seed).normal(size=CHUNK // 4) * 0.02).astype(np.float32).tobytes()


def encoded(data: bytes) -> bytearray:
    made = encode_alone(data, step=5, digest=chunk_digest(data))
    assert made is not None
    return bytearray(made.payload)


def header(payload: bytearray, digest: bytes) -> FrameHeader:
    return FrameHeader(
        kind=Kind.DATA, raw_bytes=CHUNK, encoded_bytes=len(payload), digest=digest, codec=Codec.ENCODED
    )


@contextlib.contextmanager
def busy(pool: CodecPool) -> Iterator[None]:
    """While the pool's only thread is taken."""
    may_go = threading.Event()
    taken = pool.submit(may_go.wait, 30)
    try:
        yield
    finally:
        may_go.set()
        taken.result()


@contextlib.contextmanager
def one_thread() -> Iterator[CodecPool]:
    pool = CodecPool(1, 1)
    try:
        yield pool
    finally:
        pool.close()


def not_wanted() -> None:
    raise PeerError("the transfer was ended")


def test_a_chunk_that_is_sound_and_not_the_committed_one_is_seen() -> None:
    theirs = weights(1)
    for wanted, good in ((theirs, True), (weights(2), False)):
        place, payload = bytearray(CHUNK), encoded(theirs)
        with one_thread() as pool:
            arriving = Arriving(TABLE, chunk_digest(wanted), pool)
            frame = header(payload, chunk_digest(theirs))
            assert arriving.settle(frame, memoryview(payload), memoryview(place), lambda: None) is good


def test_a_decoding_that_was_called_off_writes_nothing_any_more() -> None:
    data = weights(1)
    place, payload = bytearray(CHUNK), encoded(data)
    with one_thread() as pool:
        arriving = Arriving(TABLE, chunk_digest(data), pool)
        with busy(pool), pytest.raises(PeerError):
            arriving.settle(
                header(payload, chunk_digest(data)), memoryview(payload), memoryview(place), not_wanted
            )
        pool.submit(int).result()  # whatever was submitted before has run
    assert place == bytearray(CHUNK)


def test_encodings_that_were_called_off_read_nothing_any_more() -> None:
    data = memoryview(bytearray(weights(1)))
    ours, theirs = socket.socketpair()
    counters = Counters()
    with ours, theirs, one_thread() as pool:
        lane = Lane(ours, "the reader", 5.0)
        outgoing = Outgoing(
            data, TABLE, chunk_digest(data), 5,
            pool=pool, planner=GetPlanner("always", 1), counters=counters,
        )  # fmt: skip
        with busy(pool):
            lane.end()
            with contextlib.closing(outgoing.payloads([0], lane)) as payloads, pytest.raises(PeerError):
                next(payloads)
        pool.submit(int).result()
    assert counters.get("chunks_encoded") == 0
    data.release()
