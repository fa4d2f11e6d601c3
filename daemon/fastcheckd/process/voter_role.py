"""A node's part in the vote: which voters it goes by, and its own registry process while it is one.

    configured ──▶ remembered (the registry names others) ──▶ ...
                        │ it names this node                        │ it names this node no more
    asked to join ──────▼──────▶ registry process runs ─────────────▼──▶ and is stopped

The registry process takes its voters from its log; here it is only decided whether there is one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence

from ..config import Config, Voter
from ..errors import ConfigError, InvalidRequestError
from ..log import Episode
from ..registry.known_voters import (
    joining_file,
    read_voters,
    voters_file,
    was_decided,
    with_remembered_voters,
    with_voters,
    write_voters,
)
from ..registry.raft.disk import sync_directory, write_file
from ..registry.raft.membership import voter_message
from ..registry.raft.voter_folder import make_private, read_marker, registry_folder
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

OnFailure = Callable[[Exception], None]


class VoterRole:
    """Use it from one event loop.

    Args:
        config: as the operator wrote it.
        supervisor: has a registry process run, or ended.
        on_voters: told the voters when they have become others.
        on_fatal: told when the registry process of a node that is a voter cannot start as configured.
    """

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        on_voters: Callable[[Sequence[Voter]], None],
        on_fatal: OnFailure,
    ) -> None:
        self._on_fatal = on_fatal
        self._configured = config
        self._supervisor = supervisor
        self._on_voters = on_voters
        self._lock = asyncio.Lock()
        #: With the newest voters that this node has heard of.
        self.config = with_remembered_voters(config)
        self._seen = self._signature()
        self._unread = Episode(logger, "this node stays with the voters that it knew", level=logging.ERROR)
        #: What the registry process is that was asked for; None: there is to be none.
        self._running: Voter | None = None

    @property
    def is_voter(self) -> bool:
        """Whether the registry names this node."""
        return self.config.own_voter is not None

    @property
    def runs(self) -> bool:
        """Whether this node is to run a registry process."""
        return self._running is not None

    def start(self) -> None:
        """Have a registry process run if there is to be one; one that an earlier agent asked for goes on then."""
        if self.is_voter:
            self._run(self.config, self._on_fatal)
        elif (voters := read_voters(joining_file(self.config), self.config.cluster_id)) is not None:
            self._run(with_voters(self.config, voters), self._not_started)
        if not self.runs:
            self._supervisor.drop_registry()

    def _not_started(self, error: Exception) -> None:
        """A node that was only asked to be a voter goes on without; asked again, it tries again."""
        logger.error("this node does not become a voter: %s", error)
        self._running = None

    def _run(self, config: Config, on_failure: OnFailure) -> None:
        folder = registry_folder(config)
        if (
            len(config.effective_voters) > 1
            and read_marker(folder) is not None
            and not (folder / "log").exists()
        ):
            # As a node it is as good as any: so it can also become a voter again, with `voters replace`.
            logger.error(
                "the registry log in %s is gone: this node votes no more, since it cannot know what it has promised. "
                "With the others healthy, run: fastcheck voters replace %s %s, with a --raft-address that is new",
                folder,
                config.node_id,
                config.node_id,
            )
            return
        self._running = config.own_voter
        self._supervisor.run_registry([voter_message(v) for v in config.effective_voters], on_failure)

    async def _stop(self) -> None:
        if self.runs:
            self._running = None
            await self._supervisor.stop_registry()

    def _signature(self) -> tuple[int, int] | None:
        try:
            status = voters_file(self._configured).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    async def look(self) -> None:
        """Go by what the registry has named meanwhile."""
        if (seen := self._signature()) == self._seen:
            return
        async with self._lock:
            try:
                self.config = with_remembered_voters(self._configured)
                decided = was_decided(self.config)
            except ConfigError as error:  # what hinders may pass: looked at again
                self._unread.again("%s", error)
                return
            self._seen = seen
            self._unread.over()
            self._on_voters(self.config.effective_voters)
            own = self.config.own_voter
            if own is None and not decided:
                return  # named before this node was asked to become one
            joining_file(self.config).unlink(missing_ok=True)
            if own == self._running:
                return
            if self.runs:
                logger.warning("the registry names other voters: this node's registry process stops")
                await self._stop()
            if own is not None:
                self._run(self.config, self._not_started)

    async def become(
        self, cluster_id: str, voters: Sequence[Voter], version: int = 0, named: Sequence[Voter] = ()
    ) -> None:
        """Start a registry process, with nothing in its log, that waits to be added by the others.

        Args:
            voters: all of them from then on, this node among them. Asked again for the same, nothing happens.
            version: of the registry's state when it asked; 0: not told.
            named: the voters that the registry named then. A view after that may still name them.

        Raises:
            InvalidRequestError: this node cannot be that voter; the message says why.
        """
        config = self.config
        if cluster_id != config.cluster_id:
            raise InvalidRequestError(f"this node is of cluster {config.cluster_id!r}, not {cluster_id!r}")
        try:
            joining = dataclasses.replace(config, voters=tuple(voters))
        except ConfigError as error:
            raise InvalidRequestError(f"{config.node_id} cannot become a voter: {error}") from None
        own = joining.own_voter
        if not voters or own is None:
            raise InvalidRequestError(
                f"{config.node_id} is not among the voters that it should become one of"
            )
        async with self._lock:
            if own == self._running:
                return
            self._check_free(own)
            await self._stop()
            await asyncio.to_thread(_begin_folder, joining, own, version, named)
            self._run(joining, self._not_started)

    def _check_free(self, own: Voter) -> None:
        """Nobody who can reach this node's port may have a working voter forget its log."""
        folder = registry_folder(self.config)
        current = self.config.own_voter
        if current is not None and current != own and (folder / "log").exists():
            raise InvalidRequestError(
                f"{own.node_id} is a voter, {current.raft_address}, and has its log; to give it up, stop the daemon "
                f"and move {folder} away"
            )


def _begin_folder(joining: Config, own: Voter, version: int, named: Sequence[Voter]) -> None:
    """An empty folder for a new voter; what an earlier voter left is kept aside, the last one of them."""
    folder = registry_folder(joining)
    marker = read_marker(folder)
    if marker is not None and marker.get("raft_address") != own.raft_address:
        aside = folder.with_name("registry.old")
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        logger.info("what the voter %s left is in %s", marker.get("raft_address"), aside)
    make_private(folder)
    if not (folder / "log").exists():
        write_file(folder / "JOIN", b"")
    sync_directory(folder.parent)
    write_voters(joining_file(joining), joining.cluster_id, joining.voters, version=version, named=named)
