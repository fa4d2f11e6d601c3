"""A voter's own files: who it is, its secret, the snapshot; locked, private, checked before they are believed.

    LOCK       held by the running registry process
    VOTER      whose folder this is: a voter that lost its log must not come back as itself
    JOIN       there as long as this voter has not been added by the others (see `raft_engine`)
    log, ...   see `journal`
    snapshot   JSON: the state after an entry, that entry and the one before, the voters at that point

The folder is 0700 and its files 0600: who may write here decides what was committed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config, Voter
from ..errors import ConfigError
from .journal import Entry, open_private, sync_directory, write_file
from .membership import Voters, voter_from_list, voter_to_list
from .records import Json
from .sealing import Seal, derive_key
from .state import restore
from .tls import Tls

KEY_BYTES_MIN = 32
FORMAT = 2


@dataclass(frozen=True)
class Snapshot:
    """What the log starts with.

    Attributes:
        last: newest entry in it.
        before: the one before that.
        state: what they have led to.
        voters: at that point; None in a snapshot of the first format: as configured.
    """

    last: Entry
    before: Entry
    state: Json
    voters: Voters | None


class VoterFolder:
    """The folder of one voter.

    Args:
        config: of this node.
        voter: its entry among the voters.
    """

    def __init__(self, config: Config, voter: Voter) -> None:
        self._config = config
        self._voter = voter
        self.path = registry_folder(config)
        self.log = self.path / "log"
        self.snapshot = self.path / "snapshot"
        self._join = self.path / "JOIN"

    def claim(self) -> None:
        """Make the folder, or take it over; `release` it at the end.

        Raises:
            ConfigError: another process has it, or it is somebody else's.
        """
        make_private(self.path)
        descriptor = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._lock_file = os.fdopen(descriptor, "w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise ConfigError(
                f"config key 'state_dir': {self.path} is in use by another registry process; stop that "
                "one, or give this node a state_dir of its own"
            ) from None

    def release(self) -> None:
        """Let others have it."""
        self._lock_file.close()

    @property
    def joining(self) -> bool:
        """Whether this voter has yet to be added by the others."""
        return self._join.exists()

    def joined(self) -> None:
        """It has been added."""
        self._join.unlink(missing_ok=True)
        sync_directory(self.path)

    def _identity(self) -> Json:
        return {
            "cluster_id": self._config.cluster_id,
            "node_id": self._voter.node_id,
            "raft_address": self._voter.raft_address,
        }

    def mark(self) -> None:
        """Note whose folder this is, once its log is there: a crash in between is not taken for a lost log."""
        write_file(self.path / "VOTER", json.dumps(self._identity()).encode())

    def check_marker(self) -> None:
        """A voter that lost its log must not come back as itself: it would vote and acknowledge anew.

        Raises:
            ConfigError: it has, or the folder is another voter's.
        """
        identity = self._identity()
        known = read_marker(self.path)
        if known is None:
            return
        if known != identity:
            raise ConfigError(
                f"config key 'state_dir': {self.path} belongs to the voter {known}, not to {identity}; "
                "use another state_dir, or restore the config"
            )
        if not self.log.exists():
            raise ConfigError(
                f"the registry log {self.log} is gone: a voter without its log would vote and "
                "acknowledge as if for the first time, and committed steps could be lost. If other voters "
                f"are healthy, give this voter a new raft_address, with: fastcheck voters replace "
                f"{self._voter.node_id} {self._voter.node_id}; only when the whole cluster starts over, delete "
                f"{self.path} on all voters"
            )

    def protection(self) -> Seal | Tls:
        """What connections to other voters are made safe with.

        Raises:
            ConfigError: a file that the operator has to look at.
        """
        if self._config.tls_cert_file is not None:
            return Tls(self._config)
        return Seal(derive_key(self._read_secret(), self._config.cluster_id))

    def _read_secret(self) -> bytes:
        path = self._config.raft_key_file
        if path is None:
            # The config allows it for a voter alone on loopback.
            path = self._config.state_dir / "raft.key"
            if not path.exists():
                with open_private(path) as file:
                    file.write(secrets.token_bytes(KEY_BYTES_MIN))
                sync_directory(path.parent)
        try:
            mode = path.stat().st_mode
            secret = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"config key 'raft_key_file': cannot read {path}: {error.strerror}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"config key 'raft_key_file': others may read {path}; run: chmod 600 {path}")
        if len(secret) < KEY_BYTES_MIN:
            raise ConfigError(
                f"config key 'raft_key_file': {path} has {len(secret)} bytes, {KEY_BYTES_MIN} are needed; "
                f"make it anew with: head -c 32 /dev/urandom > {path}"
            )
        return secret

    def load_snapshot(self) -> Snapshot | None:
        """The snapshot, if there is one.

        Raises:
            ConfigError: it cannot be used.
        """
        if not self.snapshot.exists():
            return None
        try:
            return read_snapshot(self.snapshot)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the registry snapshot {self.snapshot} cannot be used ({error}); restore it, or "
                "treat this voter as lost: move the log away and restart fastcheckd, then give it a new raft_address, "
                f"with: fastcheck voters replace {self._voter.node_id} {self._voter.node_id}"
            ) from None


def registry_folder(config: Config) -> Path:
    """Where a voter keeps its files."""
    return config.state_dir / "registry"


def read_marker(folder: Path) -> Json | None:
    """Whose folder it is; None: nobody's yet, and an empty record if that cannot be read."""
    try:
        known = json.loads((folder / "VOTER").read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, or make it so, with all that lies in it.

    Raises:
        ConfigError: it is another user's, or no folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(
            f"config key 'state_dir': {folder} must be a folder of the user that runs fastcheckd, and no link"
        )
    folder.chmod(0o700)
    for path in folder.iterdir():
        if stat.S_ISREG(path.lstat().st_mode):
            path.chmod(0o600)


def write_snapshot(path: Path, last: Entry, before: Entry, state: bytes, voters: Voters) -> None:
    """Write a snapshot, and have it on disk; the engine renames it into place."""
    document = {
        "format": FORMAT,
        "last": _entry_to_json(last),
        "before": _entry_to_json(before),
        "state": state.decode(),
        "voters": [voter_to_list(voter) for voter in voters.values()],
    }
    with open_private(path) as file:
        file.write(json.dumps(document).encode())
        file.flush()
        os.fsync(file.fileno())


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot; raises OSError, ValueError, KeyError or TypeError."""
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("format") not in {1, FORMAT}:
        raise ValueError("not a snapshot of a format that this version reads")
    voters: Voters | None = None
    if document["format"] == FORMAT:
        voters = {v.raft_address: v for v in map(voter_from_list, document["voters"])}
    return Snapshot(
        _entry_from_json(document["last"]),
        _entry_from_json(document["before"]),
        restore(document["state"].encode()),
        voters,
    )


def _entry_to_json(entry: Entry) -> list[Any]:
    command, index, term = entry
    return [base64.b64encode(command).decode(), index, term]


def _entry_from_json(value: Any) -> Entry:
    command, index, term = value
    return base64.b64decode(command, validate=True), int(index), int(term)
