"""Mutual TLS 1.3 between voters: who speaks is who a certificate says, and nobody else can read it.

A node's certificate names it with one URI in its SAN, `spiffe://CLUSTER/fastcheck/node/NODE`; the same
authority signs all of them. Whether a node may speak as a voter is decided in `raft_transport`. Standard
library only. Knows nothing of Raft, and of connections only sockets that never block.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import ConfigError

logger = logging.getLogger(__name__)

#: A handshake is two certificate chains; whoever sends more before it is through is no voter.
HANDSHAKE_BYTES_MAX = 64 << 10
#: Encrypted at a time. Bounds what waits for the network, in addition to the sender's own buffer.
WRITE_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 18
_OURS = "spiffe://"


def node_uri(cluster_id: str, node_id: str) -> str:
    """The name of a node in its certificate."""
    return f"spiffe://{cluster_id}/fastcheck/node/{node_id}"


def named_node(certificate: Any, cluster_id: str) -> str | None:
    """The node that a verified certificate (as `getpeercert` gives it) names; None when it names none.

    One name only: a certificate of several nodes would let one of them speak as another.
    """
    names = (certificate or {}).get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI" and value.startswith(_OURS)]
    prefix = node_uri(cluster_id, "")
    if len(uris) != 1 or not uris[0].startswith(prefix):
        return None
    return str(uris[0][len(prefix) :]) or None


@dataclass(frozen=True)
class _Contexts:
    accepting: ssl.SSLContext
    connecting: ssl.SSLContext


class Tls:
    """This node's certificate, read again when its files change; a new connection takes the newest that is good.

    Args:
        config: with all three `tls_*` keys.

    Raises:
        ConfigError: a file that the operator has to look at.
    """

    def __init__(self, config: Config) -> None:
        assert config.tls_cert_file and config.tls_key_file and config.tls_ca_file
        self._cert, self._key, self._ca = config.tls_cert_file, config.tls_key_file, config.tls_ca_file
        self.cluster_id = config.cluster_id
        self._own_uri = node_uri(config.cluster_id, config.node_id)
        self._node_id = config.node_id
        self._seen = self._signature()
        self._contexts = self._load()

    def protect(self, sock: socket.socket, *, accepting: bool) -> TlsSocket:
        """Put a connected, non-blocking socket under TLS."""
        self._refresh()
        context = self._contexts.accepting if accepting else self._contexts.connecting
        return TlsSocket(sock, context, accepting=accepting)

    def _signature(self) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = []
        for path in (self._cert, self._key, self._ca):
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found

    def _refresh(self) -> None:
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._contexts = self._load()
        except ConfigError as error:
            # Between the first and the last file of a rotation, for example: each change is looked at.
            logger.warning("registry: the changed TLS files are not used: %s", error)
        else:
            logger.info("registry: the TLS files have changed; new connections use them")

    def _load(self) -> _Contexts:
        for key, path in (
            ("tls_cert_file", self._cert),
            ("tls_key_file", self._key),
            ("tls_ca_file", self._ca),
        ):
            _check_readable(key, path)
        if self._key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"config key 'tls_key_file': others may read {self._key}; run: chmod 600 {self._key}"
            )
        contexts = _Contexts(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))
        try:
            certificate = _shake_hands_with_oneself(contexts)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"config key 'tls_cert_file': {self._cert} does not pass: {error.verify_message}. It must be valid "
                f"now, signed by the authority in {self._ca} (tls_ca_file), and fit for clients and servers"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"config key 'tls_cert_file': TLS 1.3 does not work with {self._cert}: {error.reason or error}"
            ) from None
        if named_node(certificate, self.cluster_id) != self._node_id:
            raise ConfigError(
                f"config key 'tls_cert_file': {self._cert} must name this node, and no other, in its SAN: one URI, "
                f"{self._own_uri}; make a certificate with it, or check cluster_id and node_id"
            )
        return contexts

    def _context(self, protocol: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # nodes have names of their own, see `named_node`
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=self._ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"config key 'tls_ca_file': {self._ca} holds no PEM certificate ({error.reason or error})"
            ) from None
        try:
            context.load_cert_chain(self._cert, self._key, password=lambda: "")
        except ssl.SSLError as error:
            raise ConfigError(
                f"config key 'tls_key_file': {self._key} is not the key of {self._cert} "
                f"({error.reason or error}); both must be PEM, the key without a password"
            ) from None
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # every connection shows its certificate anew
        return context


def _check_readable(key: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"config key '{key}': cannot read {path}: {error.strerror}") from None


def _shake_hands_with_oneself(contexts: _Contexts) -> Any:
    """Both ends of a connection with the own certificate: what would fail later, fails here."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts.connecting.wrap_bio(to_client, to_server, server_side=False),
        contexts.accepting.wrap_bio(to_server, to_client, server_side=True),
    ]
    open_ends = list(ends)
    for _ in range(8):  # TLS 1.3 needs two turns
        for end in list(open_ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            open_ends.remove(end)
        if not open_ends:
            return ends[0].getpeercert()
    raise ssl.SSLError("the handshake did not end")


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


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not pass: {error.verify_message}"
    return f"TLS: {error.reason or error}"
