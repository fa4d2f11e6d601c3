"""The moments in which others leave an interface alone, told from counts taken every few milliseconds. Pure.

Training speaks in bursts: it computes, then all ranks exchange, and the link is full and empty in turns. What fits into
the empty turns costs training nothing. `Foreign` tells others' bytes from ours at that resolution, `Gaps` whether there
is a gap now, and how much of the time was gap lately. What is made of it is decided in `interface_share.py`.
"""

from __future__ import annotations

import math

#: Others that are silent for so long leave a gap. Two looks: the middle of an exchange may pause for one.
GAP_S = 0.02
#: Of the gaps of about so many seconds the share is known: several steps of most training.
MEMORY_S = 5.0
#: From so many seconds of looking on the share is what was seen; before, all that was not is taken for busy.
BELIEVED_AFTER_S = 1.0
#: What was seen so long ago says nothing of now.
STALE_S = 0.1


class Foreign:
    """Others' bytes on an interface, from its counter and the count of our own lanes.

    The kernel counts our bytes when they enter the interface's queue and the interface's when they have left it, so the
    difference sinks while our queue grows and rises while it drains, although nobody else sent anything. Only what
    rises above where it has been before is others'. A queue is at most `queue_bytes` long: what the difference sinks
    further is an error of the counts (headers that are counted otherwise), and is forgotten.
    """

    def __init__(self) -> None:
        self._highest = -math.inf

    def sent(self, interface_bytes: float, own_bytes: float, queue_bytes: float) -> float:
        """Others' bytes since the last call; the first says 0."""
        difference = interface_bytes - own_bytes
        if math.isinf(self._highest):
            self._highest = difference
            return 0.0
        self._highest = min(self._highest, difference + queue_bytes)
        new = max(0.0, difference - self._highest)
        self._highest += new
        return new


class Gaps:
    """Whether others are silent, and for which share of the time they were. Moments are seconds of one clock."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._silent_since: float | None = None
        #: Seconds that were looked at, and those of them in gaps; both fade with age.
        self._seen_s = 0.0
        self._open_s = 0.0

    @property
    def share(self) -> float:
        """Part of the last seconds that copies could have had; 0 until one was seen.

        Looks come only while copies are under way, often for a second in many: faded sums know the share after the
        first of them, where a faded mean that begins at 0 would need several.
        """
        return self._open_s / max(self._seen_s, BELIEVED_AFTER_S)

    def open_at(self, now: float) -> bool:
        """Whether there is a gap now. One that was seen a while ago says nothing."""
        if self._at is None or self._silent_since is None or now - self._at > STALE_S:
            return False
        return self._at - self._silent_since >= GAP_S

    def notice(self, now: float, *, silent: bool) -> None:
        """Others have been silent since the last call, or not."""
        last, self._at = self._at, now
        if last is not None and now - last > STALE_S:
            last = self._silent_since = None
        if not silent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now if last is None else last
        if last is not None and now > last:
            seconds, kept = now - last, math.exp(-(now - last) / MEMORY_S)
            self._seen_s = self._seen_s * kept + seconds
            self._open_s = self._open_s * kept + (seconds if self.open_at(now) else 0.0)
