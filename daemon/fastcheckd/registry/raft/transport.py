"""pysyncobj's connections between voters, with the limits that it leaves out.

Without them an unauthenticated peer makes a voter buffer up to 2 GiB, idle connections stay for ever, and
one failed `accept` ends listening. Also: TLS, who may speak as whom, the keep-alive between all voters
(without it, idle links between followers count as broken and an election loses its first vote request) and
the rule that nothing leaves a voter before its log is on disk. The overridden names are pysyncobj 0.3.17's
own, private ones included.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
import zlib
from collections.abc import Callable, Collection
from typing import Any

import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport
from pysyncobj.node import TCPNode
from pysyncobj.poller import POLL_EVENT_TYPE
from pysyncobj.tcp_connection import CONNECTION_STATE, TcpConnection
from pysyncobj.tcp_server import SERVER_STATE
from pysyncobj.transport import TCPTransport

from ...config import Voter
from ...log import Complaints
from .membership import voter_from_list
from .messages import Seal
from .tls import Tls, TlsSocket, named_node

logger = logging.getLogger(__name__)

#: Largest message between voters, inflated or not: a batch of log entries (see `raft`); snapshots come in pieces.
MESSAGE_BYTES_MAX = 64 << 20
#: Before the other side has proved that it holds the key, only its challenge and its name are expected.
HANDSHAKE_BYTES_MAX = 4096
HANDSHAKE_S = 5.0
#: TCP asks a machine that is not there again after 1, 3 and 7 s. One that has just booted must not wait for that: the
#: voters that were left may need it for a majority.
CONNECT_S = 1.0
UNKNOWN_CONNECTIONS_MAX = 64
KEEP_ALIVE_S = 0.5


class VoterNode(TCPNode):  # type: ignore[misc]  # pysyncobj has no types
    """A voter as pysyncobj's node, which its raft address identifies; made of what membership entries hold."""

    def __init__(self, voter: Voter | list[str]) -> None:
        if not isinstance(voter, Voter):
            voter = voter_from_list(voter)
        super().__init__(voter.raft_address)
        self.voter = voter
        self._hash = zlib.crc32(voter.raft_address.encode())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VoterNode) and self.voter.raft_address == other.voter.raft_address

    def __hash__(self) -> int:
        # Not by the string's own hash: sets of voters are walked in the same order in every process.
        return self._hash


_complaints = Complaints(logger, "registry")


