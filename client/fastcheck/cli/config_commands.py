"""`fastcheck config ...`: what a daemon started here would run with. Asks no daemon.

The daemon alone knows its keys and defaults, and this side may not import it: it is asked as a program,
`fastcheckd config`, which ends without starting anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import FastCheckError, InvalidArgumentError
from ..local.processes import daemon_environment
from . import tables
from .options import examples, output_option, timeout_option
from .output import emit

Json = dict[str, Any]

#: A daemon's exit code for a configuration that cannot work (sysexits.h EX_CONFIG).
_EXIT_CONFIG = 78


@click.group()
def config() -> None:
    """Show what a daemon started here would run with, and why."""


@config.command(
    epilog=examples(
        "fastcheck config show --config /etc/fastcheck/node.yaml --origin",
        "fastcheck config show --set tolerate=2 -o json",
    )
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The daemon's YAML file; without it the defaults.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As for fastcheckd run.")
@click.option("--origin", is_flag=True, help="The table, too, says where each value comes from.")
@timeout_option(15.0, "Longest wait for the daemon's program.")
@output_option
def show(
    config_file: Path | None, settings: tuple[str, ...], origin: bool, timeout_s: float, output: str
) -> None:
    """List every key, its value, and where that comes from.

    A flag beats a variable, that the file, that the default. Variables (FASTCHECK_<KEY>) are those of this shell; a
    service's may be others.
    """
    result = _ask_program(config_file, settings, timeout_s)
    emit(result, output, lambda shown: tables.config(shown, origins=origin))


def _ask_program(config_file: Path | None, settings: tuple[str, ...], timeout_s: float) -> Json:
    command = [sys.executable, "-m", "fastcheckd", "config"]
    if config_file is not None:
        command += ["--config", str(config_file)]
    for setting in settings:
        command += ["--set", setting]
    try:
        environment = daemon_environment(())
    except ModuleNotFoundError as error:
        raise FastCheckError(
            f"the daemon knows its keys, but {error}; run: pip install 'fastcheck[daemon]'"
        ) from None
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise FastCheckError(f"fastcheckd did not list its configuration within {timeout_s:g} s") from None
    if done.returncode == _EXIT_CONFIG:
        raise InvalidArgumentError(done.stderr.strip().removeprefix("fastcheckd: "))
    if done.returncode != 0:
        raise FastCheckError(f"fastcheckd failed with exit code {done.returncode}: {done.stderr.strip()}")
    listed: Json = json.loads(done.stdout)
    return listed
