"""For how long this node may act as a holder, from the voters' answers to its heartbeats. Pure.

A lease lasts `lease_s` from the moment the agent *sent* the newest heartbeat that a majority of the voters has
answered. Any majority that later says "nothing heard for `down_after_s`" shares a voter with it, and that one got
the heartbeat after it was sent: so the lease is over before the node may be called DOWN for silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

#: Heartbeats under way per voter; an answer that is later than so many is worth nothing any more.
_SENT_MAX = 64


@dataclass
class _Voter:
    sent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SENT_MAX))
    renewed_at: float | None = None
    answered_at: float | None = None


class LeaseClock:
    """The lease of one life.

    Args:
        voters: node ids of all voters.
        lease_s: from sending to the end of the lease.
    """

    def __init__(self, voters: Collection[str], lease_s: float) -> None:
        self._voters = {node_id: _Voter() for node_id in voters}
        self._majority = len(self._voters) // 2 + 1
        self._lease_s = lease_s

    def sent(self, voter: str, seq: int, now: float) -> None:
        """A heartbeat is about to leave. Numbers grow, also from one stream to the next."""
        if voter in self._voters:
            self._voters[voter].sent.append((seq, now))

    def answered(self, voter: str, lease_seq: int, now: float) -> None:
        """A voter's answer. `lease_seq`: the heartbeat that it renews the lease for; 0: it renews nothing."""
        known = self._voters.get(voter)
        if known is None:
            return
        known.answered_at = now
        while known.sent and known.sent[0][0] <= lease_seq:
            seq, at = known.sent.popleft()
            if seq == lease_seq:
                known.renewed_at = at

    def deadline(self) -> float | None:
        """When the lease ends; None: there has been none."""
        return self._agreed([v.renewed_at for v in self._voters.values()])

    def has_quorum(self, now: float) -> bool:
        """Whether a majority of the voters has answered lately."""
        until = self._agreed([v.answered_at for v in self._voters.values()])
        return until is not None and now < until

    def _agreed(self, times: list[float | None]) -> float | None:
        """`lease_s` after the newest time that a majority has reached."""
        newest = sorted((at for at in times if at is not None), reverse=True)
        return None if len(newest) < self._majority else newest[self._majority - 1] + self._lease_s
