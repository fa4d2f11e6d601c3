"""What a node remembers of the voters: the config names only the first ones.

`state_dir/voters.json` is there once the registry's voters have been others than the config's. The data
process, which follows the view, writes it; the agent reads it, at its start and when it changes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from ..config import Config, Voter
from ..errors import ConfigError
from .raft.disk import write_file
from .raft.membership import voter_from_list, voter_to_list

logger = logging.getLogger(__name__)


def voters_file(config: Config) -> Path:
    """Where they are kept."""
    return config.state_dir / "voters.json"


def joining_file(config: Config) -> Path:
    """Where a node that was asked to become a voter keeps with whom, until the registry names it."""
    return config.state_dir / "joining.json"


def read_voters(path: Path, cluster_id: str) -> tuple[Voter, ...] | None:
    """The voters in a file; None: there is none, or it is another cluster's.

    Raises:
        ConfigError: it is broken.
    """
    return _read(path, cluster_id)[1]


def _read(path: Path, cluster_id: str) -> tuple[int, tuple[Voter, ...] | None, tuple[Voter, ...]]:
    """Version, voters and those named before them."""
    try:
        document = json.loads(path.read_bytes())
        if document["cluster_id"] != cluster_id:
            logger.warning("%s is cluster %r's and not used", path, document["cluster_id"])
            return 0, None, ()
        voters, named = (tuple(map(voter_from_list, document[key])) for key in ("voters", "named"))
        return int(document["version"]), voters, named
    except FileNotFoundError:
        return 0, None, ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}); delete it to go by the config's 'voters' until the registry says more"
        ) from None


def was_decided(config: Config) -> bool:
    """Whether the registry has named its voters since this node was asked to become one; also if it was not asked."""
    joining_version, joining, named = _read(joining_file(config), config.cluster_id)
    version, voters, _ = _read(voters_file(config), config.cluster_id)
    # A view has a new version for much else: it may be newer and name those that were named before.
    return joining is None or (version > joining_version and set(voters or ()) != set(named))


def write_voters(
    path: Path,
    cluster_id: str,
    voters: Sequence[Voter],
    *,
    version: int = 0,
    named: Sequence[Voter] = (),
) -> None:
    """Keep voters in a file; a crash leaves the old ones or these. `named`: those before them, of a joining node."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = {
        "cluster_id": cluster_id,
        "version": version,
        "voters": [voter_to_list(voter) for voter in voters],
        "named": [voter_to_list(voter) for voter in named],
    }
    write_file(path, json.dumps(document).encode())


def remember(config: Config, voters: Sequence[Voter], version: int) -> None:
    """Keep what the registry says, if it is anything else than what is known already.

    Args:
        config: as the operator wrote it.
        voters: of a view; none are no news.
        version: of that view. A voter that lags behind, or was replaced, tells what was.
    """
    path = voters_file(config)
    known_version, known, _ = _read(path, config.cluster_id)
    if not voters or version <= known_version or set(voters) == set(known or config.effective_voters):
        return
    write_voters(path, config.cluster_id, voters, version=version)


def with_voters(config: Config, voters: Sequence[Voter] | None) -> Config:
    """The config with these voters, or unchanged without any.

    Raises:
        ConfigError: this node, which is one of them, has no key and no certificate to be one.
    """
    return config if not voters else dataclasses.replace(config, voters=tuple(voters))


def with_remembered_voters(config: Config) -> Config:
    """The config with the newest voters that this node has heard of."""
    remembered = read_voters(voters_file(config), config.cluster_id)
    if remembered and set(remembered) != set(config.effective_voters):
        logger.info(
            "the registry's voters are %s, not those of the config",
            ", ".join(f"{v.node_id} at {v.raft_address}" for v in remembered),
        )
    return with_voters(config, remembered)
