"""TCP between the voters of a run, as the engine's own connections see it: sockets that never block, and their poller.

Bytes of one connection arrive in their order, each at most once, after the delays of `network.Weather`; what is lost
on the way is sent again, and all behind it waits. Connections know nothing of each other: what an old one still brings
may come after what a new one has brought. A process that ends closes its connections, a machine without power does not.
"""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Callable
from typing import Any

from pysyncobj.poller import POLL_EVENT_TYPE
from tests.simulation.network import Network
from tests.simulation.virtual_time import PROCESS, Process

#: What a connection holds that its receiver has not read: then its sender has to wait.
WINDOW_BYTES = 512 << 10
RETRANSMIT_S = 0.2
#: A connection that is not answered is tried again after this, and then after twice as long.
SYN_RETRY_S = 1.0
SPLIT_ODDS = 0.05


class Hosts:
    """All sockets of a run. A host's address is that of its machine's voter."""

    def __init__(self, network: Network, machines: dict[str, str]) -> None:
        self.network = network
        self.loop = network.loop
        #: Machine by address.
        self.machines = machines
        self.listeners: dict[tuple[str, int], VirtualSocket] = {}
        self._numbers = itertools.count(3)

    def number(self) -> int:
        return next(self._numbers)

    def poller(self) -> VirtualPoller:
        return VirtualPoller()

    def make(self, *_: object) -> VirtualSocket:
        process = PROCESS.get()
        assert process is not None
        return VirtualSocket(self, process)


