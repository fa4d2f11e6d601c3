"""Strangers at the lane's port: they are closed and counted, and the server goes on."""

from __future__ import annotations

import contextlib
import logging
import random
import struct
import time
from collections.abc import Iterator

import pytest
from lane_stand import COUNT, DATA, END, read_all, standing, want
from tests.eventually import until

from fastcheck_proto.v1 import peer_pb2
from fastcheckd.counters import Counters
from fastcheckd.errors import ConfigError, NotHeldError
from fastcheckd.log import COMPLAINTS_MAX
from fastcheckd.transfer.encoder_cache import ShardEncoder
from fastcheckd.transfer.frames import (
    FRAME_BYTES,
    FrameHeader,
    Hello,
    Kind,
    pack_frame,
    pack_hello,
    parse_frame,
)
from fastcheckd.transfer.server import TransferServer
from fastcheckd.transfer.tickets import Grant, TicketOffice


def test_random_bytes_half_a_hello_and_nothing_are_closed_and_counted() -> None:
    with standing() as stand:
        for seed in range(20):
            with stand.connect() as sock:
                sock.sendall(random.Random(seed).randbytes(64 + 50 * seed))
                assert read_all(sock) == b""
        stand.eventually("lane_rejected", 20)
        for words in (b"", pack_hello(Hello(bytes(32)))[:31]):
            with stand.connect() as sock:
                sock.sendall(words)
        stand.eventually("lane_rejected", 22)
        stand.check_it_works()
        assert stand.counters.get("lane_rejected") == 22


def test_a_hello_that_drips_is_closed_when_its_time_is_up() -> None:
    with standing(hello_timeout_s=0.3) as stand, stand.connect() as sock:
        started = time.monotonic()
        hello = pack_hello(Hello(stand.ticket()))
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
        assert len(stand.ask(ticket)) > len(DATA)
        assert stand.ask(ticket) == b""
        assert stand.ask(bytes(32)) == b""
        assert stand.counters.get("lane_rejected") == 2


def test_a_replica_that_is_gone_is_explained() -> None:
    @contextlib.contextmanager
    def gone() -> Iterator[ShardEncoder]:
        raise NotHeldError("it is gone")
        yield

    with standing() as stand:
        grant = Grant(opened=gone, purpose=peer_pb2.PURPOSE_RESTORE)
        assert b"it is gone" in stand.ask(stand.tickets.issue(grant))
        stand.store.drop(stand.replica)
        assert b"not held" in stand.ask(stand.ticket()) or b"no longer" in stand.ask(stand.ticket())


def test_a_reader_that_has_all_hears_nothing_more_and_bytes_are_counted() -> None:
    with standing() as stand:
        assert stand.ask(stand.ticket(), [END]) == b""
        assert stand.ask(stand.ticket(), [END, want(0)]) == b""
        stand.check_it_works()
        assert stand.counters.get("bytes_sent") == len(DATA)
        assert stand.counters.get("lane_rejected") == stand.counters.get("chunks_resent") == 0


def test_a_chunk_that_is_asked_for_again_is_counted_over_whichever_connection() -> None:
    with standing() as stand:
        grant = stand.grant()
        for _ in range(2):
            stand.ask(stand.tickets.issue(grant), [want(0), END])
        assert stand.counters.get("chunks_resent") == 1


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(FrameHeader(kind=Kind.DATA, chunk=0, raw_bytes=9, encoded_bytes=9)),
        pack_frame(FrameHeader(kind=Kind.END, chunk=1)),
        want(COUNT),
        want(0, 0),
        want(0, 2**32 - 1),
        struct.pack("<64s", b"FCFR"),
    ],
    ids=["data", "an end with a count", "no such chunk", "a chunk twice", "far off", "no checksum"],
)
def test_broken_words_after_a_good_hello_end_the_connection_and_nothing_is_sent(frame: bytes) -> None:
    with standing() as stand:
        answer = stand.ask(stand.ticket(), [frame])
        assert parse_frame(answer[:FRAME_BYTES]).kind == Kind.ERROR
        assert len(answer) < FRAME_BYTES + 1024
        stand.eventually("lane_rejected", 1)
        assert stand.counters.get("bytes_sent") == 0
        stand.check_it_works()


def test_a_reader_that_leaves_in_the_middle_costs_nothing() -> None:
    with standing(transfer_timeout_s=600.0) as stand:
        with stand.connect() as sock:
            sock.sendall(pack_hello(Hello(stand.ticket())) + want(0, 1, 2))
            sock.recv(100)
        stand.is_idle()
        stand.store.drop(stand.replica)
        assert stand.server.connections == 0


def test_a_reader_that_asks_for_nothing_is_left_after_the_timeout() -> None:
    with standing(transfer_timeout_s=0.2) as stand, stand.connect() as sock:
        sock.sendall(pack_hello(Hello(stand.ticket())))
        started = time.monotonic()
        assert read_all(sock) == b""
        assert time.monotonic() - started < 20


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
            sock.sendall(pack_hello(Hello(stand.ticket())))
        until(lambda: stand.server.connections == 3 and stand.server.unproved == 0)
        assert stand.ask(stand.ticket()) == b""
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
        second = TransferServer("127.0.0.1", stand.server.port, stand.tickets, stand.counters, 2.0)
        with pytest.raises(ConfigError, match="lane_port"):
            second.start()
        second.stop()


def test_a_congestion_control_that_does_not_exist_names_its_key() -> None:
    server = TransferServer("127.0.0.1", 0, TicketOffice(), Counters(), 2.0, congestion="no-such-thing")
    with pytest.raises(ConfigError, match="lane_congestion"):
        server.start()
