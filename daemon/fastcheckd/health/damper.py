"""Who comes back again and again, and for how long it then gets nothing new. Pure.

A node that crashes as soon as it gets work would otherwise take copies, lose them, and take the next ones. The
memory is this voter's own; a new leader has kept its own since it saw the nodes come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

#: Returns within this time count.
WINDOW_S = 600.0
#: Two returns are a bad day; the third one is a habit.
FREE_RETURNS = 2
DAMPED_S_MIN = 10.0
DAMPED_S_MAX = 300.0
_RETURNS_MAX = 16


class Returns:
    """The returns of every node of the cluster. A node's first life is none."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._at: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}
        self._left: frozenset[str] = frozenset()

    def members(self, lives: Collection[tuple[str, int]], now: float, left: Collection[str] = ()) -> None:
        """The members now, DOWN ones too: a higher incarnation of a known node is a return, others are forgotten.

        Who comes back after it had `left` in good order was restarted by somebody: that is no return.
        """
        for node_id, incarnation in lives:
            if incarnation > self._newest.get(node_id, incarnation) and node_id not in self._left:
                self._returned(node_id, now)
        self._left = frozenset(left)
        self._newest = dict(lives)
        self._at = {node_id: at for node_id, at in self._at.items() if node_id in self._newest}
        self._until = {n: until for n, until in self._until.items() if n in self._newest and until > now}

    def _returned(self, node_id: str, now: float) -> None:
        at = self._at.setdefault(node_id, deque(maxlen=_RETURNS_MAX))
        at.append(now)
        while now - at[0] > WINDOW_S:
            at.popleft()
        if (beyond := len(at) - FREE_RETURNS) > 0:
            until = now + min(DAMPED_S_MIN * 2 ** (beyond - 1), DAMPED_S_MAX)
            self._until[node_id] = max(until, self._until.get(node_id, until))

    def damped_s(self, node_id: str, now: float) -> float:
        """How much longer the node gets nothing new; 0: it is not damped."""
        return min(max(0.0, self._until.get(node_id, now) - now), DAMPED_S_MAX)

    def count(self, node_id: str) -> int:
        """Returns that still count."""
        return len(self._at.get(node_id, ()))
