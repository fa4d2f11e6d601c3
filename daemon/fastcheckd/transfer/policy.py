"""Raw or encoded: decided by formula from measured rates, never by trial. Pure.

A share f of a shard's bytes is encoded at `encode` bytes/s to a `ratio`-th while the rest goes as it is over a link of
`link` bytes/s. Encoding overlaps sending, so the shard takes

    max(f / encode, (1 - f + f / ratio) / link)        seconds per byte,

which is least where both are equal: f = 1 / (link / encode + 1 - 1 / ratio), at most 1. A slow link has everything
encoded, a fast one as much as the cores keep up with.

`encode` is the rate of one thread times the cores that were idle while the step before was sent: where sending itself,
or the trainer, already takes all cores (loopback), encoding only costs. Rate and ratio come from a small sample of the
chunks that went raw, encoded after the commit. A node that encodes for others decodes for others, too: the share must
still pay if the same cores do both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

#: Encoding must promise to be faster by this factor: it costs cores.
SPEEDUP_MIN = 1.05
#: Also if the same cores have to decode as much, for others: that takes this part of encoding's time.
DECODE_SHARE = 0.7
#: A shard of fewer bytes vanishes in socket buffers: how long it took says nothing about the link.
LINK_BYTES_MIN = 8 << 20
#: Share of a shard's chunks that a sample encodes, at least one chunk.
SAMPLE_SHARE = 0.01
#: A route that goes raw is sampled again after so many steps.
SAMPLE_EVERY = 50
#: Weight of the newest measurement.
_NEWEST = 0.5
#: Routes remembered; beyond, the one not used for longest is forgotten.
ROUTES_MAX = 4096
#: Multiples of it fill [0, 1) evenly, those of every second or fourth chunk as well.
_TURN = 2**0.5 - 1
#: A restore's chunks go raw until something is known; then one of so many is encoded to keep the figures fresh.
_RESTORE_LOOK_EVERY = 64
_RESTORE_WORTH = 0.9


def speedup(fraction: float, *, link: float, encode: float, ratio: float) -> float:
    """How much sooner than raw a shard is sent of which a share is encoded, by the formula above."""
    return 1 / (link * max(fraction / encode, (1 - fraction + fraction / ratio) / link))


def best_fraction(*, link: float, encode: float, ratio: float) -> float:
    """Share of the bytes to encode, by the formula above.

    Args:
        link, encode: bytes per second, `link` above 0.
        ratio: raw over encoded bytes of what is encoded, above 0.
    """
    if ratio <= 1 or encode <= 0:
        return 0.0
    return min(1.0, 1 / (link / encode + 1 - 1 / ratio))


def is_chosen(index: int, fraction: float) -> bool:
    """Whether a chunk is among the share to be encoded. The same answer every time."""
    return index * _TURN % 1 < fraction


@dataclass
class _Route:
    """What is known of a shard's way to its holders."""

    link: float | None = None
    ratio: float | None = None
    idle_cores: float | None = None
    sample_age: int = 0


