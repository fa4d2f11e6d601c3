"""How many bytes our own lanes have moved over the network, as the kernel counts them.

Our own counters count a chunk when it is in the socket's buffer, seconds early on a slow link; to tell our traffic from
the trainer's on the same interface takes the moment at which the bytes leave.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .channel import Channel

#: What a segment costs besides its payload, on average: Ethernet, IP and TCP with time stamps in packets of 1500 bytes.
#: Where the card cuts packets the system may count less; then others are taken for a little more silent than they are.
WIRE_OVERHEAD = 1500 / 1448


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes of TCP payload, repeats included, since the process began."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.sent + other.sent, self.received + other.received)


class LaneMeter:
    """All lanes of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Channel] = set()
        self._closed = WireBytes()

    def add(self, lane: Channel) -> None:
        """A lane begins."""
        with self._lock:
            self._open.add(lane)

    def remove(self, lane: Channel) -> None:
        """It is about to be closed; what its buffer still holds is not counted. Harmless when repeated."""
        with self._lock:
            if lane in self._open:
                self._open.discard(lane)
                self._closed += WireBytes(*lane.wire_bytes())

    def total(self) -> WireBytes:
        """Of all lanes, open and closed."""
        with self._lock:
            return sum((WireBytes(*lane.wire_bytes()) for lane in self._open), self._closed)
