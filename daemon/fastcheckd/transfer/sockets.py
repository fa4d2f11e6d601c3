"""Blocking sockets as the lane uses them: whole buffers per system call, and an inactivity deadline.

The deadline is the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), not Python's: a Python timeout makes the
socket non-blocking and costs a poll and a turn of the interpreter lock for every few hundred KiB,
while here one call moves a whole chunk with the lock released. No frames live here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import ssl
import struct
import termios
import time
from pathlib import Path
from typing import Any

from ..certificates import reason

#: Enough for 10 Gbit/s at 3 ms.
BUFFER_BYTES = 4 << 20
_TLS_PIECE_BYTES = 128 << 10
#: From linux/tcp.h: where struct tcp_info has two of its counters. Its fields never move.
_BYTES_RECEIVED_AT, _BYTES_SENT_AT, _TCP_INFO_BYTES = 128, 200, 208
#: From asm-generic/socket.h.
_SO_MAX_PACING_RATE = 47
_NO_LIMIT = 0xFFFFFFFF
#: Enough for a sign of life: what a connection moves in spite of any limit.
_RATE_BYTES_PER_S_MIN = 64 << 10
#: So many deadlines may pass without an answer while what we sent still arrives there.
PATIENCE = 6
#: From linux/in.h; Python does not name it.
_IP_BIND_ADDRESS_NO_PORT = 24


def tune(sock: socket.socket, congestion: str = "") -> None:
    """Make a socket fit for the lane; before it connects or listens, or the window stays small.

    Accepted sockets inherit it. `congestion` names a TCP congestion control, empty for the
    system's own; OSError if the system does not have it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        # A size set by hand ends the kernel's own tuning, which reaches further than a low limit would.
        if _kernel_limit_bytes(limit) >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def bind_source(sock: socket.socket, source: str) -> None:
    """Have a socket connect from this machine's address `source`; OSError when it is not of this machine."""
    # The port is chosen when the other end is known: as many connections as without a bind.
    sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    sock.bind((source, 0))


def resolve(host: str, port: int, source: str = "") -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Family and address of host:port, of the family of `source` where one is given; OSError if there is none."""
    family = socket.AF_UNSPEC
    if source:
        family = socket.getaddrinfo(source, 0, type=socket.SOCK_STREAM)[0][0]
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


def set_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Make the socket blocking, with an inactivity deadline for both directions.

    A call then raises TimeoutError when no byte moved for `timeout_s`; when it moved some at first,
    after at most twice that.
    """
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(max(timeout_s, 0.001))  # OpenSSL would try again for ever
        return
    sock.setblocking(True)
    seconds = max(timeout_s, 0.001)  # 0 would mean: for ever
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send_all(sock: socket.socket, header: bytes, payload: memoryview | bytes = b"") -> None:
    """Send header and payload whole, straight from where they lie.

    Raises:
        TimeoutError: no byte moved for the deadline.
        OSError: the connection is gone.
    """
    if isinstance(sock, ssl.SSLSocket):
        # Small pieces: the deadline is for the whole of each.
        for part in (header, payload):
            with memoryview(part) as view:
                for start in range(0, len(view), _TLS_PIECE_BYTES):
                    with view[start : start + _TLS_PIECE_BYTES] as piece:
                        sock.sendall(piece)
        return
    total = len(header) + len(payload)
    try:
        sent = sock.sendmsg([header, payload])
        while sent < total:
            if sent < len(header):
                sent += sock.sendmsg([header[sent:], payload])
            else:
                with memoryview(payload)[sent - len(header) :] as rest:
                    sent += sock.send(rest)
    except BlockingIOError:
        raise TimeoutError("no byte could be sent for too long") from None


def recv_exact_into(sock: socket.socket, place: memoryview | bytearray) -> None:
    """Fill `place` with the next bytes.

    Raises:
        TimeoutError: no byte came for the deadline, nor did any that we had sent arrive there.
        EOFError: the other end closed before all came.
        OSError: the connection is gone.
    """
    tls = isinstance(sock, ssl.SSLSocket)
    queued, patience = waiting_bytes(sock), PATIENCE
    with memoryview(place) as view:
        received = 0
        while received < len(view):
            try:
                with view[received:] as rest:
                    count = sock.recv_into(rest, 0, 0 if tls else socket.MSG_WAITALL)
            except BlockingIOError:
                # What we sent is still on its way there, held back perhaps: no answer can have come.
                before, queued = queued, waiting_bytes(sock)
                patience -= 1
                if not patience or not 0 < queued < before:
                    raise TimeoutError("no byte came for too long") from None
                continue
            if count == 0:
                raise EOFError("the connection was closed")
            received += count


def recv_exact_within(sock: socket.socket, size_bytes: int, within_s: float) -> bytes:
    """The next bytes, all of them within a time: one byte now and then does not extend it.

    Changes the socket's inactivity deadline. Raises as `recv_exact_into`.
    """
    deadline = time.monotonic() + within_s
    data = bytearray()
    while len(data) < size_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"only {len(data)} of {size_bytes} bytes came within {within_s:g} s")
        set_timeout(sock, left_s)
        try:
            piece = sock.recv(size_bytes - len(data))
        except BlockingIOError:
            continue  # the deadline above has passed
        if not piece:
            raise EOFError(f"the connection was closed after {len(data)} of {size_bytes} bytes")
        data += piece
    return bytes(data)


def wire_bytes(sock: socket.socket) -> tuple[int, int]:
    """TCP payload that left and came so far, as the kernel counts it; zeros for a socket that is no TCP connection."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0, 0
    if len(info) < _TCP_INFO_BYTES:  # before Linux 4.19
        return 0, 0
    (received,) = struct.unpack_from("@Q", info, _BYTES_RECEIVED_AT)
    (sent,) = struct.unpack_from("@Q", info, _BYTES_SENT_AT)
    return sent, received


def limit_rate(sock: socket.socket, bytes_per_s: float) -> None:
    """Have the kernel space what is sent to that rate; infinite: as fast as it goes."""
    value = min(max(int(min(bytes_per_s, _NO_LIMIT)), _RATE_BYTES_PER_S_MIN), _NO_LIMIT)
    with contextlib.suppress(OSError):  # closed meanwhile: nothing left to space
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@I", value))


def waiting_bytes(sock: socket.socket) -> int:
    """Bytes that were handed to the kernel and that the other end has not acknowledged; 0 of a closed socket."""
    try:
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # closed meanwhile
        return 0
    return int(struct.unpack("@i", answer)[0])


def shut(sock: socket.socket) -> None:
    """Wake whoever blocks on the socket, in any thread. Closing alone would not."""
    with contextlib.suppress(OSError):  # not connected any more, or closed: nobody to wake
        # That of a TLS socket would have the thread that uses it go on in the clear.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed and nothing it sent is left to read; does not wait. OSError as by reading."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    # Under TLS this sees what is not decrypted yet, which is as good.
    return bool(poller.poll(0)) and not socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)


def describe(error: Exception) -> str:
    """A socket error in words."""
    if isinstance(error, ssl.SSLError):
        return reason(error)
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error)


def _kernel_limit_bytes(name: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):
        return 0  # unknown: leave it to the kernel
