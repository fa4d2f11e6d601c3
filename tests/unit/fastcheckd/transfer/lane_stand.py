"""A lane server in this process with something to get, and strangers' ways to it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from fastcheckd.transfer.incoming import IncomingShard
from fastcheckd.transfer.lane_server import LaneServer
from fastcheckd.transfer.targets import WholeTarget

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheckd.chunks import ChunkTable
from fastcheckd.counters import Counters
from fastcheckd.digests import chunk_digest
from fastcheckd.transfer.codec_pool import CodecPool
from fastcheckd.transfer.frames import FRAME_BYTES, Hello, Kind, pack_hello, parse_frame
from fastcheckd.transfer.tickets import GetGrant, PutGrant, TicketOffice

CHUNK = 64 << 10
DATA = random.Random(4).randbytes(2 * CHUNK + 9)


class Put:
    """A put under way, into memory of this process."""

    def __init__(self, manifest: pb.ShardManifest) -> None:
        self.failed = threading.Event()
        self.released: list[object] = []
        self.memory = bytearray(b"." * len(DATA))
        self.segment: Any = SimpleNamespace(view=memoryview(self.memory), tenants=2)
        store: Any = SimpleNamespace(release=self.released.append)
        target = WholeTarget(store, self.segment, ChunkTable.of(manifest), step=5)
        self.incoming = IncomingShard(manifest, target, streams=1)


class Stand:
    """A lane server with something to get."""

    def __init__(self, *, transfer_timeout_s: float = 2.0, **options: float) -> None:
        self.counters = Counters()
        self.tickets = TicketOffice()
        self.codec = CodecPool(1, 1)
        self.server = LaneServer(
            "127.0.0.1",
            0,
            self.tickets,
            self.counters,
            transfer_timeout_s,
            pool=self.codec,
            **options,  # type: ignore[arg-type]
        )
        pieces = [DATA[i : i + CHUNK] for i in range(0, len(DATA), CHUNK)]
        self.manifest = pb.ShardManifest(
            bytes=len(DATA), chunk_bytes=CHUNK, chunk_digests=b"".join(chunk_digest(p) for p in pieces)
        )

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        sock.settimeout(5)
        return sock

    def ticket(self) -> bytes:
        @contextlib.contextmanager
        def opened() -> Iterator[memoryview]:
            yield memoryview(DATA)

        return self.tickets.issue(GetGrant(manifest=self.manifest, streams=1, opened=opened))

    def put_ticket(self) -> tuple[bytes, Put]:
        """A ticket to put what is there already, and what becomes of it."""
        put = Put(self.manifest)
        return self.tickets.issue(PutGrant(incoming=put.incoming, streams=1, fail=put.failed.set)), put

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
    stand = Stand(**options)
    stand.server.start()
    try:
        yield stand
    finally:
        stand.server.stop()
        stand.codec.close()
        assert stand.server.connections == 0