class GuardedConnection(TcpConnection):  # type: ignore[misc]  # pysyncobj has no types
    """A connection with a cap on what it buffers, and a seal of its own or TLS."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.message_bytes_max = HANDSHAKE_BYTES_MAX
        self.opened_at = time.monotonic()
        #: Whether the other side has proved which voter it is: only then is anything else said.
        self.authenticated = False
        #: With TLS: the voter that the other side's certificate names.
        self.peer: str | None = None
        self._accepting = kwargs.get("socket") is not None
        self._seal: Seal | None = None
        self._files: Tls | None = None
        self._welcome: Callable[[], Collection[str]] = tuple
        self._tls: TlsSocket | None = None
        self._TcpConnection__socket: Any
        super().__init__(*args, **kwargs)

    @property
    def encryptor(self) -> Seal | None:
        """The seal of this connection."""
        return self._seal

    @encryptor.setter
    def encryptor(self, seal: Seal | None) -> None:
        self._seal = None if seal is None else seal.fresh(accepting=self._accepting)

    def use_tls(self, files: Tls, welcome: Callable[[], Collection[str]]) -> None:
        """Speak TLS, with one of the voters (by node id) that `welcome` gives at that time."""
        self._files = files
        self._welcome = welcome

    def connect(self, host: str, port: int) -> bool:
        """Connect anew: numbering and limits start over."""
        self._forget()
        self.opened_at = time.monotonic()
        self.encryptor = self._seal
        return bool(super().connect(host, port))

    def disconnect(self) -> None:
        """Close."""
        self._forget()
        super().disconnect()

    def _forget(self) -> None:
        self.message_bytes_max = HANDSHAKE_BYTES_MAX
        self.authenticated = False
        self.peer = None
        self._tls = None

    def send(self, message: Any) -> None:
        """Send now what the network takes, and the rest when it takes more."""
        super().send(message)
        self._wait_for_more()

    def _wait_for_more(self) -> None:
        """Have the poller call again for what it cannot see, or was not asked to look for, by itself."""
        if self.state == CONNECTION_STATE.DISCONNECTED or self.fileno() is None:
            return
        event = POLL_EVENT_TYPE.READ | POLL_EVENT_TYPE.ERROR
        # Bytes that TLS has taken in already wake nobody: being able to write is true at once.
        if self.getSendBufferSize() or (self._tls and (self._tls.wants_write or self._tls.pending)):
            event |= POLL_EVENT_TYPE.WRITE
        self._TcpConnection__poller.subscribe(self.fileno(), self._TcpConnection__processConnection, event)

    def _TcpConnection__processConnection(self, descr: int, event: int) -> None:  # noqa: N802  overrides pysyncobj's private method
        if self._files is None or descr != self.fileno() or event & POLL_EVENT_TYPE.ERROR:
            super()._TcpConnection__processConnection(descr, event)
            return
        try:
            ready = self._begin_tls()
        except OSError as error:
            who = "to this voter" if self._accepting else f"from this voter to {'/'.join(self._welcome())}"
            _complaints.add("closed a raft connection %s: %s", who, error)
            self.disconnect()
            return
        tls = self._tls
        if ready and tls is not None:
            if tls.pending:
                event |= POLL_EVENT_TYPE.READ
            super()._TcpConnection__processConnection(descr, event)
        # In there it may have been closed.
        if tls is not None and self._tls is tls:
            self._wait_for_more()

    def _begin_tls(self) -> bool:
        """Whether the other side has proved who it is; False: not yet.

        Raises:
            OSError: it is nobody who may speak here.
        """
        if self._tls is None:
            plain = self._TcpConnection__socket
            if number := plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, "it cannot be reached")
            assert self._files is not None
            self._tls = self._files.protect(plain, accepting=self._accepting)
            self._TcpConnection__socket = self._tls
        tls = self._tls
        if self.peer is not None:
            tls.flush()
            return True
        if not tls.handshake():
            return False
        assert self._files is not None
        peer = named_node(tls.certificate, self._files.cluster_id)
        if peer is None:
            raise ConnectionResetError("its certificate names no node of this cluster")
        if peer not in self._welcome():
            raise ConnectionResetError(
                f"its certificate is that of {peer}, which is not a voter expected here"
            )
        self.peer = peer
        return True

    def _TcpConnection__processRead(self) -> bool:  # noqa: N802  overrides pysyncobj's private method
        buffer = self._TcpConnection__readBuffer
        if len(buffer) >= 4:
            (size,) = struct.unpack("i", buffer[:4])
            if not 0 < size <= self.message_bytes_max:
                _complaints.add("closed a raft connection that announced a message of %d bytes", size)
                self.disconnect()
                return False
            if len(buffer) >= 4 + size:
                return False  # Take this message out first; poll reports what is left to read.
        return bool(super()._TcpConnection__processRead())


class _Zlib:
    """What pysyncobj uses of zlib, with an end to what a message may inflate to; an error closes the connection."""

    compress = staticmethod(zlib.compress)

    @staticmethod
    def decompress(data: bytes) -> bytes:
        inflating = zlib.decompressobj()
        message = inflating.decompress(data, MESSAGE_BYTES_MAX)
        if not inflating.eof:
            _complaints.add(
                "closed a raft connection whose message inflates to more than %d bytes", MESSAGE_BYTES_MAX
            )
            raise ValueError("the message is cut off, or inflates to more than a message may have")
        return message


pysyncobj.tcp_connection.zlib = _Zlib
# Both modules make connections by this name.
pysyncobj.tcp_server.TcpConnection = GuardedConnection
pysyncobj.transport.TcpConnection = GuardedConnection


class GuardedTransport(TCPTransport):  # type: ignore[misc]  # pysyncobj has no types
    """Connections to the other voters.

    Its SyncObj must have `journal`, and either `encryptor`, a Seal, or `tls`.
    """

    def __init__(self, sync_obj: Any, *args: Any, **kwargs: Any) -> None:
        self._kept_alive_at = 0.0
        self._ready: bool
        self._tls: Tls | None = sync_obj.tls
        super().__init__(sync_obj, *args, **kwargs)

    def send(self, node: Any, message: Any) -> bool:
        """Send to a voter what is on disk here; votes, acknowledgements and entries alike."""
        try:
            self._syncObj.journal.sync()
        except OSError:
            # The journal has reported it; this voter says nothing any more.
            return False
        conn = self._connections.get(node)
        if conn is None or not conn.authenticated:
            return False
        return bool(super().send(node, message))

    def addNode(self, node: Any) -> None:  # noqa: N802
        """Take up a voter: connect to it, or wait for it, as the order of the addresses says."""
        super().addNode(node)
        conn = self._connections.get(node)
        if conn is not None and self._tls is not None:
            conn.use_tls(self._tls, lambda: (node.voter.node_id,))

    def _onNewIncomingConnection(self, conn: GuardedConnection) -> None:  # noqa: N802
        if len(self._unknownConnections) >= UNKNOWN_CONNECTIONS_MAX:
            # Not the newcomer: a crowd that says nothing must not keep a voter out.
            _complaints.add(
                "%d connections have not said who they are: the oldest is closed", UNKNOWN_CONNECTIONS_MAX
            )
            min(self._unknownConnections, key=lambda known: known.opened_at).disconnect()
        if self._tls is not None:
            conn.use_tls(self._tls, lambda: {node.voter.node_id for node in self._nodes})
        super()._onNewIncomingConnection(conn)

    def _onIncomingMessageReceived(self, conn: GuardedConnection, message: Any) -> None:  # noqa: N802
        if self._tls is None and not conn.sendRandKey:
            super()._onIncomingMessageReceived(conn, message)  # its challenge
            return
        # Voters name themselves. pysyncobj's read-only nodes and remote commands have no use here.
        node = self._nodeAddrToNode.get(message) if isinstance(message, str) else None
        # Which of two connects is settled by their addresses: two connections would race for one place.
        if node is None or self._shouldConnect(node):
            _complaints.add("closed a raft connection that did not name a voter")
            conn.disconnect()
            return
        if self._tls is not None and conn.peer != node.voter.node_id:
            _complaints.add(
                "closed a raft connection with the certificate of %s that named itself %s", conn.peer, message
            )
            conn.disconnect()
            return
        older = self._connections.pop(node, None)
        if older is not None:
            older.disconnect()
        super()._onIncomingMessageReceived(conn, message)

    def _onDisconnected(self, conn: GuardedConnection) -> None:  # noqa: N802
        # Connecting anew is for the next turn. pysyncobj does it here, in the middle of what it was sending or hearing
        # when it found the connection dead, and then takes the new one for connected, and for safe.
        self._unknownConnections.discard(conn)
        node = self._connToNode(conn)
        if node is not None and node in self._nodes:
            self._onNodeDisconnected(node)

    def _onMessageReceived(self, node: Any, message: Any) -> None:  # noqa: N802
        # What a removed voter had sent before its connection was closed comes too late.
        if node in self._nodes:
            super()._onMessageReceived(node, message)

    def _onNodeConnected(self, node: Any) -> None:  # noqa: N802
        self._connections[node].message_bytes_max = MESSAGE_BYTES_MAX
        self._connections[node].authenticated = True
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
        for node in list(self._nodes):
            self.send(node, {"type": "ka"})
        dialled = [c for c in self._connections.values() if c.fileno() is not None and not c.authenticated]
        for conn in (*self._unknownConnections, *dialled):
            limit_s = CONNECT_S if conn.state == CONNECTION_STATE.CONNECTING else HANDSHAKE_S
            if now - conn.opened_at > limit_s:
                conn.disconnect()
        if self._ready and self._server._TcpServer__state == SERVER_STATE.UNBINDED:
            # A failed accept closed the listener: `_maybeBind` opens it again.
            logger.warning("registry: the raft listener was closed by an error, binding it again")
            self._ready = False
