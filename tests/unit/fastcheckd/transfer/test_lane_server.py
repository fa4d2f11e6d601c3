"""Strangers at the lane's port: they are closed and counted, and the server goes on."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.chunks import ChunkTable
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest
from fastcheckd.errors import ConfigError, NotHeldError
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.frames import (
    FRAME_BYTES,
    FrameHeader,
    Hello,
    Kind,
    pack_frame,
    pack_hello,
    parse_frame,
)
from fastcheckd.transfer.incoming import IncomingShard
from fastcheckd.transfer.lane_server import LaneServer
from fastcheckd.transfer.targets import WholeTarget
from fastcheckd.transfer.tickets import GetGrant, PutGrant, TicketOffice

CHUNK = 64 << 10
DATA = random.Random(4).randbytes(2 * CHUNK + 9)


class Stand:
    """A lane server with something to get."""

    def __init__(self, **options: float) -> None:
        self.counters = Counters()
        self.tickets = TicketOffice()
        self.codec = CodecPool(1, 1)
        self.server = LaneServer(
            "127.0.0.1",
            0,
            self.tickets,
            self.counters,
            2.0,
            pool=self.codec,
            **options,  # type: ignore[arg-type]
        )
        pieces = [DATA[i : i + CHUNK] for i in range(0, len(DATA), CHUNK)]
        self.manifest = pb.ShardManifest(
            bytes=len(DATA), chunk_bytes=CHUNK, chunk_digests=b"".join(chunk_digest(p) for p in pieces)
        )

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=5)
        sock.settimeout(5)
        return sock

    def ticket(self) -> bytes:
        @contextlib.contextmanager
        def opened() -> Iterator[memoryview]:
            yield memoryview(DATA)

        return self.tickets.issue(GetGrant(manifest=self.manifest, streams=1, opened=opened))

    def fetch(self, ticket: bytes) -> bytes:
        """A get by hand: the raw bytes that the server answers."""
        with self.connect() as sock:
            sock.sendall(pack_hello(Hello(first=0, stride=1, ticket=ticket)))
            return read_all(sock)

    def check_it_works(self) -> None:
        answer, got = self.fetch(self.ticket()), b""
        while True:
            header = parse_frame(answer[:FRAME_BYTES])
            if header.kind == Kind.END:
                break
            got += answer[FRAME_BYTES : FRAME_BYTES + header.encoded_bytes]
            answer = answer[FRAME_BYTES + header.encoded_bytes :]
        assert got == DATA

    def eventually(self, name: str, value: int) -> None:
        deadline = time.monotonic() + 5
        while self.counters.get(name) != value:
            assert time.monotonic() < deadline, self.counters.snapshot()
            time.sleep(0.01)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):  # closed with bytes of ours unread
        while piece := sock.recv(1 << 16):
            data += piece
    return data


@contextlib.contextmanager
def standing(**options: float) -> Iterator[Stand]:
    stand = Stand(**options)
    stand.server.start()
    try:
        yield stand
    finally:
        stand.server.stop()
        stand.codec.close()
        assert stand.server.connections == 0


def test_random_bytes_half_a_hello_and_nothing_are_closed_and_counted() -> None:
    with standing() as stand:
        for seed in range(20):
            with stand.connect() as sock:
                sock.sendall(random.Random(seed).randbytes(64 + 50 * seed))
                assert read_all(sock) == b""
        stand.eventually("lane_rejected", 20)
        for words in (b"", pack_hello(Hello(first=0, stride=1, ticket=bytes(32)))[:31]):
            with stand.connect() as sock:
                sock.sendall(words)
        stand.eventually("lane_rejected", 22)
        stand.check_it_works()
        assert stand.counters.get("lane_rejected") == 22


def test_a_hello_that_drips_is_closed_when_its_time_is_up() -> None:
    with standing(hello_timeout_s=0.3) as stand, stand.connect() as sock:
        started = time.monotonic()
        hello = pack_hello(Hello(first=0, stride=1, ticket=stand.ticket()))
        sock.settimeout(0.05)
        closed = False
        for byte in hello[:63]:
            with contextlib.suppress(TimeoutError):
                try:
                    sock.sendall(bytes([byte]))
                    closed = sock.recv(1) == b""
                except ConnectionError:
                    closed = True
            if closed:
                break
        assert closed
        assert time.monotonic() - started < 2
        stand.eventually("lane_rejected", 1)
        stand.check_it_works()


def test_a_ticket_opens_once() -> None:
    with standing() as stand:
        ticket = stand.ticket()
        assert len(stand.fetch(ticket)) > len(DATA)
        assert stand.fetch(ticket) == b""
        assert stand.fetch(bytes(32)) == b""
        assert stand.counters.get("lane_rejected") == 2


def test_a_grant_that_is_gone_and_a_wrong_stride_are_explained() -> None:
    @contextlib.contextmanager
    def gone() -> Iterator[memoryview]:
        raise NotHeldError("it is gone")
        yield

    with standing() as stand:
        grant = GetGrant(manifest=stand.manifest, streams=2, opened=gone)
        assert b"stride" in stand.fetch(stand.tickets.issue(grant))
        grant = GetGrant(manifest=stand.manifest, streams=1, opened=gone)
        assert b"it is gone" in stand.fetch(stand.tickets.issue(grant))
        stand.check_it_works()


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(FrameHeader(kind=Kind.DATA, chunk=3, raw_bytes=9, encoded_bytes=9, offset=3 * CHUNK)),
        pack_frame(FrameHeader(kind=Kind.DATA, chunk=0, raw_bytes=16 << 20, encoded_bytes=16 << 20)),
        pack_frame(FrameHeader(kind=Kind.DATA, chunk=1, raw_bytes=CHUNK, encoded_bytes=CHUNK, offset=0)),
        pack_frame(FrameHeader(kind=Kind.RESULT)),
        pack_frame(FrameHeader(kind=Kind.END, chunk=1)),
        struct.pack("<64s", b"FCFR"),
    ],
    ids=["no such chunk", "too large", "wrong offset", "a result", "a wrong count", "no checksum"],
)
def test_a_broken_frame_after_a_good_hello_fails_the_put_before_a_payload_is_read(frame: bytes) -> None:
    with standing() as stand:
        failed = threading.Event()
        released: list[object] = []
        segment: Any = SimpleNamespace(view=memoryview(bytearray(b"." * len(DATA))), tenants=2)
        store: Any = SimpleNamespace(release=released.append)
        target = WholeTarget(store, segment, ChunkTable.of(stand.manifest), step=5)
        incoming = IncomingShard(stand.manifest, target, streams=1)
        grant = PutGrant(incoming=incoming, streams=1, fail=failed.set)
        with stand.connect() as sock:
            ticket = stand.tickets.issue(grant)
            sock.sendall(pack_hello(Hello(first=0, stride=1, ticket=ticket)) + frame)
            answer = read_all(sock)
        assert parse_frame(answer[:FRAME_BYTES]).kind == Kind.ERROR
        assert failed.wait(5)
        stand.eventually("lane_rejected", 1)
        assert bytes(segment.view) == b"." * len(DATA)
        assert released == []
        incoming.abandon()
        assert released == [segment]


def test_connections_beyond_the_limit_are_closed_and_room_comes_back() -> None:
    with standing(connections_max=3) as stand:
        waiting = [stand.connect() for _ in range(3)]
        deadline = time.monotonic() + 5
        while stand.server.connections < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with stand.connect() as one_more:
            assert read_all(one_more) == b""
        stand.eventually("lane_rejected", 1)
        for sock in waiting:
            sock.close()
        stand.eventually("lane_rejected", 4)
        while stand.server.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stand.check_it_works()


def test_stopping_ends_connections_that_wait() -> None:
    with standing() as stand, stand.connect() as sock:
        deadline = time.monotonic() + 5
        while not stand.server.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        stand.server.stop()
        assert time.monotonic() - started < 2
        assert read_all(sock) == b""


def test_a_port_in_use_names_its_key() -> None:
    with standing() as stand:
        second = LaneServer(
            "127.0.0.1", stand.server.port, stand.tickets, stand.counters, 2.0, pool=stand.codec
        )
        with pytest.raises(ConfigError, match="lane_port"):
            second.start()
        second.stop()


def test_a_congestion_control_that_does_not_exist_names_its_key() -> None:
    server = LaneServer(
        "127.0.0.1", 0, TicketOffice(), Counters(), 2.0, pool=CodecPool(1, 1), congestion="no-such-thing"
    )
    with pytest.raises(ConfigError, match="lane_congestion"):
        server.start()
