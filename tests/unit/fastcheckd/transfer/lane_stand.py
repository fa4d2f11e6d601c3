"""A lane server in this process with a shard to read, and strangers' ways to it."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from transfer_harness import CHUNK, manifest_of

from fastcheck_proto.v1 import peer_pb2
from fastcheckd.counters import Counters
from fastcheckd.store.replica_store import ReplicaStore
from fastcheckd.store.segments import staging_pool
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.encoder_cache import EncoderCache
from fastcheckd.transfer.frames import (
    FRAME_BYTES,
    FrameHeader,
    Hello,
    Kind,
    pack_frame,
    pack_hello,
    pack_want,
    parse_frame,
)
from fastcheckd.transfer.policy import RestorePolicy
from fastcheckd.transfer.server import TransferServer
from fastcheckd.transfer.tickets import Grant, TicketOffice

DATA = random.Random(4).randbytes(2 * CHUNK + 9)
COUNT = 3
END = pack_frame(FrameHeader(kind=Kind.END))


def want(*chunks: int) -> bytes:
    """A request, as a reader sends it."""
    return b"".join(pack_want(chunks))


class Stand:
    """A lane server with something to read."""

    def __init__(self, directory: Path, *, transfer_timeout_s: float = 2.0, **options: float) -> None:
        self.counters = Counters()
        self.tickets = TicketOffice()
        self.codec = CodecPool(1, 1)
        self.store = ReplicaStore.open(directory / "ram", budget_bytes=16 << 20, counters=self.counters)
        self.encoders = EncoderCache(self.store, self.codec, RestorePolicy("auto", 1), self.counters)
        self.server = TransferServer(
            "127.0.0.1", 0, self.tickets, self.counters, transfer_timeout_s, **options  # type: ignore[arg-type]
        )  # fmt: skip
        segment = self.store.allocate(len(DATA), staging_pool("job", 0, 1))
        segment.view[: len(DATA)] = DATA
        self.replica = self.store.publish(manifest_of(DATA), segment, 0, verified=True)

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        sock.settimeout(5)
        return sock

    def grant(self) -> Grant:
        return Grant(
            opened=partial(self.encoders.opened, self.replica, None), purpose=peer_pb2.PURPOSE_RESTORE
        )

    def ticket(self) -> bytes:
        return self.tickets.issue(self.grant())

    def ask(self, ticket: bytes, words: Sequence[bytes] = (want(*range(COUNT)), END)) -> bytes:
        """A reader by hand: what the server answers to a hello and these words."""
        with self.connect() as sock:
            with contextlib.suppress(ConnectionError):  # closed before all was said
                sock.sendall(pack_hello(Hello(ticket)) + b"".join(words))
            return read_all(sock)

    def check_it_works(self) -> None:
        answer = self.ask(self.ticket(), [want(2, 0), want(1), END])
        got = {}
        while answer:
            header = parse_frame(answer[:FRAME_BYTES])
            assert header.kind == Kind.DATA
            got[header.chunk] = answer[FRAME_BYTES : FRAME_BYTES + header.encoded_bytes]
            answer = answer[FRAME_BYTES + header.encoded_bytes :]
        assert list(got) == [2, 0, 1], "in the order in which they were asked for"
        assert b"".join(got[index] for index in range(COUNT)) == DATA

    def is_idle(self) -> None:
        """Wait until nobody is connected."""
        deadline = time.monotonic() + 60
        while self.server.connections:
            assert time.monotonic() < deadline, "a connection did not end"
            time.sleep(0.001)

    def eventually(self, name: str, value: int) -> None:
        deadline = time.monotonic() + 60
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
    with tempfile.TemporaryDirectory() as directory:
        stand = Stand(Path(directory), **options)
        stand.server.start()
        try:
            yield stand
        finally:
            stand.server.stop()
            stand.codec.close()
            stand.store.close()
            assert stand.server.connections == 0
