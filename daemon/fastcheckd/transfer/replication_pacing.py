"""Holds back what this node sends for its saves: to the operator's cap, for the trainer's traffic, for restores.

A gate before each chunk keeps the rate in the long run, and the kernel spaces the packets of a chunk. Samples of the
interface's counters, less what our own lanes moved, go to `interface_share.py`, which decides. Nothing here knows of
shards or steps: whoever sends says how many bytes are left and when they are due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from fastcheck_proto.v1 import peer_pb2

from ..counters import Counters
from .channel import Channel
from .gaps import Foreign
from .interface_share import Allowance, InterfaceShare
from .lane_meter import WIRE_OVERHEAD, LaneMeter, WireBytes
from .pacing import TRICKLE_SHARE, Gate, Pacer
from .sockets import PATIENCE

logger = logging.getLogger(__name__)

#: Between two looks at the counters, while copies are under way or others are there; and while neither is. Others'
#: busiest moment has to be known before a copy begins: over a second a burst and the silence around it are half one.
SAMPLE_S = 0.1
#: While copies have to mind others, for gaps: what others lose when they begin to speak again is about so long.
GLANCE_S = 0.01
IDLE_SAMPLE_S = 1.0
#: What a cap lets through at once, as seconds of its rate.
_BURST_S = 0.1
#: A connection may be this much above its share: others of the same copy may have less to send.
_SHARE_SLACK = 1.25
#: An overdue copy has at least this long, so that its rate is a number.
_LEFT_S_MIN = 0.05
#: What connections of ours may have in the interface's queue, at most: the kernel's limit for each is about this.
_QUEUE_BYTES = 512 << 10


class Course:
    """A copy on its way: how much of it is left. Thread-safe."""

    def __init__(self, raw_bytes: int, due: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._left_bytes = raw_bytes
        self._raw_bytes = 0
        self._sent_bytes = 0
        self._due = due

    def sent(self, *, raw_bytes: int, sent_bytes: int) -> None:
        """A chunk of so many bytes took so many on the lane."""
        with self._lock:
            self._left_bytes = max(0, self._left_bytes - raw_bytes)
            self._raw_bytes += raw_bytes
            self._sent_bytes += sent_bytes

    def needs_bytes_per_s(self, now: float) -> float:
        """Without so much it is late, should the rest shrink like what was sent."""
        with self._lock:
            shrunk = self._sent_bytes / self._raw_bytes if self._raw_bytes else 1.0
            left_bytes = self._left_bytes * min(1.0, shrunk)
        return left_bytes / self.left_s(now)

    def left_s(self, now: float) -> float:
        """The time that is left for it."""
        return max(_LEFT_S_MIN, self._due() - now)


class ReplicationPacing:
    """One per data process; a `ChunkGate` for the streams of copies.

    Args:
        cap_bytes_per_s: 0: none.
        interface: its counters tell of others' traffic; empty: copies yield to nobody.
        restoring: whether a load is under way here or served from here; may be asked from any thread.
        chunk_bytes: size of most pieces.
        transfer_timeout_s: a connection that is silent for so long is held to be dead.
        counted: (bytes sent, bytes received) of an interface since it came up; None: it is gone.
    """

    def __init__(
        self,
        *,
        cap_bytes_per_s: int,
        interface: str,
        restoring: Callable[[], bool],
        meter: LaneMeter,
        counters: Counters,
        chunk_bytes: int,
        transfer_timeout_s: float,
        counted: Callable[[str], tuple[int, int] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cap = float(cap_bytes_per_s) or math.inf
        self._interface = interface
        self._restoring = restoring
        self._meter = meter
        self._counted = counted or interface_bytes
        self._clock = clock
        burst_bytes = chunk_bytes if math.isinf(self._cap) else max(chunk_bytes, int(self._cap * _BURST_S))
        self._gate = Gate(
            Pacer(
                self._cap,
                burst_bytes=burst_bytes,
                trickle_s=TRICKLE_SHARE * transfer_timeout_s,
                starve_s=transfer_timeout_s / 2,
            ),
            restoring,
            paused=lambda: counters.add("copies_for_restore"),
            held_up=lambda: counters.add("copies_paced"),
            clock=clock,
        )
        self._chunk_bytes = chunk_bytes
        # Half of what the other end's answer is waited for, as long as bytes still arrive there.
        self._drain_s = transfer_timeout_s * PATIENCE / 2
        self._yielding = InterfaceShare()
        self._lock = threading.Lock()
        self._lanes: set[Channel] = set()
        self._courses: set[Course] = set()
        self._putting = asyncio.Event()
        self._allowance = Allowance(self._cap, "none" if math.isinf(self._cap) else "cap")
        #: The last sample: when, what the interface had sent, what our lanes had.
        self._last: tuple[float, int, WireBytes] | None = None
        #: For glances: the moment of the last one, and what tells others' bytes from ours.
        self._glanced_at = 0.0
        self._foreign = Foreign()

    # As a gate, asked by the threads of copies.

    def begin(self, stream: object) -> None:
        """A connection of a copy begins."""
        self._gate.begin(stream)
        if isinstance(stream, Channel):
            with self._lock:
                self._lanes.add(stream)
            self._limit_lanes()

    def end(self, stream: object) -> None:
        """It has ended."""
        self._gate.end(stream)
        if isinstance(stream, Channel):
            with self._lock:
                self._lanes.discard(stream)
            self._limit_lanes()

    def wait(self, stream: object, size_bytes: int, still_wanted: Callable[[], None]) -> None:
        """Return when the next chunk may go; `still_wanted` raises when it need not any more."""
        self._gate.wait(stream, size_bytes, still_wanted)

    # On the event loop.

    @contextlib.contextmanager
    def replicating(self, raw_bytes: int, due: Callable[[], float] | None = None) -> Iterator[Course]:
        """While a copy lasts that should be done at `due()`, on this object's clock; None: no matter when."""
        course = Course(raw_bytes, due or (lambda: math.inf))
        self._courses.add(course)
        self._putting.set()
        try:
            yield course
        finally:
            self._courses.discard(course)
            if not self._courses:
                self._putting.clear()

    async def run(self) -> None:
        """Look at the traffic, for as long as the process lives."""
        if not self._interface:
            await asyncio.Event().wait()
        while True:
            self.sample()
            if self._courses:
                await self._glance_for(SAMPLE_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.idle_s()):
                    await self._putting.wait()

    def idle_s(self) -> float:
        """How long to wait for the next sample while there are no copies."""
        return SAMPLE_S if self._yielding.crowded(self._clock()) else IDLE_SAMPLE_S

    async def _glance_for(self, seconds: float) -> None:
        """Let time pass; where others are on the interface, look whether they are silent every now and then."""
        until = self._clock() + seconds
        while (left_s := until - self._clock()) > 0:
            if not self._yielding.crowded(self._clock()):
                await asyncio.sleep(left_s)
                return
            await asyncio.sleep(min(left_s, GLANCE_S))
            self.glance()

    def sample(self) -> None:
        """Look at the counters once, and go by what they say."""
        counted = self._counted(self._interface)
        if counted is None:
            self._last = None
            return
        now, own = self._clock(), self._meter.total()
        last, self._last = self._last, (now, counted[0], own)
        # A counter that has gone back is one of an interface that was taken down and up.
        if last is None or now <= last[0] or counted[0] < last[1]:
            self._foreign = Foreign()
            return
        seconds = now - last[0]
        carried = (counted[0] - last[1]) / seconds
        # What has not left the interface's queue yet is not carried: else it would seem faster than it is.
        own_rate = min(carried, (own.sent - last[2].sent) * WIRE_OVERHEAD / seconds)
        others = carried - own_rate
        restoring = self._restoring()
        self._yielding.observe(
            now, own=own_rate, others=others, putting=bool(self._courses) and not restoring
        )
        self._decide(now)

    def glance(self) -> None:
        """Look whether others are silent at this moment, between two samples."""
        counted = self._counted(self._interface)
        if counted is None:
            return
        now, own = self._clock(), self._meter.total()
        seconds, self._glanced_at = now - self._glanced_at, now
        others = self._foreign.sent(counted[0], own.sent * WIRE_OVERHEAD, _QUEUE_BYTES)
        if not 0 < seconds <= SAMPLE_S:
            return  # the first one for a while says nothing of this moment
        self._yielding.notice(now, others=others / seconds)
        self._decide(now)

    def _decide(self, now: float) -> None:
        self._allow(self._yielding.allowance(now, floor=self._floor(now)))

    def _floor(self, now: float) -> float:
        """Bytes per second without which a copy is late. What was handed to the kernel is not there yet."""
        if not self._courses:
            return 0.0
        with self._lock:
            waiting_bytes = sum(lane.waiting_bytes() for lane in self._lanes)
        soonest_s = min(course.left_s(now) for course in self._courses)
        return waiting_bytes / soonest_s + sum(course.needs_bytes_per_s(now) for course in self._courses)

    def report(self) -> peer_pb2.PacingReport:
        """For people: what holds copies back now, or would if there were any."""
        now = self._clock()
        allowed = self._allowance
        return peer_pb2.PacingReport(
            bytes_per_s=0 if math.isinf(allowed.bytes_per_s) else int(allowed.bytes_per_s),
            reason="restore" if self._restoring() else allowed.reason,
            foreign_bytes_per_s=int(self._yielding.others(now)),
            capacity_bytes_per_s=int(self._yielding.capacity(now)),
        )

    def _allow(self, allowance: Allowance) -> None:
        if allowance.bytes_per_s >= self._cap and not math.isinf(self._cap):
            allowance = Allowance(self._cap, "cap")
        if allowance.bytes_per_s == self._allowance.bytes_per_s:
            self._allowance = allowance
            return
        if allowance.reason != self._allowance.reason:
            logger.debug("copies: %s, %.3g bytes/s", allowance.reason, allowance.bytes_per_s)
        self._allowance = allowance
        self._gate.set_rate(max(1.0, allowance.bytes_per_s))
        self._limit_lanes()

    def _limit_lanes(self) -> None:
        """Have the kernel space the packets, or a chunk would leave all at once."""
        with self._lock:
            share = _SHARE_SLACK * self._allowance.bytes_per_s / max(1, len(self._lanes))
            for lane in self._lanes:
                # What was handed over at a higher rate, and one chunk more, must not seem dead to the other end.
                alive = (lane.waiting_bytes() + self._chunk_bytes) / self._drain_s
                lane.limit(max(share, alive))


def interface_bytes(name: str) -> tuple[int, int] | None:
    """What an interface has sent and received since it came up; None when there is none of that name."""
    found = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
    return None if found is None else (found.bytes_sent, found.bytes_recv)
