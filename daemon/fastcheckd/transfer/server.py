"""The listening end of the bulk lane: tickets in, chunks through, one thread per connection.

It knows nobody: whoever has a ticket may do what the ticket is for, everyone else is closed. A
broken or hostile client costs its own connection and a count, never the daemon. A crowd without tickets keeps
nobody out: when there is no room, the connection that has waited longest without one makes it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial

from fastcheck_proto.v1 import peer_pb2

from ..counters import Counters
from ..errors import ConfigError, FastCheckdError, FrameError, PeerError
from ..log import Complaints
from .channel import Channel
from .encoder_cache import ShardEncoder
from .lane_meter import LaneMeter
from .lane_tls import LaneTls
from .pacing import ChunkGate, passing
from .sockets import describe, shut, tune
from .tickets import Grant, TicketOffice

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
#: Of those, so many may not have shown a ticket yet.
UNPROVED_MAX = 128
HELLO_TIMEOUT_S = 5.0
#: How long the thread of a connection that is closed to make room takes to end, at most.
_ROOM_TIMEOUT_S = 1.0
_STOP_TIMEOUT_S = 5.0
#: Pause when the system has no descriptor or thread for a connection.
_EXHAUSTED_PAUSE_S = 0.1


class TransferServer:
    """Accepts lane connections on host:port until stopped. Port 0 takes a free one.

    `gates` hold up the chunks of those who can wait, by purpose; a restore waits for nothing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tickets: TicketOffice,
        counters: Counters,
        transfer_timeout_s: float,
        *,
        gates: Mapping[peer_pb2.Purpose.ValueType, ChunkGate] | None = None,
        congestion: str = "",
        meter: LaneMeter | None = None,
        tls: LaneTls | None = None,
        connections_max: int = CONNECTIONS_MAX,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._host = host
        self._port = port
        self._tickets = tickets
        self._counters = counters
        self._timeout_s = transfer_timeout_s
        self._gates = gates or {}
        self._congestion = congestion
        self._meter = meter or LaneMeter()
        self._tls = tls
        self._complaints = Complaints(logger, "lane", logging.INFO)
        #: Connections over which somebody is served who waits for the bytes.
        self._serving = 0
        self._connections_max = connections_max
        self._hello_timeout_s = hello_timeout_s
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._open: dict[Channel, threading.Thread] = {}
        #: Of those, the ones that have not shown a ticket yet, the oldest first.
        self._unproved: dict[Channel, None] = {}

    @property
    def port(self) -> int:
        """The port in use."""
        assert self._listener is not None, "the lane server is not started"
        return int(self._listener.getsockname()[1])

    @property
    def connections(self) -> int:
        """Connections open now."""
        with self._lock:
            return len(self._open)

    @property
    def unproved(self) -> int:
        """Of those, connections that have not shown a ticket yet."""
        with self._lock:
            return len(self._unproved)

    @property
    def serving(self) -> bool:
        """Whether somebody who waits for the bytes is served, a load. May be asked from any thread."""
        return self._serving > 0

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: host, port or congestion control cannot be had; the message names the key.
        """
        self._listener = self._listen()
        self._accepting = threading.Thread(target=self._accept, name="lane-accept", daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        """Stop listening and end every connection; returns when their threads are gone."""
        self._stopping.set()
        if self._listener is None or self._accepting is None:
            return
        shut(self._listener)  # wakes accept
        self._accepting.join(_STOP_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            open_now = list(self._open.items())
        for channel, _ in open_now:
            channel.end()
        for _, thread in open_now:
            thread.join(_STOP_TIMEOUT_S)

    def _listen(self) -> socket.socket:
        try:
            found = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise ConfigError(
                f"config key 'lane_host' (or 'host') = {self._host!r} cannot be resolved: {error}"
            ) from None
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            try:
                tune(listener, self._congestion)
            except OSError as error:
                raise ConfigError(
                    f"config key 'lane_congestion' = {self._congestion!r} is not to be had here: "
                    f"{describe(error)}; see sysctl net.ipv4.tcp_available_congestion_control"
                ) from None
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(self._connections_max)
            except OSError as error:
                raise ConfigError(
                    f"config key 'lane_port': cannot listen on {self._host}:{self._port}: {describe(error)}; "
                    "another process may have it: choose another port"
                ) from None
        except ConfigError:
            listener.close()
            raise
        return listener

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    logger.warning("cannot accept a lane connection: %s", describe(error))
                    self._stopping.wait(_EXHAUSTED_PAUSE_S)
                continue
            whom = f"the peer at {address[0]}:{address[1]}"
            if not self._make_room():
                self._reject(whom, f"{self._connections_max} connections are open, the limit")
                sock.close()
                continue
            channel = Channel(sock, whom, self._timeout_s)
            thread = threading.Thread(
                target=self._serve, args=(channel, whom), name=f"lane-{address[1]}", daemon=True
            )
            with self._lock:
                self._open[channel] = thread
                self._unproved[channel] = None
            self._meter.add(channel)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._reject(whom, str(error))
                self._proved(channel)
                self._forget(channel)
                self._stopping.wait(_EXHAUSTED_PAUSE_S)

    def _make_room(self) -> bool:
        """Have room for one connection more; False: all that are open have shown their tickets."""
        with self._gone:
            while len(self._open) >= self._connections_max or len(self._unproved) >= UNPROVED_MAX:
                oldest = next(iter(self._unproved), None)
                if oldest is None:
                    return False
                oldest.end()
                if not self._gone.wait_for(partial(self._is_gone, oldest), _ROOM_TIMEOUT_S):
                    return False
        return True

    def _is_gone(self, channel: Channel) -> bool:
        return channel not in self._open

    def _serve(self, channel: Channel, whom: str) -> None:
        try:
            try:
                grant = self._welcome(channel)
            except (FrameError, PeerError) as error:
                self._reject(whom, str(error))
                return
            finally:
                self._proved(channel)
            gate = self._gates.get(grant.purpose)
            with self._counted(grant), grant.opened() as encoder, passing(gate, channel):
                self._send(channel, grant, encoder, gate)
        except FrameError as error:
            self._reject(whom, str(error))
            channel.send_error(str(error))
        except PeerError as error:
            logger.info("a lane transfer ended early: %s", error)
        except FastCheckdError as error:
            logger.warning("a lane transfer with %s failed: %s", whom, error)
            channel.send_error(str(error))
        except Exception:
            logger.exception("a lane transfer with %s failed", whom)
            channel.send_error("internal error, see the log of this node's daemon")
        finally:
            self._forget(channel)

    def _welcome(self, channel: Channel) -> Grant:
        """What whoever connected may do; FrameError or PeerError when that is nothing."""
        node_id = None if self._tls is None else channel.accept_tls(self._tls, self._hello_timeout_s)
        grant = self._tickets.redeem(channel.receive_hello(self._hello_timeout_s).ticket)
        if node_id is not None and grant.reader and node_id != grant.reader:
            raise FrameError(f"node {node_id} came with a ticket of node {grant.reader}")
        return grant

    def _proved(self, channel: Channel) -> None:
        with self._lock:
            self._unproved.pop(channel, None)

    def _send(self, channel: Channel, grant: Grant, encoder: ShardEncoder, gate: ChunkGate | None) -> None:
        """Send what the reader asks for, run after run; its next request waits in the socket meanwhile."""
        replica, outgoing = encoder.replica, encoder.outgoing
        table = replica.chunks
        again: set[int] = set()

        def plain(index: int) -> bool:
            # One that is asked for again came bad: perhaps this side encodes what the other decodes otherwise.
            if index in grant.asked:
                again.add(index)
            grant.asked.add(index)
            return index in again or not grant.accept_encoded

        while run := channel.receive_want(len(table)):
            # Encoded ahead within a run only: nobody knows whether there will be another one.
            with contextlib.closing(encoder.payloads(run, channel, plain=plain, lean=grant.lean)) as payloads:
                for index, payload in payloads:
                    size = len(payload.data)
                    sending = contextlib.nullcontext() if outgoing is None else outgoing.connection_sends()
                    with sending:
                        if gate is not None:
                            gate.wait(channel, size, channel.check)
                        start, stop = table.range(index)
                        channel.send_chunk(
                            index,
                            start,
                            replica.chunk_digest(index),
                            stop - start,
                            payload.codec,
                            payload.data,
                        )
                    self._counters.add("bytes_sent", size)
                    self._counters.add("chunks_resent", index in again)
                    if outgoing is not None:
                        outgoing.sent(grant.reader, raw_bytes=stop - start, sent_bytes=size)

    @contextlib.contextmanager
    def _counted(self, grant: Grant) -> Iterator[None]:
        """While a connection is served: it counts as a restore's if somebody waits for its bytes."""
        waits = grant.purpose == peer_pb2.PURPOSE_RESTORE
        with self._lock:
            self._serving += waits
        try:
            yield
        finally:
            with self._lock:
                self._serving -= waits

    def _reject(self, whom: str, why: str) -> None:
        self._counters.add("lane_rejected")
        self._complaints.add("closed the connection of %s: %s", whom, why)

    def _forget(self, channel: Channel) -> None:
        self._meter.remove(channel)
        channel.close()
        with self._gone:
            del self._open[channel]
            self._gone.notify_all()
