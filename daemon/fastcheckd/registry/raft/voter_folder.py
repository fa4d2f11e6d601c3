"""A voter's own files: who it is, its secret; locked, private, checked before they are believed.

    LOCK       held by the running registry process
    VOTER      whose folder this is: a voter that lost its log must not come back as itself
    JOIN       there as long as this voter has not been added by the others (see `engine`)
    log, ...   see `journal`
    snapshot   see `snapshots`

The folder is 0700 and its files 0600: who may write here decides what was committed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from ...config import Config, Voter
from ...errors import ConfigError
from .disk import Disk, write_file
from .journal import LOG
from .messages import Seal, derive_key
from .tls import Tls

KEY_BYTES_MIN = 32
MARKER = "VOTER"
JOIN = "JOIN"


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
        self.disk = Disk(self.path)

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
        self.disk.close()
        self._lock_file.close()

    @property
    def joining(self) -> bool:
        """Whether this voter has yet to be added by the others."""
        return self.disk.exists(JOIN)

    def joined(self) -> None:
        """It has been added."""
        self.disk.remove(JOIN)

    def _identity(self) -> dict[str, Any]:
        return {
            "cluster_id": self._config.cluster_id,
            "node_id": self._voter.node_id,
            "raft_address": self._voter.raft_address,
        }

    def mark(self) -> None:
        """Note whose folder this is, once its log is there: a crash in between is not taken for a lost log."""
        if not self.disk.exists(MARKER):
            self.disk.replace(MARKER, json.dumps(self._identity()).encode())

    def check_marker(self) -> None:
        """A voter that lost its log must not come back as itself: it would vote and acknowledge anew.

        Raises:
            ConfigError: it has, or the folder is another voter's.
        """
        identity = self._identity()
        if not self.disk.exists(MARKER):
            return
        known = _parse_marker(self.disk.read(MARKER))
        if known != identity:
            raise ConfigError(
                f"config key 'state_dir': {self.path} belongs to the voter {known}, not to {identity}; "
                "use another state_dir, or restore the config"
            )
        if not self.disk.exists(LOG):
            raise ConfigError(
                f"the registry log {self.disk.path(LOG)} is gone: a voter without its log would vote and "
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
                write_file(path, secrets.token_bytes(KEY_BYTES_MIN))
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


def registry_folder(config: Config) -> Path:
    """Where a voter keeps its files."""
    return config.state_dir / "registry"


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Whose folder it is; None: nobody's yet, and an empty record if that cannot be read."""
    try:
        return _parse_marker((folder / MARKER).read_bytes())
    except FileNotFoundError:
        return None


def _parse_marker(data: bytes) -> dict[str, Any]:
    try:
        known = json.loads(data)
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
