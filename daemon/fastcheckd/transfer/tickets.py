"""One-time tickets: the only key to the bulk lane.

`Open` decides who may read what and issues tickets for it; the lane redeems them and asks nothing else. What a ticket
is good for is a grant. Nothing here does I/O.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fastcheck_proto.v1 import peer_pb2

from ..errors import FrameError, PeerError
from .encoder_cache import ShardEncoder
from .frames import TICKET_BYTES

TICKET_LIFE_S = 30.0
TICKETS_MAX = 4096


@dataclass(frozen=True, eq=False)
class Grant:
    """A peer may read one replica, over as many connections as it has tickets."""

    #: Opens the replica, and the base that its chunks may be encoded against; NotHeldError when it is gone by then.
    opened: Callable[[], AbstractContextManager[ShardEncoder]]
    purpose: peer_pb2.Purpose.ValueType
    #: Node that reads, as it calls itself.
    reader: str = ""
    #: It takes encoded chunks.
    accept_encoded: bool = False
    #: It is short of memory.
    lean: bool = False
    #: Chunks that it has asked for, over any of its connections. It never asks for one over two at a time.
    asked: set[int] = field(default_factory=set)


class TicketOffice:
    """Issues and redeems tickets. Thread-safe; `clock` returns seconds that never go backwards."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        life_s: float = TICKET_LIFE_S,
        tickets_max: int = TICKETS_MAX,
    ) -> None:
        self._clock = clock
        self._life_s = life_s
        self._tickets_max = tickets_max
        self._lock = threading.Lock()
        #: In order of issue, hence of expiry.
        self._open: dict[bytes, tuple[Grant, float]] = {}

    def issue(self, grant: Grant) -> bytes:
        """A ticket of 32 random bytes for one connection.

        Raises:
            PeerError: too many tickets wait to be used.
        """
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._sweep()
            if len(self._open) >= self._tickets_max:
                raise PeerError(
                    f"this node has {len(self._open)} unused lane tickets, its limit: "
                    f"too many transfers begin at once; try again in {self._life_s:g} s"
                )
            self._open[ticket] = (grant, self._clock() + self._life_s)
        return ticket

    def redeem(self, ticket: bytes) -> Grant:
        """What the ticket is good for; it is used up by this.

        Raises:
            FrameError: unknown, already used, expired or revoked.
        """
        with self._lock:
            self._sweep()
            found = self._open.pop(ticket, None)
        if found is None:
            raise FrameError("the lane ticket is unknown, used up, revoked or older than its life")
        return found[0]

    def revoke(self, grant: Grant) -> None:
        """Make all unused tickets of a grant worthless."""
        with self._lock:
            for ticket in [t for t, (g, _) in self._open.items() if g is grant]:
                del self._open[ticket]

    def _sweep(self) -> None:
        now = self._clock()
        while self._open:
            ticket, (_, expires) = next(iter(self._open.items()))
            if expires > now:
                return
            del self._open[ticket]
