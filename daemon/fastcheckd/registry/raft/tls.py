"""TLS between voters (see `certificates.py`): a socket for those that never block.

Whether a node may speak as a voter is decided in `transport`. Knows nothing of Raft.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from typing import Any

from ...certificates import Certificates, named_node, node_uri
from ...certificates import reason as _reason

__all__ = ["HANDSHAKE_BYTES_MAX", "WRITE_BYTES_MAX", "Tls", "TlsSocket", "named_node", "node_uri"]

logger = logging.getLogger(__name__)

#: A handshake is two certificate chains; whoever sends more before it is through is no voter.
HANDSHAKE_BYTES_MAX = 64 << 10
#: Encrypted at a time. Bounds what waits for the network, in addition to the sender's own buffer.
WRITE_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 18


class Tls(Certificates):
    """A voter's certificate."""

    def protect(self, sock: socket.socket, *, accepting: bool) -> TlsSocket:
        """Put a connected, non-blocking socket under TLS."""
        return TlsSocket(sock, self.context(accepting=accepting), accepting=accepting)


class TlsSocket:
    """A non-blocking socket under TLS, with what a plain one's user calls: send, recv, close, ...

    `send` and `recv` raise BlockingIOError like a socket's, and ConnectionResetError for whatever is wrong
    with the other side. A poller sees the socket alone, hence the questions `wants_write` and `pending`.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, accepting: bool) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._unsent = b""
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepting)
        self._handshake_bytes = 0
        self.established = False

    def handshake(self) -> bool:
        """Go on as far as it goes now; True when the other side has shown a good certificate.

        Raises:
            OSError: it has not, or is no TLS at all; the message says why.
        """
        while not self.established:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                room = HANDSHAKE_BYTES_MAX - self._handshake_bytes
                if room <= 0:
                    raise ConnectionResetError("too many bytes before the handshake was through") from None
                try:
                    self._handshake_bytes += self._pull(min(room, _READ_BYTES))
                except BlockingIOError:
                    return False
            except ssl.SSLError as error:
                # The other side learns why from the alert that OpenSSL has prepared.
                self._try_flush()
                raise ConnectionResetError(_reason(error)) from None
            else:
                self.established = True
        self.flush()
        return True

    @property
    def certificate(self) -> Any:
        """The other side's verified certificate, as `SSLObject.getpeercert` gives it."""
        return self._tls.getpeercert()

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for the socket to take them."""
        return bool(self._unsent or self._outgoing.pending)

    @property
    def pending(self) -> bool:
        """Whether bytes were taken from the socket that `recv` has not given out."""
        return bool(self._incoming.pending or self._tls.pending())

    def _pull(self, size: int) -> int:
        data = self._socket.recv(size)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._incoming.write(data)
        return len(data)

    def flush(self) -> None:
        """Hand the socket what it takes."""
        while self.wants_write:
            if not self._unsent:
                self._unsent = self._outgoing.read()
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    def _try_flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            logger.debug("registry: the alert was not delivered: %r", error)

    def send(self, data: bytes) -> int:
        """Take some bytes, when all before them have left."""
        self.flush()
        if self.wants_write:
            raise BlockingIOError(errno.EAGAIN, "the socket is full")
        try:
            taken = self._tls.write(data[:WRITE_BYTES_MAX])
        except ssl.SSLError as error:
            raise ConnectionResetError(_reason(error)) from None
        self.flush()
        return taken

    def recv(self, size: int) -> bytes:
        """Up to `size` bytes; none: the other side has closed."""
        while True:
            try:
                data = self._tls.read(size)
            except ssl.SSLWantReadError:
                # It may have been a change of keys, which wants an answer.
                self.flush()
                self._pull(_READ_BYTES)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                self._try_flush()
                raise ConnectionResetError(_reason(error)) from None
            else:
                return data

    def getsockopt(self, level: int, option: int) -> int:
        """Of the socket."""
        return self._socket.getsockopt(level, option)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Of the socket."""
        self._socket.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; what it has not taken is lost."""
        self._socket.close()
