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
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .config import Config, check_exposure
from .config_report import report
from .config_sources import from_json, load_with_origins
from .errors import ConfigError, FastCheckdError
from .interfaces import interfaces, with_lane_host
from .log import configure
from .supervise import CHILD_CONFIG, CHILD_PARENT, EXIT_CONFIG, die_with_parent

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        if arguments.command == "child":
            return _run_child(arguments.process)
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
        return _run("agent", config)
    except ConfigError as error:
        print(f"fastcheckd: {error}", file=sys.stderr)
        return EXIT_CONFIG


def _recover_quorum(config: Config, *, yes: bool) -> int:
    recovery = importlib.import_module(".registry.recovery", __package__)
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


def _run_child(process: str) -> int:
    parent = os.environ.pop(CHILD_PARENT, "")
    text = os.environ.pop(CHILD_CONFIG, "")
    if not parent or not text:
        print("fastcheckd: `child` is started by the agent only", file=sys.stderr)
        return 2
    die_with_parent(int(parent))
    return _run(process, from_json(text))


def _raise_file_limit() -> None:
    """Every mapped segment and every lane holds a descriptor: use what the system lets us have."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settle_grpc() -> None:
    """What gRPC's core reads when it is loaded.

    It writes a line of its own to stderr for each handshake that fails: strangers could fill a disk. Who wants to see
    its lines sets the variable.

    Around a fork it ends its threads and starts them again; where that fails, as it does when a fork fails for want of
    processes, it aborts. Nothing here forks but to execute something else, which needs none of it.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def _run(process: str, config: Config) -> int:
    _settle_grpc()
    # Late: `validate` needs none of them, and each process only its own.
    run = importlib.import_module(f".node.{process}", __package__).run

    _raise_file_limit()
    configure(config.log_format, config.node_id, process)
    try:
        asyncio.run(run(config))
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
    child = commands.add_parser("child")  # no help: started by the agent
    child.add_argument("process", choices=("data", "registry"))
    return parser
