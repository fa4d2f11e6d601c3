"""Who this data process speaks as: the node's current life and the newest membership it has seen.

The agent assumes an incarnation from the registry and tells the data process; the registry's view
raises the epoch. Both only ever grow, so whatever compares with them can be fenced by them.
"""

from __future__ import annotations

import asyncio

from fastcheck_proto.v1 import common_pb2 as pb

from .errors import NoQuorumError

#: The registry knows that a life is over before the node does, which then has to be started or to register again.
NEXT_LIFE_S = 2.0


class NodeLife:
    """This node's life as its data process knows it. Owned by the event loop's thread."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        #: 0 until the agent has registered the node.
        self.incarnation = 0
        self.epoch = 0
        self._known = asyncio.Event()
        self._changed = asyncio.Event()

    async def until_known(self, timeout_s: float) -> None:
        """Return once the node is registered.

        Raises:
            NoQuorumError: it is not after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._known.wait()
        except TimeoutError:
            raise NoQuorumError(
                f"node {self.node_id} is not registered yet: the registry has no leader that answers, "
                "or the node's agent is still starting"
            ) from None

    def assume(self, incarnation: int) -> bool:
        """Take a newer incarnation; an older one is ignored. Returns whether it changed."""
        if incarnation <= self.incarnation:
            return False
        self.incarnation = incarnation
        self._known.set()
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    async def outlives(self, ref: pb.NodeRef) -> bool:
        """Whether the node is in a later life than `ref`, or soon begins one: a call that failed with
        IncarnationOverError is then worth repeating.
        """
        try:
            async with asyncio.timeout(NEXT_LIFE_S):
                while self.incarnation <= ref.incarnation:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def saw_epoch(self, epoch: int) -> None:
        """Remember the newest epoch."""
        self.epoch = max(self.epoch, epoch)

    def ref(self) -> pb.NodeRef:
        """This life, for the wire."""
        return pb.NodeRef(node_id=self.node_id, incarnation=self.incarnation)
