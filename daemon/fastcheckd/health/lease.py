"""The node's lease as its data process knows it: the gate before everything that makes it a holder.

The agent renews it over the Unix socket with a deadline on the machine's monotonic clock. So a stopped agent, a
stopped data process and a cut network all end the same way: time passes the deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..errors import NoLeaseError

#: How long a call waits for a lease before it is refused: a renewal that is on its way comes sooner.
LEASE_WAIT_S = 1.0


class LeaseHolder:
    """Owned by the event loop's thread; `held`, `require` and `has_quorum` may be asked from any thread.

    Args:
        incarnation: this node's life as the data process knows it; a lease of another life is none.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: Callable[[], int],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._clock_ns = clock_ns
        #: Life and deadline, replaced together.
        self._lease = (0, 0)
        self._has_quorum = False
        self._renewed = asyncio.Event()

    def renew(self, incarnation: int, deadline_ns: int, *, has_quorum: bool) -> None:
        """What the agent says now."""
        self._lease = (incarnation, deadline_ns)
        self._has_quorum = has_quorum
        self._renewed.set()
        self._renewed = asyncio.Event()

    @property
    def has_quorum(self) -> bool:
        """Whether a majority of the voters answered this node, as the agent said last."""
        return self._has_quorum

    def held(self, now_ns: int | None = None) -> bool:
        """Whether this node has its lease."""
        incarnation, deadline_ns = self._lease
        now_ns = self._clock_ns() if now_ns is None else now_ns
        return 0 < incarnation == self._incarnation() and now_ns < deadline_ns

    def require(self) -> None:
        """Return if this node has its lease.

        Raises:
            NoLeaseError: it has none.
        """
        if not self.held():
            raise NoLeaseError(
                f"node {self._node_id} has no lease: a majority of the voters has not answered it lately, and it "
                "may have been declared DOWN; try again shortly, or use another node"
            )

    async def until_held(self, timeout_s: float = LEASE_WAIT_S) -> None:
        """Return when this node has its lease.

        Raises:
            NoLeaseError: it has none within `timeout_s`.
        """
        if self.held():
            return
        try:
            async with asyncio.timeout(timeout_s):
                while not self.held():
                    await self._renewed.wait()
        except TimeoutError:
            self.require()
