"""The command line of `fastcheckd`.

    fastcheckd run --config FILE [--set key=value ...]        the daemon
    fastcheckd validate --config FILE [--set key=value ...]   check the configuration and stop
    fastcheckd config --config FILE [--set key=value ...]     print every key, its value and what decided it, as JSON
    fastcheckd recover-quorum --config FILE [--yes]           have this voter go on alone: the others are gone for good

Exit codes: 0 stopped as asked, 1 failed, 2 usage, 78 the configuration cannot work.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .config import Config, check_exposure
from .config_sources import load_with_origins, report
from .errors import EXIT_CONFIG, ConfigError, FastCheckdError
from .interfaces import interfaces, with_lane_host
from .log import configure

if TYPE_CHECKING:
    from .process.parent import Role

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        config, origins = load_with_origins(
            arguments.config, environment=os.environ, overrides=arguments.set or ()
        )
        if arguments.command == "config":
            print(json.dumps(report(config, origins), indent=2))
            return 0
        config = with_lane_host(config, interfaces())  # once, before the children get it
        check_exposure(config)
        if arguments.command == "recover-quorum":
            return _recover_quorum(config, yes=arguments.yes)
        if arguments.command == "validate":
            print(
                f"valid: node {config.node_id} of cluster {config.cluster_id}, agent at {config.agent_address}, "
                f"lane at {config.lane_address}, {config.codec_threads} codec threads"
            )
            return 0
        return _run(config)
    except ConfigError as error:
        print(f"fastcheckd: {error}", file=sys.stderr)
        return EXIT_CONFIG


def _recover_quorum(config: Config, *, yes: bool) -> int:
    recovery = importlib.import_module(".registry.raft.recovery", __package__)
    with recovery.Recovery(config) as files:
        found = files.found
        print(
            f"voter {found.voter.node_id}: term {found.term}, entry {found.index}, known to be committed "
            f"{found.committed}; voters: {', '.join(sorted(v.node_id for v in found.voters.values()))}"
        )
        gone = ", ".join(sorted(voter.node_id for voter in found.others))
        if not gone:
            print("it is the only voter already: start fastcheckd")
        elif not yes:
            print(f"nothing was changed; with --yes it votes alone from its next start on, without {gone}")
        else:
            print(
                f"it votes alone from its next start on, without {gone}; as it was before: {files.make_sole()}"
            )
    return 0


def settle_grpc() -> None:
    """What gRPC's core reads when it is loaded.

    It writes a line of its own to stderr for each handshake that fails: strangers could fill a disk. Who wants to see
    its lines sets the variable.

    Around a fork it ends its threads and starts them again; where that fails, as it does when a fork fails for want of
    processes, it aborts. Only the parent forks, which never has any.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def _run(config: Config) -> int:
    settle_grpc()
    # Late: `validate` needs none of it.
    parent = importlib.import_module(".process.parent", __package__)
    systemd = importlib.import_module(".process.systemd", __package__)

    configure(config.log_format, config.node_id, "parent")
    role = parent.Parent(config, systemd.Notifier()).run()
    return role if isinstance(role, int) else _run_role(role)


def _run_role(role: Role) -> int:
    """What a forked process does."""
    configure(role.config.log_format, role.config.node_id, role.name)
    try:
        asyncio.run(role.run())
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    except FastCheckdError as error:
        logger.error("%s", error)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line: for `main`, and for its page in the docs."""
    parser = argparse.ArgumentParser(prog="fastcheckd", description="The FastCheck daemon of one node.")
    parser.add_argument("--version", action="version", version=f"fastcheckd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run the daemon"),
        ("validate", "check the configuration and stop"),
        ("config", "print every key, its value and what decided it, as JSON"),
        (
            "recover-quorum",
            "have this node's voter go on alone, a majority of the others being gone for good",
        ),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", type=Path, help="YAML file; without it the defaults are used")
        command.add_argument(
            "--set", action="append", metavar="KEY=VALUE", help="override one key; may be repeated"
        )
        if name == "recover-quorum":
            command.add_argument(
                "--yes", action="store_true", help="do it; else only say what is on the disk"
            )
    return parser
