"""The registry's view as a data process follows it: who is UP, which steps are kept.

The view is advice, never authority: it may lag. Acting on an old view is safe because epochs and sessions only grow,
and a session's steps too; whatever decides (placement, commit, lookup) asks the leader. Only while no leader answers
it says where the nodes are; for that the newest one is kept in a file across restarts of this process. What the file
holds is never a reason to drop or to commit anything; one that is damaged, too large or another cluster's is as good as
none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import check_name
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from .config import Config, split_address
from .digests import DIGEST_BYTES, chunk_digest
from .errors import CorruptError, StoreError
from .identity import NodeLife
from .registry.client import RegistryClient
from .registry.model import LOCAL
from .store import directory as files
from .store.retention import Kept

logger = logging.getLogger(__name__)


class ViewFollower:
    """Keeps the newest view and wakes those who wait for a change of it."""

    def __init__(self, registry: RegistryClient, identity: NodeLife, last: LastView | None = None) -> None:
        """`last`: where the newest view is kept; what an earlier life kept there is read at once."""
        self._view = rpb.ClusterView()
        self._jobs: dict[str, rpb.JobView] = {}
        self._last = last
        self._remembered = last.read() if last is not None else None
        self._registry = registry
        self._identity = identity
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[rpb.ClusterView], Awaitable[None]]] = []

    @property
    def view(self) -> rpb.ClusterView:
        """The newest that this process has seen; empty before the first."""
        return self._view

    @view.setter
    def view(self, view: rpb.ClusterView) -> None:
        self._view = view
        # By name: it is asked of every rank and every save, and a cluster may know thousands of jobs.
        self._jobs = {job.job: job for job in view.jobs}

    def on_change(self, listener: Callable[[rpb.ClusterView], Awaitable[None]]) -> None:
        """Call `listener` with each new view."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow until cancelled."""
        async for view in self._registry.watch():
            if self._last is not None and not self._last.is_ours(view):
                logger.warning("ignoring a view of another cluster, %r", view.cluster_id[:128])
                continue
            moved_on = view.epoch != self.view.epoch or _owners(view) != _owners(self.view)
            self.view = view
            self._registry.use_voters(view.voter_records)
            self._identity.saw_epoch(view.epoch)
            self._changed.set()
            self._changed = asyncio.Event()
            if moved_on and self._last is not None:
                try:
                    await asyncio.to_thread(self._last.keep, view)
                except OSError as error:
                    logger.warning("cannot keep the view of the cluster for a restart: %s", error)
            for listener in self._listeners:
                try:
                    await listener(view)
                except Exception:
                    logger.exception("a view listener failed; it is called again with the next view")

    def members(self) -> rpb.ClusterView:
        """The newest view of this process, or else the last one of an earlier life: whom to ask without a registry."""
        if not self.view.version and self._remembered is not None:
            return self._remembered
        return self.view

    def node(self, node_id: str) -> rpb.NodeRecord | None:
        """The node's record in the newest view."""
        return next((n for n in self.view.nodes if n.node_id == node_id), None)

    def newest_step(self, job: str) -> int | None:
        """Newest committed step of a job that this view knows."""
        known = self._jobs.get(job)
        return max(known.kept_steps, default=None) if known is not None else None

    def retention(self) -> dict[str, Kept]:
        """What of each job is needed."""
        return {j.job: Kept.of(j) for j in self.view.jobs}

    def speaks_of(self, job: str, session: int) -> bool:
        """Whether this view is not older than the session: else it may show steps that were deleted before it."""
        known = self.next_session(job)
        return not known or session < known

    def next_session(self, job: str) -> int:
        """All sessions of the job below it were open before this view; 0: it does not know."""
        known = self._jobs.get(job)
        return known.next_session if known is not None else 0

    def is_void(self, job: str, session: int) -> bool:
        """Whether nothing that the session made can be committed any more."""
        known = self._jobs.get(job)
        return known is not None and session < known.void_below_session

    def kept_steps(self) -> dict[str, list[int]]:
        """Committed steps that are kept, per job."""
        return {j.job: list(j.kept_steps) for j in self.view.jobs}

    def why_not_up(self, ref: pb.NodeRef) -> str:
        """Why this life of the node may not be UP, by the newest view; empty: it is."""
        node = self.node(ref.node_id)
        if node is None or node.incarnation != ref.incarnation:
            return "no view of the registry with this life of the node has come yet"
        if node.state == rpb.NODE_STATE_UP:
            return ""
        state = rpb.NodeState.Name(node.state).removeprefix("NODE_STATE_")
        return f"the registry calls it {state}" + (f": {node.reason}" if node.reason else "")

    def owner(self, job: str) -> str | None:
        """Whose a job is; None: no view here names it. Without a registry, the last view of an earlier life counts."""
        return next((j.owner or LOCAL for j in self.members().jobs if j.job == job), None)

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


def _owners(view: rpb.ClusterView) -> dict[str, str]:
    return {job.job: job.owner or LOCAL for job in view.jobs}


FILE_NAME = "last-view"
#: 4096 nodes and 4096 jobs take far less.
FILE_BYTES_MAX = 16 << 20
NODES_MAX = 4096


class LastView:
    """One node's file. All methods block."""

    def __init__(self, config: Config) -> None:
        self._cluster_id = config.cluster_id
        self._path = config.state_dir / FILE_NAME

    def is_ours(self, view: rpb.ClusterView) -> bool:
        """Whether a view is of this node's cluster and no other that took over a dead voter's address."""
        return view.cluster_id == self._cluster_id

    def read(self) -> rpb.ClusterView | None:
        """What was kept last, if it can be used."""
        try:
            return self._parse(files.read_bounded(self._path, FILE_BYTES_MAX))
        except StoreError as error:
            if self._path.exists():
                logger.warning("the kept view of the cluster is not used: %s", error)
            return None

    def keep(self, view: rpb.ClusterView) -> None:
        """Take the place of what was kept, atomically.

        Raises:
            OSError: it cannot be written; what was kept stays.
        """
        body: bytes = view.SerializeToString()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = self._path.with_name(f"{FILE_NAME}-{secrets.token_hex(8)}.tmp")
        try:
            files.write_new(staged, body + chunk_digest(body))
            os.replace(staged, self._path)  # noqa: PTH105  as everywhere else for atomic replacement
        finally:
            with contextlib.suppress(FileNotFoundError):
                staged.unlink()

    def _parse(self, data: bytes) -> rpb.ClusterView:
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if chunk_digest(body) != digest:
            raise CorruptError(f"{self._path} does not match the digest at its end")
        view = rpb.ClusterView()
        try:
            view.ParseFromString(body)
            if view.cluster_id != self._cluster_id:
                raise ValueError(f"it is of cluster {view.cluster_id[:128]!r}")
            if len(view.nodes) > NODES_MAX:
                raise ValueError(f"it names {len(view.nodes)} nodes")
            for node in view.nodes:
                check_name("node_id", node.node_id)
                for address in (node.data_address, node.lane_address):
                    split_address(address)
        except (DecodeError, ValueError) as error:
            raise CorruptError(f"{self._path} is not valid: {error}") from None
        return view
