"""HTTP/2 and gRPC by hand, as somebody speaks them who means no good: nothing is checked before it is sent."""

from __future__ import annotations

import socket
import struct

#: What a client says first: the preface, and settings without any.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000 04 00 00000000")
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0x0,
    0x1,
    0x3,
    0x4,
    0x6,
    0x7,
    0x8,
    0x9,
)
_END_STREAM, _END_HEADERS = 0x1, 0x4
_HEADER_BYTES = 9


def frame(kind: int, flags: int, stream: int, payload: bytes, *, announced: int | None = None) -> bytes:
    """A frame; `announced`: how long it says it is."""
    size = len(payload) if announced is None else announced
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    return b"".join([b"\0", bytes([len(name)]), name.encode(), bytes([len(value)]), value.encode()])


def call(path: str, stream: int = 1) -> bytes:
    """The head of a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return frame(HEADERS, _END_HEADERS, stream, b"".join(_literal(*field) for field in fields.items()))


def message(data: bytes, stream: int = 1, *, announced: int | None = None) -> bytes:
    """A message of a call, which may say that it is longer."""
    size = len(data) if announced is None else announced
    return frame(DATA, 0, stream, struct.pack(">BI", 0, size) + data)


def is_answered(sock: socket.socket, timeout_s: float = 30.0) -> bool:
    """Whether the other side ends the call, or all of the connection, in time."""
    sock.settimeout(timeout_s)
    data = b""
    try:
        while piece := sock.recv(1 << 16):
            data += piece
            while len(data) >= _HEADER_BYTES + (size := int.from_bytes(data[:3])):
                kind, flags = data[3], data[4]
                data = data[_HEADER_BYTES + size :]
                if kind in {RST_STREAM, GOAWAY} or (kind == HEADERS and flags & _END_STREAM):
                    return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
