"""pysyncobj's connections between voters, with the limits that it leaves out.

Without them an unauthenticated peer makes a voter buffer up to 2 GiB, idle connections stay for ever, and
one failed `accept` ends listening. Also the keep-alive between all voters (without it, idle links between
followers count as broken and an election loses its first vote request) and the rule that nothing leaves
a voter before its log is on disk. The overridden names are pysyncobj 0.3.17's own, private ones included.
"""

from __future__ import annotations

import logging
import struct
import time
from typing import Any

import pysyncobj.tcp_server
import pysyncobj.transport
from pysyncobj.tcp_connection import TcpConnection
from pysyncobj.tcp_server import SERVER_STATE
from pysyncobj.transport import TCPTransport

from .sealing import Seal

logger = logging.getLogger(__name__)

#: Largest message between voters: a batch of log entries (see `raft`), whole snapshots come in pieces.
MESSAGE_BYTES_MAX = 64 << 20
#: Before the other side has proved that it holds the key, only its challenge and its name are expected.
HANDSHAKE_BYTES_MAX = 4096
HANDSHAKE_S = 5.0
UNKNOWN_CONNECTIONS_MAX = 64
KEEP_ALIVE_S = 0.5


class GuardedConnection(TcpConnection):  # type: ignore[misc]  # pysyncobj has no types
    """A connection with a cap on what it buffers, and a seal of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.message_bytes_max = HANDSHAKE_BYTES_MAX
        self.opened_at = time.monotonic()
        self._accepting = kwargs.get("socket") is not None
        self._seal: Seal | None = None
        super().__init__(*args, **kwargs)

    @property
    def encryptor(self) -> Seal | None:
        """The seal of this connection."""
        return self._seal

    @encryptor.setter
    def encryptor(self, seal: Seal | None) -> None:
        self._seal = None if seal is None else seal.fresh(accepting=self._accepting)

    def connect(self, host: str, port: int) -> bool:
        """Connect anew: numbering and limits start over."""
        self.message_bytes_max = HANDSHAKE_BYTES_MAX
        self.encryptor = self._seal
        return bool(super().connect(host, port))

    def _TcpConnection__processRead(self) -> bool:  # noqa: N802  overrides pysyncobj's private method
        buffer = self._TcpConnection__readBuffer
        if len(buffer) >= 4:
            (size,) = struct.unpack("i", buffer[:4])
            if not 0 < size <= self.message_bytes_max:
                logger.warning(
                    "registry: closed a raft connection that announced a message of %d bytes", size
                )
                self.disconnect()
                return False
            if len(buffer) >= 4 + size:
                return False  # Take this message out first; poll reports what is left to read.
        return bool(super()._TcpConnection__processRead())


# Both modules make connections by this name.
pysyncobj.tcp_server.TcpConnection = GuardedConnection
pysyncobj.transport.TcpConnection = GuardedConnection


class GuardedTransport(TCPTransport):  # type: ignore[misc]  # pysyncobj has no types
    """Connections to the other voters. Its SyncObj must have `journal`, and `encryptor` a Seal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kept_alive_at = 0.0
        self._ready: bool
        super().__init__(*args, **kwargs)

    def send(self, node: Any, message: Any) -> bool:
        """Send to a voter what is on disk here; votes, acknowledgements and entries alike."""
        try:
            self._syncObj.journal.sync()
        except OSError:
            # The journal has reported it; this voter says nothing any more.
            return False
        return bool(super().send(node, message))

    def _onNewIncomingConnection(self, conn: GuardedConnection) -> None:  # noqa: N802
        if len(self._unknownConnections) >= UNKNOWN_CONNECTIONS_MAX:
            conn.disconnect()
            return
        super()._onNewIncomingConnection(conn)

    def _onIncomingMessageReceived(self, conn: GuardedConnection, message: Any) -> None:  # noqa: N802
        # Voters name themselves. pysyncobj's read-only nodes and remote commands have no use here.
        if conn.sendRandKey and (not isinstance(message, str) or message not in self._nodeAddrToNode):
            logger.warning("registry: closed a raft connection that did not name a voter")
            conn.disconnect()
            return
        super()._onIncomingMessageReceived(conn, message)

    def _onNodeConnected(self, node: Any) -> None:  # noqa: N802
        self._connections[node].message_bytes_max = MESSAGE_BYTES_MAX
        super()._onNodeConnected(node)

    def _maybeBind(self) -> None:  # noqa: N802
        was_ready = self._ready
        super()._maybeBind()
        if self._ready and not was_ready:
            # pysyncobj queues 5 connections: a few strangers would make a voter wait seconds for its turn.
            self._server._TcpServer__socket.listen(128)

    def _onTick(self) -> None:  # noqa: N802
        super()._onTick()
        now = time.monotonic()
        if now - self._kept_alive_at < KEEP_ALIVE_S:
            return
        self._kept_alive_at = now
        for node in self._nodes:
            self.send(node, {"type": "ka"})
        for conn in [c for c in self._unknownConnections if now - c.opened_at > HANDSHAKE_S]:
            conn.disconnect()
        if self._ready and self._server._TcpServer__state == SERVER_STATE.UNBINDED:
            # A failed accept closed the listener: `_maybeBind` opens it again.
            logger.warning("registry: the raft listener was closed by an error, binding it again")
            self._ready = False
