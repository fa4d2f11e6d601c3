"""Makes one voter the only one, on its disk, after a majority of the voters was lost for good.

Raft can't do this by itself: without a majority nobody knows whether the others are gone or only cut off. The operator
knows. The voter's own log gets an entry per lost voter that removes it. Changes of the membership count from when they
are in the log, so the voter elects itself at its next start and commits what its log holds. Its term is a new one, in
which it has voted for itself: no entry of another leader can have the same index and term.

What only the lost voters had is lost. If they run again from their own disks, they are a second registry.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ...config import Config, Voter
from ...errors import ConfigError
from ..known_voters import with_remembered_voters
from . import snapshots
from .disk import sync_directory
from .engine import change_in, to_entry
from .journal import LOG, Journal
from .membership import Change, Voters, voters_after
from .snapshots import SNAPSHOT
from .voter_folder import VoterFolder

#: Beside the voter's folder: what that was before.
KEPT = "registry.before-recovery"


@dataclass(frozen=True)
class Found:
    """What a voter's disk holds. Of several voters the one with the greatest (`term`, `index`) knows most."""

    voter: Voter
    #: All voters according to the log, by raft address.
    voters: Voters
    #: Of the newest entry.
    term: int
    index: int
    #: The newest entry that is known to be committed here; those behind it may be or not.
    committed: int

    @property
    def others(self) -> list[Voter]:
        """The voters beside this one."""
        return [voter for voter in self.voters.values() if voter != self.voter]


class Recovery:
    """A voter's files, held as by its registry process, which must not run. A context manager.

    Raises:
        ConfigError: this node has no voter that could go on alone; nothing was changed.
    """

    def __init__(self, config: Config) -> None:
        config = with_remembered_voters(config)
        if (voter := config.own_voter) is None:
            raise ConfigError(f"{config.node_id} is no voter: run this on one whose disk is left")
        self._config = config
        self._voter = voter
        self._folder = VoterFolder(config, voter)

    def __enter__(self) -> Recovery:
        self._folder.claim()
        try:
            self._open()
        except BaseException:
            self._folder.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.release()

    def _open(self) -> None:
        disk = self._folder.disk
        self._folder.check_marker()
        if not disk.exists(LOG) or self._folder.joining:
            raise ConfigError(f"{self._folder.path} holds no registry: choose another voter")
        try:
            found = snapshots.from_bytes(disk.read(SNAPSHOT)) if disk.exists(SNAPSHOT) else None
        except ValueError as error:
            raise ConfigError(
                f"the registry snapshot {disk.path(SNAPSHOT)} cannot be used: {error}. Choose another voter"
            ) from None
        self._journal = Journal(disk, None if found is None else (found.before, found.last))
        known = self._config.effective_voters
        voters: Voters = {voter.raft_address: voter for voter in known}
        if found is not None:
            voters = dict(found.voters)
        voters = voters_after(
            voters, [change for entry in self._journal[:] if (change := change_in(entry[0])) is not None]
        )
        if not len(self._journal) or self._voter.raft_address not in voters:
            raise ConfigError(f"{self._folder.path} is that of a voter no more: choose another one")
        _, index, term = self._journal[-1]
        self.found = Found(
            voters[self._voter.raft_address], voters, term, index, self._journal.getRaftCommitIndex()
        )

    def make_sole(self) -> Path:
        """Remove all others from the voters; returns where a copy of the files as they were is."""
        kept = self._folder.path.with_name(KEPT)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self._folder.path, kept)
        sync_directory(kept.parent)
        term, index = self._journal.getCurrentTerm() + 1, self.found.index
        self._journal.setCurrentTerm(term, self._voter.raft_address)
        for index, other in enumerate(self.found.others, self.found.index + 1):
            self._journal.add(to_entry(Change("rem", other)), index, term)
        self._journal.sync()
        return kept
