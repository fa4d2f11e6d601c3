"""Strangers at the lane's port: they are closed and counted, and the server goes on."""

from __future__ import annotations

import contextlib
import logging
import random
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from lane_stand import CHUNK, DATA, read_all, standing

from fastcheckd.counters import Counters
from fastcheckd.errors import ConfigError, NotHeldError
from fastcheckd.log import COMPLAINTS_MAX
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.frames import (
    FRAME_BYTES,
    ON_DEMAND,
    FrameHeader,
    Hello,
    Kind,
    pack_frame,
    pack_hello,
    parse_frame,
)
from fastcheckd.transfer.lane_server import LaneServer
from fastcheckd.transfer.tickets import GetGrant, TicketOffice


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
        sock.settimeout(0.5)
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
        assert time.monotonic() - started < 20, "the whole of it takes 31 s"
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
        ticket, put = stand.put_ticket()
        with stand.connect() as sock:
            sock.sendall(pack_hello(Hello(first=0, stride=1, ticket=ticket)) + frame)
            answer = read_all(sock)
        assert parse_frame(answer[:FRAME_BYTES]).kind == Kind.ERROR
        assert put.failed.wait(5)
        stand.eventually("lane_rejected", 1)
        assert put.memory == b"." * len(DATA)
        assert put.released == []
        put.incoming.abandon()
        assert put.released == [put.segment]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_crowd_without_tickets_keeps_nobody_out() -> None:
    with standing(connections_max=3, hello_timeout_s=600.0) as stand, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(stand.connect()) for _ in range(3)]
        until(lambda: stand.server.unproved == 3)
        stand.check_it_works()
        assert read_all(silent[0]) == b"", "the one that was silent for longest made room"
        until(lambda: stand.server.connections == 2)
        assert stand.counters.get("lane_rejected") == 1
        for sock in silent[1:]:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


def test_when_all_have_shown_tickets_one_more_is_turned_away_and_room_comes_back() -> None:
    with standing(connections_max=3, transfer_timeout_s=600.0) as stand, contextlib.ExitStack() as stack:
        readers = [stack.enter_context(stand.connect()) for _ in range(3)]
        for sock in readers:  # will say what they want, and do not
            sock.sendall(pack_hello(Hello(first=0, stride=ON_DEMAND, ticket=stand.ticket())))
        until(lambda: stand.server.connections == 3 and stand.server.unproved == 0)
        assert stand.fetch(stand.ticket()) == b""
        stand.eventually("lane_rejected", 1)
        readers[0].close()
        until(lambda: stand.server.connections == 2)
        stand.check_it_works()


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with standing() as stand:
        for _ in range(50):
            with stand.connect() as sock:
                sock.sendall(bytes(64))
                read_all(sock)
        stand.eventually("lane_rejected", 50)
        stand.check_it_works()
    told = [record for record in caplog.records if "closed the connection of" in record.getMessage()]
    assert len(told) == COMPLAINTS_MAX


def test_stopping_ends_connections_that_wait() -> None:
    with standing(hello_timeout_s=600.0, transfer_timeout_s=600.0) as stand, stand.connect() as sock:
        deadline = time.monotonic() + 60
        while not stand.server.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        stand.server.stop()
        assert time.monotonic() - started < 60
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
