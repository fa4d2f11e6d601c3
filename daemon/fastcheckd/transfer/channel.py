"""One connection of the bulk lane: frames in and out, and socket trouble as errors of ours.

Both ends use it. It knows how frames look on a socket, not which shard is on its way or why.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import time
from collections.abc import Iterator, Sequence

from ..errors import FrameError, PeerError
from .frames import (
    FRAME_BYTES,
    HELLO_BYTES,
    Codec,
    FrameHeader,
    Hello,
    Kind,
    pack_error,
    pack_frame,
    pack_hello,
    pack_want,
    parse_frame,
    parse_hello,
    parse_want,
)
from .lane_tls import LaneTls
from .sockets import (
    describe,
    has_hung_up,
    limit_rate,
    recv_exact_into,
    recv_exact_within,
    send_all,
    set_timeout,
    shut,
    waiting_bytes,
    wire_bytes,
)

#: A peer that hung up may have said why; it says so at once or not at all.
_LAST_WORDS_S = 0.2


class Channel:
    """A connected, tuned socket; `whom` names the other end in messages. Used by one thread.

    Every method raises PeerError when the connection fails, no byte moves for `timeout_s`, or the
    other end sends an ERROR, and FrameError when it breaks the protocol. `end` alone may be called by
    other threads.

    `sending_s` is the time spent inside the socket with chunks, in seconds: the kernel had no room for
    them, so the network or the other end is the slower part.
    """

    def __init__(self, sock: socket.socket, whom: str, timeout_s: float) -> None:
        self._sock = sock
        self._whom = whom
        self._timeout_s = timeout_s
        self._header = bytearray(FRAME_BYTES)
        self._ended = False
        self._limit = math.inf
        self.sending_s = 0.0

    def end(self) -> None:
        """Make the thread that uses the lane fail soon."""
        self._ended = True
        shut(self._sock)

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes that left and came so far, as the kernel counts them. From any thread."""
        return wire_bytes(self._sock)

    def waiting_bytes(self) -> int:
        """Bytes that wait in the kernel until the other end has acknowledged them. From any thread."""
        return waiting_bytes(self._sock)

    def limit(self, bytes_per_s: float) -> None:
        """Send no faster than that; infinite: as fast as it goes. From any thread."""
        if bytes_per_s != self._limit:  # most are never limited, and pay nothing for it
            self._limit = bytes_per_s
            limit_rate(self._sock, bytes_per_s)

    def check(self) -> None:
        """For a thread that waits for something else than the lane: fail if nobody needs it any more."""
        if self._ended:
            raise PeerError(f"the transfer with {self._whom} was ended")
        with self._receiving(), contextlib.suppress(BlockingIOError):
            if has_hung_up(self._sock):
                raise EOFError("the connection was closed")

    def connect_tls(self, tls: LaneTls, node_id: str, within_s: float) -> None:
        """Go on under TLS with that node, or PeerError."""
        tls.connect(self._sock, node_id, within_s, self._use)
        set_timeout(self._sock, self._timeout_s)

    def accept_tls(self, tls: LaneTls, within_s: float) -> str:
        """Go on under TLS; the node that connected, or PeerError."""
        _, node_id = tls.accept(self._sock, within_s, self._use)
        set_timeout(self._sock, self._timeout_s)
        return node_id

    def _use(self, protected: socket.socket) -> None:
        self._sock = protected
        if self._ended:  # meanwhile, by another thread, which saw the socket from before
            shut(protected)

    def close(self) -> None:
        """Give the socket back."""
        self._sock.close()

    def send_hello(self, hello: Hello) -> None:
        """First thing that the connecting side sends."""
        with self._sending():
            send_all(self._sock, pack_hello(hello))

    def receive_hello(self, within_s: float) -> Hello:
        """First thing that the listening side gets, whole within the time."""
        with self._receiving():
            data = recv_exact_within(self._sock, HELLO_BYTES, within_s)
        hello = parse_hello(data)
        set_timeout(self._sock, self._timeout_s)
        return hello

    def send_chunk(
        self, index: int, offset: int, digest: bytes, raw_bytes: int, codec: Codec, data: memoryview | bytes
    ) -> None:
        """One DATA frame, straight from where its payload lies; `digest` is that of the raw bytes."""
        header = FrameHeader(
            kind=Kind.DATA,
            chunk=index,
            raw_bytes=raw_bytes,
            encoded_bytes=len(data),
            offset=offset,
            digest=digest,
            codec=codec,
        )
        with self._sending():
            started = time.perf_counter()
            send_all(self._sock, pack_frame(header), data)
            self.sending_s += time.perf_counter() - started

    def send_end(self) -> None:
        """As the reader: no more chunks are wanted."""
        with self._sending():
            send_all(self._sock, pack_frame(FrameHeader(kind=Kind.END)))

    def send_want(self, chunks: Sequence[int]) -> None:
        """As the reader: these chunks next."""
        with self._sending():
            send_all(self._sock, *pack_want(chunks))

    def receive_want(self, count: int) -> list[int]:
        """The chunks to send next, of a shard with `count`; empty when the reader has all that it wants."""
        header = self.receive_header()
        if header.kind == Kind.END:
            return []
        if header.kind != Kind.WANT:
            raise FrameError(f"a WANT was due, not {header.kind.name}")
        payload = bytearray(header.encoded_bytes)
        self.receive_into(payload)
        return parse_want(payload, count)

    def send_error(self, sentence: str) -> None:
        """Say why this side hangs up, if the other end still listens."""
        with contextlib.suppress(OSError):  # it does not; what is reported is why we wanted to say it
            send_all(self._sock, *pack_error(sentence))

    def receive_header(self) -> FrameHeader:
        """The next frame's header, within its bounds; its payload comes next."""
        with self._receiving():
            recv_exact_into(self._sock, self._header)
        header = parse_frame(self._header)
        if header.kind == Kind.ERROR:
            sentence = bytearray(header.encoded_bytes)
            self.receive_into(sentence)
            raise PeerError(f"{self._whom} ended the transfer: {sentence.decode(errors='replace')}")
        return header

    def receive_into(self, place: memoryview | bytearray) -> None:
        """Payload bytes, straight to where they belong."""
        with self._receiving():
            recv_exact_into(self._sock, place)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise PeerError(f"the connection to {self._whom} failed: {describe(error)}") from None

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise PeerError(f"{self._whom} takes nothing: {describe(error)}") from None
        except OSError as error:
            self._raise_last_words()
            raise PeerError(f"the connection to {self._whom} failed: {describe(error)}") from None

    def _raise_last_words(self) -> None:
        """Raise what the other end said before it hung up, if it did: better than "broken pipe"."""
        try:
            set_timeout(self._sock, _LAST_WORDS_S)
            recv_exact_into(self._sock, self._header)
            header = parse_frame(self._header)
            if header.kind != Kind.ERROR:
                return
            sentence = bytearray(header.encoded_bytes)
            recv_exact_into(self._sock, sentence)
        except ssl.SSLError as error:  # it refuses us; the handshake was over for us before it could say so
            raise PeerError(f"{self._whom} ended the connection: {describe(error)}") from None
        except (OSError, EOFError, FrameError):
            return
        raise PeerError(f"{self._whom} ended the transfer: {sentence.decode(errors='replace')}") from None