class VirtualPoller:
    """pysyncobj's poller over these sockets. `wake` is called when one of them has something."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.dispatched = False
        self.sockets: dict[int, VirtualSocket] = {}
        self._interest: dict[int, tuple[Callable[[int, int], None], int]] = {}
        self.notified = False

    def subscribe(self, descr: int, callback: Callable[[int, int], None], mask: int) -> None:
        self._interest[descr] = callback, mask
        if self.sockets[descr].events() & (mask | POLL_EVENT_TYPE.ERROR):
            self.wake()

    def unsubscribe(self, descr: int) -> None:
        self._interest.pop(descr, None)

    def poll(self, timeout: float) -> None:
        # Who is ready is asked first, as the system is; one that is closed meanwhile hears of it all the same.
        ready = [
            (descr, callback, events)
            for descr, (callback, mask) in self._interest.items()
            if (events := self.sockets[descr].events() & (mask | POLL_EVENT_TYPE.ERROR))
        ]
        self.dispatched = bool(ready)
        for descr, callback, events in ready:
            callback(descr, events)


class VirtualSocket:
    """One end, or a listener."""

    def __init__(self, hosts: Hosts, process: Process) -> None:
        self.hosts = hosts
        self.process = process
        self.machine = process.machine
        self.number = hosts.number()
        #: Set by the engine that it belongs to; nobody to wake before.
        self.poller: VirtualPoller = process.voter.poller
        self.poller.sockets[self.number] = self
        self.peer: VirtualSocket | None = None
        self.backlog: list[VirtualSocket] | None = None
        self.connected = False
        self.ended = False
        self.broken = 0
        self.closed = False
        self.received = bytearray()
        #: Sent by this end and not read by the other.
        self.outstanding = 0
        #: What the network has not taken yet, in its order: bytes, or what ends the connection.
        self._leaving: list[bytes | str] = []
        self._moving = False
        self._arrives_at = 0.0

    # What the engine calls

    def fileno(self) -> int:
        return self.number

    def setsockopt(self, *_: object) -> None:
        pass

    def setblocking(self, _: object) -> None:
        pass

    def getsockopt(self, level: int, option: int) -> int:
        return self.broken if option == socket.SO_ERROR else 0

    def bind(self, address: tuple[str, int]) -> None:
        self.hosts.listeners[address] = self
        self.backlog = []

    def listen(self, _: int) -> None:
        pass

    def accept(self) -> tuple[VirtualSocket, tuple[str, int]]:
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "nobody there")
        return self.backlog.pop(0), ("", 0)

    def connect(self, address: tuple[str, int]) -> None:
        self._try(address, SYN_RETRY_S)
        raise BlockingIOError(errno.EINPROGRESS, "connecting")

    def send(self, data: bytes) -> int:
        self.process.voter.step()
        if self.broken:
            raise ConnectionResetError(self.broken, "reset")
        room = WINDOW_BYTES - self.outstanding
        if not self.connected or room <= 0:
            raise BlockingIOError(errno.EAGAIN, "no room")
        taken = bytes(data[:room])
        self.outstanding += len(taken)
        self._leave(taken)
        return len(taken)

    def recv(self, size: int) -> bytes:
        self.process.voter.step()
        if self.broken:
            raise ConnectionResetError(self.broken, "reset")
        if not self.received:
            if self.ended:
                return b""
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        data = bytes(self.received[:size])
        del self.received[:size]
        if self.peer is not None:
            was_full = self.peer.outstanding >= WINDOW_BYTES
            self.peer.outstanding -= len(data)
            if was_full:
                self.peer.poller.wake()
        return data

    def close(self) -> None:
        """With bytes unread, the other end's connection breaks; otherwise it reads all of it, and then the end."""
        if self.closed:
            return
        self.closed = True
        if self.backlog is not None:
            self.hosts.listeners = {a: s for a, s in self.hosts.listeners.items() if s is not self}
            for waiting in self.backlog:
                waiting.close()
        if self.connected and not self.broken and not self.ended:
            self._leave("reset" if self.received else "end")
        self.poller.unsubscribe(self.number)
        self.poller.sockets.pop(self.number, None)

    # The network

    @property
    def alive(self) -> bool:
        return not self.closed and not self.process.dead

    def events(self) -> int:
        if self.backlog is not None:
            return POLL_EVENT_TYPE.READ if self.backlog else 0
        if self.broken:
            return POLL_EVENT_TYPE.ERROR
        found = POLL_EVENT_TYPE.READ if self.received or self.ended else 0
        if self.connected and self.outstanding < WINDOW_BYTES:
            found |= POLL_EVENT_TYPE.WRITE
        return int(found)

    def _try(self, address: tuple[str, int], retry_s: float) -> None:
        """Ask to be connected, until an answer comes."""
        if self.connected or self.broken or not self.alive:
            return
        there, loop = self.hosts.machines[address[0]], self.hosts.loop
        if (delay_s := self.hosts.network.weather.delay_s(self.machine, there)) is not None:
            loop.at(loop.now + delay_s, self._asked, (address, there), None)
        loop.at(loop.now + retry_s, self._try, (address, 2 * retry_s), None)

    def _asked(self, address: tuple[str, int], there: str) -> None:
        """At the machine that listens, or does not."""
        network, loop = self.hosts.network, self.hosts.loop
        if there not in network.up or not self.alive or self.peer is not None:
            return
        delay_s = network.weather.delay_s(there, self.machine)
        listener = self.hosts.listeners.get(address)
        if listener is None or not listener.alive:
            if delay_s is not None:
                loop.at(loop.now + delay_s, self._break, (errno.ECONNREFUSED,), None)
            return
        if delay_s is None:
            return  # as lost as the question: it comes again
        accepted = VirtualSocket(self.hosts, listener.process)
        accepted.peer, self.peer = self, accepted
        accepted.connected = True
        assert listener.backlog is not None
        listener.backlog.append(accepted)
        listener.poller.wake()
        loop.at(loop.now + delay_s, self._connected, (), None)

    def _connected(self) -> None:
        if self.alive:
            self.connected = True
            self.poller.wake()

    def _leave(self, what: bytes | str) -> None:
        rng = self.hosts.network.rng
        if isinstance(what, bytes) and len(what) > 1 and rng.random() < SPLIT_ODDS:
            at = rng.randrange(1, len(what))
            self._leaving += [what[:at], what[at:]]
        else:
            self._leaving.append(what)
        if not self._moving:
            self._move()

    def _move(self) -> None:
        """Send what is next; called again, in a while, until the network has taken all."""
        network, loop, peer = self.hosts.network, self.hosts.loop, self.peer
        assert peer is not None
        self._moving = False
        if self.machine not in network.up:
            return  # without power nothing leaves
        ready_at = loop.now + self.process.voter.busy_s()
        while self._leaving:
            delay_s = network.weather.delay_s(self.machine, peer.machine)
            if delay_s is None:
                self._moving = True
                loop.at(ready_at + RETRANSMIT_S, self._move, (), None)
                return
            self._arrives_at = max(self._arrives_at + 1e-7, ready_at + delay_s)
            loop.at(self._arrives_at, peer.arrived, (self._leaving.pop(0),), None)

    def arrived(self, what: bytes | str) -> None:
        """Something from the other end."""
        network, sender = self.hosts.network, self.peer
        assert sender is not None
        if self.machine not in network.up:
            return
        if not self.alive:
            # Nobody has this connection any more: the other end learns it.
            if isinstance(what, bytes):
                delay_s = network.weather.delay_s(self.machine, sender.machine)
                if delay_s is not None:
                    self.hosts.loop.at(
                        self.hosts.loop.now + delay_s, sender._break, (errno.ECONNRESET,), None
                    )
            return
        if isinstance(what, bytes):
            self.received += what
        elif what == "end":
            self.ended = True
        else:
            self.received.clear()
            self.broken = errno.ECONNRESET
        self.poller.wake()

    def _break(self, number: int) -> None:
        if self.alive:
            self.broken = number
            self.poller.wake()

    def left_behind(self, machine_lives: bool) -> None:
        """The process has died."""
        if machine_lives:
            self.close()
        else:
            self._leaving.clear()


class SocketModule:
    """What pysyncobj takes from `socket`, with virtual ones in their place."""

    def __init__(self, hosts: Hosts) -> None:
        self.socket = hosts.make
        self.errno = errno

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)
