"""Whether what is read from here is worth encoding, from what sending and encoding lately took. Pure.

Encoding overlaps sending, so a chunk takes whichever is longer: a codec thread's time, shared by all connections that
are read over, or the link's for fewer bytes. Compared is per connection, in seconds per byte of the state.
"""

from __future__ import annotations

import threading

#: What is new counts so much; three or four chunks make a measurement.
_NEW = 0.3
#: Encoding must be better by this much: it costs cores.
_WORTH = 0.9
#: While chunks go raw, one of so many is encoded to see how that would go. A sixty-fourth of the chunks at most five
#: times as expensive is a twentieth at worst, and hidden behind sending the others.
_LOOK_EVERY = 64


class GetPlanner:
    """For one data process; connections' threads ask and tell.

    Args:
        policy: as the config key `codec`.
        threads: that encode.
    """

    def __init__(self, policy: str, threads: int) -> None:
        self._policy = policy
        self._threads = threads
        self._lock = threading.Lock()
        self._connections = 0
        self._asked = 0
        #: Seconds per byte that was sent; seconds per raw byte of one thread; encoded bytes per raw byte.
        self._send: float | None = None
        self._encode: float | None = None
        self._shrunk: float | None = None

    def begin(self) -> None:
        """A connection is read over."""
        with self._lock:
            self._connections += 1

    def end(self) -> None:
        """It is not any more."""
        with self._lock:
            self._connections -= 1

    def choose(self) -> bool:
        """Whether to encode the next chunk."""
        if self._policy != "auto":
            return self._policy == "always"
        with self._lock:
            if self._send is None:
                return False
            self._asked += 1
            if self._encode is None or self._shrunk is None:
                return True
            encoding = self._encode * max(1, self._connections) / self._threads
            pays = max(encoding, self._send * self._shrunk) < _WORTH * self._send
            return pays or self._asked % _LOOK_EVERY == 0

    def sent(self, sent_bytes: int, seconds: float) -> None:
        """A connection sent so much in so long, waiting for the link included."""
        with self._lock:
            self._send = _mixed(self._send, seconds / sent_bytes)

    def encoded(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """A thread encoded so much in so long; `encoded_bytes` is `raw_bytes` where it did not shrink."""
        with self._lock:
            self._encode = _mixed(self._encode, seconds / raw_bytes)
            self._shrunk = _mixed(self._shrunk, encoded_bytes / raw_bytes)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (new - old)