class ReplicationPolicy:
    """Shares to encode of the shards that a data process replicates. Used on the event loop.

    Args:
        setting: the config key `codec`.
        threads: that encode at most.
    """

    def __init__(self, setting: str, threads: int) -> None:
        self._setting = setting
        self._threads = threads
        #: Bytes per second of one thread.
        self._encode: float | None = None
        self._routes: OrderedDict[Hashable, _Route] = OrderedDict()

    def fraction(self, route: Hashable, *, sharing: int) -> float:
        """Share of a shard's changed bytes to encode; `sharing` shards are sent at the same time, this one included."""
        if self._setting != "auto":
            return 1.0 if self._setting == "always" else 0.0
        known = self._route(route)
        if None in {known.link, known.ratio, known.idle_cores, self._encode}:
            return 0.0
        assert known.link and known.ratio and known.idle_cores is not None and self._encode
        cores = min(self._threads, known.idle_cores) / max(1, sharing)
        encode = self._encode * cores
        fraction = best_fraction(link=known.link, encode=encode, ratio=known.ratio)
        if not fraction:
            return 0.0
        with_decoding = encode / (1 + DECODE_SHARE)
        gain = speedup(fraction, link=known.link, encode=with_decoding, ratio=known.ratio)
        return fraction if gain >= SPEEDUP_MIN else 0.0

    def wants_sample(self, route: Hashable) -> bool:
        """Whether a step that went raw should be sampled, after its commit."""
        if self._setting != "auto":
            return False
        known = self._route(route)
        return known.ratio is None or known.sample_age >= SAMPLE_EVERY

    def sent(
        self, route: Hashable, *, sent_bytes: int, busy_s: float, seconds: float, idle_cores: float
    ) -> None:
        """A shard was replicated.

        The link carries at least what it carried in all the time that this took. It carries no more than what went
        while a connection was sending: a link with pauses empties the sockets' buffers, and looks faster than it is.
        What was known before is corrected to lie between both.

        Args:
            sent_bytes: on the lane, to all holders.
            busy_s: in which at least one of its connections was sending.
            seconds: that it took.
            idle_cores: that nothing else used meanwhile; what encoding used counts as idle.
        """
        known = self._route(route)
        known.sample_age += 1
        known.idle_cores = _blend(known.idle_cores, idle_cores)
        if sent_bytes >= LINK_BYTES_MIN and busy_s > 0:
            least, most = sent_bytes / max(seconds, busy_s), sent_bytes / busy_s
            known.link = most if known.link is None else min(max(known.link, least), most)

    def encoded(self, route: Hashable, *, raw_bytes: int, encoded_bytes: int, cpu_s: float) -> None:
        """Chunks were encoded against their base, for holders or as a sample."""
        if raw_bytes <= 0 or cpu_s <= 0:
            return
        known = self._route(route)
        known.sample_age = 0
        self._encode = _blend(self._encode, raw_bytes / cpu_s)
        known.ratio = _blend(known.ratio, max(1.0, raw_bytes / max(1, encoded_bytes)))

    def _route(self, route: Hashable) -> _Route:
        found = self._routes.setdefault(route, _Route())
        self._routes.move_to_end(route)
        if len(self._routes) > ROUTES_MAX:
            self._routes.popitem(last=False)
        return found


class RestorePolicy:
    """Whether what restores read from here is worth encoding without a base. Thread-safe.

    Encoding overlaps sending, so a chunk takes whichever is longer: a codec thread's time, shared by all connections,
    or the link's for fewer bytes. Compared is per connection, in seconds per byte of the state.

    Args:
        setting: the config key `codec`.
        threads: that encode.
    """

    def __init__(self, setting: str, threads: int) -> None:
        self._setting = setting
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
        if self._setting != "auto":
            return self._setting == "always"
        with self._lock:
            if self._send is None:
                return False
            self._asked += 1
            if self._encode is None or self._shrunk is None:
                return True
            encoding = self._encode * max(1, self._connections) / self._threads
            pays = max(encoding, self._send * self._shrunk) < _RESTORE_WORTH * self._send
            return pays or self._asked % _RESTORE_LOOK_EVERY == 0

    def sent(self, sent_bytes: int, seconds: float) -> None:
        """A connection sent so much in so long, waiting for the link included."""
        with self._lock:
            self._send = _smooth(self._send, seconds / sent_bytes)

    def encoded(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """A thread encoded so much in so long; `encoded_bytes` is `raw_bytes` where it did not shrink."""
        with self._lock:
            self._encode = _smooth(self._encode, seconds / raw_bytes)
            self._shrunk = _smooth(self._shrunk, encoded_bytes / raw_bytes)


def _blend(known: float | None, sample: float) -> float:
    return sample if known is None else (1 - _NEWEST) * known + _NEWEST * sample


def _smooth(known: float | None, sample: float) -> float:
    return sample if known is None else known + 0.3 * (sample - known)
