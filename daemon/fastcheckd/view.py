"""The registry's view as a data process follows it: who is UP, which steps are kept.

The view is advice, never authority: it may lag. Acting on an old view is safe because steps and
epochs only grow; whatever decides (placement, commit, lookup) asks the leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from .identity import Identity
from .registry.client import RegistryClient

logger = logging.getLogger(__name__)


class ViewFollower:
    """Keeps the newest view and wakes those who wait for a change of it."""

    def __init__(self, registry: RegistryClient, identity: Identity) -> None:
        self.view = rpb.ClusterView()
        self._registry = registry
        self._identity = identity
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[rpb.ClusterView], Awaitable[None]]] = []

    def on_change(self, listener: Callable[[rpb.ClusterView], Awaitable[None]]) -> None:
        """Call `listener` with each new view."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow until cancelled."""
        async for view in self._registry.watch():
            self.view = view
            self._registry.use_voters(view.voter_records)
            self._identity.saw_epoch(view.epoch)
            self._changed.set()
            self._changed = asyncio.Event()
            for listener in self._listeners:
                try:
                    await listener(view)
                except Exception:
                    logger.exception("a view listener failed; it is called again with the next view")

    def node(self, node_id: str) -> rpb.NodeRecord | None:
        """The node's record in the newest view."""
        return next((n for n in self.view.nodes if n.node_id == node_id), None)

    def newest_step(self, job: str) -> int | None:
        """Newest committed step of a job that this view knows."""
        kept = next((j.kept_steps for j in self.view.jobs if j.job == job), None)
        return max(kept) if kept else None

    def kept_steps(self) -> dict[str, list[int]]:
        """Committed steps that are kept, per job."""
        return {j.job: list(j.kept_steps) for j in self.view.jobs}

    def is_gone(self, ref: pb.NodeRef) -> bool:
        """Whether the view says that this life of the node is over."""
        node = self.node(ref.node_id)
        if node is None or node.incarnation < ref.incarnation:
            return False  # the view is older than what we were told
        return node.incarnation > ref.incarnation or node.state == rpb.NODE_STATE_DOWN

    async def until_gone(self, ref: pb.NodeRef) -> None:
        """Return when the view says that this life of the node is over."""
        while not self.is_gone(ref):
            await self._changed.wait()
