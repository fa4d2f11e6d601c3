"""How fast copies may go while others use the same network interface. Pure: every moment and figure is given.

The rule, in the words of the figures: what the interface carries at most is its **capacity**; what others sent at their
busiest of the last seconds is theirs, so that an all-reduce that comes once per step finds its place free; of the rest,
copies take what leaves some headroom. Should the interface be full nevertheless, copies halve at once and grow again
little by little (AIMD, as TCP's own control; Chiu and Jain 1989). That is the aim of scavenger transports (LEDBAT,
RFC 6817; TCP-LP), had from byte counts: delay says nothing where others run BBR, which keeps queues short, or where
CPUs are busy.

    rate = max(floor, min(grown slowly, HEADROOM * capacity - others' peak))

Most training is silent in turns: it computes, then exchanges. While others are silent (`gaps.py`) copies have all but
the headroom; while they are not, copies need no floor for what the gaps to come will carry, if they go on as they did:

    rate in a gap = HEADROOM * capacity
    floor elsewhere = floor - RELIED_ON * share of gaps * rate in a gap

The capacity is only seen while the interface is full, so there is a **look** when it is not known, or was seen long
ago: a moment in which copies are not held back. What drivers say of themselves is not believed: links are shaped
elsewhere.
The floor is what it takes to be done in time; it wins over everything but the operator's cap.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from .gaps import Gaps

#: Copies and others together aim at this share of the capacity.
HEADROOM = 0.9
#: From this share on the interface is full.
FULL_SHARE = 0.95
#: Others below this share of the capacity are chatter (heartbeats, logs, headers), not training.
CHATTER_SHARE = 0.05
#: Share of the capacity by which the rate may grow per second.
GROWTH_PER_S = 0.2
#: Others' busiest moment counts so long. Longer than most steps: all-reduces come once per step.
PEAK_S = 3.0
#: A capacity that was seen so long ago is looked for again.
CAPACITY_S = 60.0
LOOK_S = 0.3
#: Of what the gaps would carry, copies count on this share: the next ones may be shorter.
RELIED_ON = 0.7
#: Share of the capacity that copies keep while others speak and time is left: connections that the kernel lets send
#: nothing notice only late that they may again.
TRICKLE_SHARE = 0.005
#: Parts of these windows: bounds what is remembered.
_PARTS = 12


class WindowMax:
    """The largest of the values of the last `window_s` seconds, to within a twelfth of that time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._part_s = window_s / _PARTS
        #: (start of the part, largest value in it)
        self._parts: deque[tuple[float, float]] = deque(maxlen=_PARTS + 1)

    def add(self, now: float, value: float) -> None:
        """A value of this moment."""
        if self._parts and now - self._parts[-1][0] < self._part_s:
            start, largest = self._parts[-1]
            self._parts[-1] = (start, max(largest, value))
        else:
            self._parts.append((now, value))

    def at(self, now: float) -> float:
        """The largest; 0 when there is none."""
        while self._parts and now - self._parts[0][0] > self._window_s:
            self._parts.popleft()
        return max((value for _, value in self._parts), default=0.0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What copies may take together, in bytes per second, and why: see `PacingReport.reason`."""

    bytes_per_s: float
    reason: str


class InterfaceShare:
    """Decides for one interface, from one sample after the other."""

    def __init__(self) -> None:
        self._capacity = WindowMax(CAPACITY_S)
        self._others = WindowMax(PEAK_S)
        self._gaps = Gaps()
        self._rate = math.inf
        self._sampled_at: float | None = None
        #: Since when the look under way lasts; None: there is none.
        self._looking_since: float | None = None
        self._looked_at: float | None = None

    def capacity(self, now: float) -> float:
        """Bytes per second that the interface was seen to carry; 0: nothing lately."""
        return self._capacity.at(now)

    def others(self, now: float) -> float:
        """What others sent at their busiest of the last seconds, in bytes per second."""
        return self._others.at(now)

    def crowded(self, now: float) -> bool:
        """Whether others send so much that copies have to mind them."""
        return self._others.at(now) > CHATTER_SHARE * self._capacity.at(now)

    def notice(self, now: float, *, others: float) -> None:
        """Others' bytes per second in the last few milliseconds. Asked for while it is crowded."""
        self._gaps.notice(now, silent=others <= CHATTER_SHARE * self._capacity.at(now))

    def observe(self, now: float, *, own: float, others: float, putting: bool) -> None:
        """Bytes per second since the last sample, of all our lanes and of everybody else.

        Args:
            putting: copies were under way all that time and nothing else held them back.
        """
        since_s = 0.0 if self._sampled_at is None else max(0.0, now - self._sampled_at)
        self._sampled_at = now
        self._capacity.add(now, own + others)
        self._others.add(now, others)
        self._look(now, putting=putting)
        if not self.crowded(now):
            self._rate = math.inf
            return
        capacity = self._capacity.at(now)
        target = max(0.0, HEADROOM * capacity - self._others.at(now))
        grown = own if math.isinf(self._rate) else self._rate + GROWTH_PER_S * capacity * since_s
        if own + others >= FULL_SHARE * capacity:
            grown = min(grown, own / 2)
        self._rate = min(target, grown)

    def allowance(self, now: float, *, floor: float) -> Allowance:
        """What copies may take now. `floor`: bytes per second without which they are not done in time."""
        if not self.crowded(now) or self._looking_since is not None:
            return Allowance(math.inf, "none")
        capacity = self._capacity.at(now)
        in_gaps = HEADROOM * capacity
        if self._gaps.open_at(now):
            return Allowance(in_gaps, "traffic") if in_gaps > floor else Allowance(floor, "deadline")
        floor -= RELIED_ON * self._gaps.share * in_gaps
        rate = max(self._rate, TRICKLE_SHARE * capacity)
        return Allowance(floor, "deadline") if floor >= rate else Allowance(rate, "traffic")

    def _look(self, now: float, *, putting: bool) -> None:
        if not putting:
            self._looking_since = None  # whatever came of it: the next put may look again
        elif self._looking_since is not None:
            if now - self._looking_since >= LOOK_S:
                self._looking_since, self._looked_at = None, now
        elif self._looked_at is None or now - self._looked_at >= CAPACITY_S:
            self._looking_since = now
