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
from collections.abc import Generator, Iterator
from functools import partial

from ..chunks import ChunkTable
from ..codec.get_planner import GetPlanner
from ..counters import Counters
from ..errors import ConfigError, CorruptError, FastCheckdError, FrameError, PeerError
from ..log import Complaints
from .chunk_stream import receive_chunks, send_chunks
from .codec_pool import CodecPool
from .frames import ON_DEMAND, RESENDS_MAX, Codec, FrameHeader, Hello
from .intake import Intake
from .lane import Lane
from .lane_client import ChunkGate, passing
from .lane_meter import LaneMeter
from .lane_tls import LaneTls
from .outgoing import Outgoing
from .shard_source import Payload
from .sockets import describe, shut, tune
from .tickets import GetGrant, Grant, PutGrant, TicketOffice

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


class LaneServer:
    """Accepts lane connections on host:port until stopped. Port 0 takes a free one.

    `pool` decodes what is put here, and encodes what is read from here as the policy `codec` has it; each connection
    keeps at most two chunks of encoded bytes in memory, three if it is read over. `gate` holds up the chunks of puts,
    `aside` those that are read by somebody who does not wait for them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tickets: TicketOffice,
        counters: Counters,
        transfer_timeout_s: float,
        *,
        pool: CodecPool,
        codec: str = "auto",
        congestion: str = "",
        meter: LaneMeter | None = None,
        gate: ChunkGate | None = None,
        aside: ChunkGate | None = None,
        tls: LaneTls | None = None,
        connections_max: int = CONNECTIONS_MAX,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._host = host
        self._port = port
        self._tickets = tickets
        self._counters = counters
        self._timeout_s = transfer_timeout_s
        self._pool = pool
        self._planner = GetPlanner(codec, pool.threads)
        self._congestion = congestion
        self._meter = meter or LaneMeter()
        self._gate = gate
        self._aside = aside
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
        self._open: dict[Lane, threading.Thread] = {}
        #: Of those, the ones that have not shown a ticket yet, the oldest first.
        self._unproved: dict[Lane, None] = {}

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
        for lane, _ in open_now:
            lane.end()
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
            lane = Lane(sock, whom, self._timeout_s)
            thread = threading.Thread(
                target=self._serve, args=(lane, whom), name=f"lane-{address[1]}", daemon=True
            )
            with self._lock:
                self._open[lane] = thread
                self._unproved[lane] = None
            self._meter.add(lane)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._reject(whom, str(error))
                self._proved(lane)
                self._forget(lane)
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

    def _is_gone(self, lane: Lane) -> bool:
        return lane not in self._open

    def _serve(self, lane: Lane, whom: str) -> None:
        try:
            try:
                hello, grant = self._welcome(lane)
            except (FrameError, PeerError) as error:
                self._reject(whom, str(error))
                return
            finally:
                self._proved(lane)
            if isinstance(grant, PutGrant):
                with passing(self._gate, lane):
                    self._receive(lane, hello, grant)
            elif grant.background:
                with passing(self._aside, lane):
                    self._send(lane, hello, grant, self._aside)
            else:
                with self._serving_one():
                    self._send(lane, hello, grant)
        except FrameError as error:
            self._reject(whom, str(error))
            lane.send_error(str(error))
        except PeerError as error:
            logger.info("a lane transfer ended early: %s", error)
        except FastCheckdError as error:
            logger.warning("a lane transfer with %s failed: %s", whom, error)
            lane.send_error(str(error))
        except Exception:
            logger.exception("a lane transfer with %s failed", whom)
            lane.send_error("internal error, see the log of this node's daemon")
        finally:
            self._forget(lane)

    def _welcome(self, lane: Lane) -> tuple[Hello, Grant]:
        """What whoever connected may do; FrameError or PeerError when that is nothing."""
        node_id = None if self._tls is None else lane.accept_tls(self._tls, self._hello_timeout_s)
        hello = lane.receive_hello(self._hello_timeout_s)
        grant = self._tickets.redeem(hello.ticket)
        if node_id is not None and isinstance(grant, PutGrant) and node_id != grant.incoming.manifest.owner:
            grant.fail()
            raise FrameError(f"node {node_id} came with a ticket of node {grant.incoming.manifest.owner}")
        return hello, grant

    def _proved(self, lane: Lane) -> None:
        with self._lock:
            self._unproved.pop(lane, None)

    def _receive(self, lane: Lane, hello: Hello, grant: PutGrant) -> None:
        if hello.stride == ON_DEMAND:
            raise FrameError("the chunks of a put are not sent on demand")
        incoming = grant.incoming
        chunks = range(hello.first, len(incoming.table), hello.stride)
        intake = Intake(incoming, self._pool, self._counters, lane.check)

        def place_of(header: FrameHeader) -> memoryview:
            if self._gate is not None:
                self._gate.wait(lane, header.encoded_bytes, lane.check)
            return intake.place_of(header)

        try:
            incoming.attach(hello.first, hello.stride, lane.end)
            try:
                for _ in range(RESENDS_MAX + 1):
                    receive_chunks(
                        lane,
                        chunks,
                        table=incoming.table,
                        codecs=frozenset(Codec),
                        place_of=place_of,
                        accept=intake.accept,
                        moved=lambda count: self._counters.add("bytes_received", count),
                    )
                    intake.drain()
                    bad = incoming.missing(chunks)
                    if not bad:
                        break
                    lane.send_result(bad)
            finally:
                intake.close()
                # Before the answer: a sender that has it may ask to finish at once.
                incoming.detach(hello.first)
            if bad:
                raise CorruptError(f"{len(bad)} chunks did not arrive whole after {RESENDS_MAX} repeats")
            lane.send_result([])
        except BaseException:
            # One connection lost is the transfer lost: give its memory back now, not when it expires.
            grant.fail()
            raise

    def _send(self, lane: Lane, hello: Hello, grant: GetGrant, gate: ChunkGate | None = None) -> None:
        if hello.stride not in {grant.streams, ON_DEMAND}:
            raise FrameError(
                f"the transfer has {grant.streams} connections; stride {hello.stride} does not fit"
            )
        digests = grant.manifest.chunk_digests
        table = ChunkTable.of(grant.manifest)
        with grant.opened() as source:
            outgoing = Outgoing(
                source, table, digests, grant.manifest.key.step, pool=self._pool,
                planner=self._planner if grant.accept_encoded else None, counters=self._counters,
            )  # fmt: skip

            def asked_for() -> Generator[tuple[int, Payload], None, None]:
                """What the reader asks for, run after run; the next request waits in the socket meanwhile."""
                while run := lane.receive_want(len(table)):
                    # Made ahead within a run only: nobody knows whether there will be another one.
                    with contextlib.closing(outgoing.payloads(run, lane)) as payloads:
                        yield from payloads

            own = range(hello.first, len(table), max(1, hello.stride))
            on_demand = hello.stride == ON_DEMAND
            with contextlib.closing(asked_for() if on_demand else outgoing.payloads(own, lane)) as payloads:
                send_chunks(
                    lane,
                    payloads if gate is None else _held_up(payloads, gate, lane),
                    table=table,
                    digest_of=outgoing.digest,
                    moved=lambda count: self._counters.add("bytes_sent", count),
                )

    @contextlib.contextmanager
    def _serving_one(self) -> Iterator[None]:
        with self._lock:
            self._serving += 1
        try:
            yield
        finally:
            with self._lock:
                self._serving -= 1

    def _reject(self, whom: str, why: str) -> None:
        self._counters.add("lane_rejected")
        self._complaints.add("closed the connection of %s: %s", whom, why)

    def _forget(self, lane: Lane) -> None:
        self._meter.remove(lane)
        lane.close()
        with self._gone:
            del self._open[lane]
            self._gone.notify_all()


def _held_up(
    payloads: Iterator[tuple[int, Payload]], gate: ChunkGate, lane: Lane
) -> Iterator[tuple[int, Payload]]:
    for index, payload in payloads:
        gate.wait(lane, len(payload.data), lane.check)
        yield index, payload
