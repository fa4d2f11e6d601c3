"""Commands that ask no daemon: `config`, `plan`, `completion` and `certs`.

`config` runs `fastcheckd config`, which ends without starting anything: only the daemon knows its keys and defaults,
and the client may not import it. `plan` is arithmetic (`cluster_plan`). `completion` prints click's own script for a
shell (`shell_completion` answers what it asks). `certs` is a small certificate authority, for trying.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import get_completion_class
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..certs import LocalAuthority
from ..cluster_plan import LOSSES_MAX, NODES_MAX, SurvivalOdds, plan_cluster, survival_odds
from ..errors import FastCheckError, InvalidArgumentError
from ..local.processes import daemon_environment
from ..security import VARIABLES
from . import tables
from .options import Name, examples, output_option, timeout_option
from .output import emit, say

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
    emit(result, output, lambda shown: _keys_table(shown, origins=origin))


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


def _keys_table(result: Json, *, origins: bool) -> RenderableType:
    """Keys and values; values that differ from the default stand out.

    Args:
        origins: also where each value comes from.
    """
    table = tables.columns("KEY", "VALUE", *(["FROM"] if origins else []))
    for entry in result["keys"]:
        value = entry["value"]
        shown = value if isinstance(value, str) else json.dumps(value)
        style = "dim" if entry["origin"] == "default" else ""
        where = f"{entry['origin']} {entry['where']}".rstrip()
        table.add_row(*(Text(text, style) for text in (entry["key"], shown, *([where] if origins else []))))
    return table


#: Losses that are shown when nobody asks for others, besides one more than is tolerated.
LOSSES = (1, 2, 3, 4)


@click.command(epilog=examples("fastcheck plan --nodes 1000 --tolerate 1 --domains 50 --losses 2 --losses 4"))
@click.option("--nodes", type=click.IntRange(min=2, max=NODES_MAX), required=True, help="How many nodes.")
@click.option(
    "--tolerate",
    type=click.IntRange(min=1, max=8),
    default=1,
    show_default=True,
    help="Losses at once that are always survived.",
)
@click.option(
    "--losses",
    type=click.IntRange(min=1, max=LOSSES_MAX),
    multiple=True,
    help="Nodes lost at once; may be repeated. Default: a few.",
)
@click.option(
    "--spread",
    type=click.IntRange(min=1),
    help="Holders of one rank. Default: 3, or tolerate if that is more.",
)
@click.option(
    "--domains",
    type=click.IntRange(min=1),
    help="Failure domains, such as racks, with as many nodes each. Default: every node by itself.",
)
@output_option
def plan(
    nodes: int, tolerate: int, losses: tuple[int, ...], spread: int | None, domains: int | None, output: str
) -> None:
    """Compute what a cluster would survive. Asks nobody: no cluster is needed."""
    planned = plan_cluster(nodes, tolerate, spread or max(3, tolerate), domains or 0)
    wanted = sorted({*losses}) if losses else sorted({*LOSSES, tolerate + 1})
    emit(
        {
            "nodes": nodes,
            "tolerate": tolerate,
            "copies": tolerate + 1,
            "spread": planned.spread,
            "domains": planned.domains or None,
            "domains_short": planned.domains_short,
            "groups": [
                {"nodes": size, "count": count}
                for size, count in sorted(Counter(sum(group) for group in planned.groups).items())
            ],
            "odds": [_odds(survival_odds(planned, k)) for k in wanted if losses or k <= nodes],
        },
        output,
        _plan_table,
    )


def _odds(odds: SurvivalOdds) -> Json:
    return {
        "losses": odds.losses,
        "survival": float(odds.survival),
        "loses_one_in": _one_in(odds.survival),
        "gemini_bound": float(odds.gemini_bound),
        "ring": float(odds.ring),
        "everywhere": float(odds.everywhere),
    }


def _one_in(survival: Fraction) -> float | None:
    """1 in how many such losses loses something; None: none does."""
    return None if survival == 1 else float(1 / (1 - survival))


def _plan_table(result: Json) -> RenderableType:
    """A layout and its odds."""
    head = Table.grid(padding=(0, 2))
    groups = ", ".join(f"{g['count']} of {g['nodes']} nodes" for g in result["groups"])
    head.add_row("groups", groups)
    head.add_row(
        "copies", f"{result['copies']}, the owner's included; spread over {result['spread']} holders"
    )
    if result["domains"]:
        domains = Text(f"{result['domains']}, copies in different ones")
        if result["domains_short"]:
            domains = Text(
                f"{result['domains']}, too few to keep {result['copies']} copies apart", style="yellow"
            )
        head.add_row("domains", domains)
    table = tables.columns(
        ">LOST AT ONCE", ">NOTHING LOST", ">ELSE 1 IN", ">GEMINI'S BOUND", ">RING", ">EVERYWHERE"
    )
    for odds in result["odds"]:
        one_in = odds["loses_one_in"]
        table.add_row(
            str(odds["losses"]),
            _percent(odds["survival"]),
            "never" if one_in is None else f"{one_in:.4g}",
            *(_percent(odds[key]) for key in ("gemini_bound", "ring", "everywhere")),
        )
    return Group(head, Text(), table)


def _percent(share: float) -> str:
    return f"{100 * share:.4f} %"


SHELLS = ("bash", "zsh", "fish")
#: Where click looks for what the script wants to know; follows from the program's name.
_VARIABLE = "_FASTCHECK_COMPLETE"


@click.command(
    epilog="""\b
In ~/.bashrc:                   eval "$(fastcheck completion bash)"
In ~/.zshrc:                    eval "$(fastcheck completion zsh)"
Once, for fish:
  fastcheck completion fish > ~/.config/fish/completions/fastcheck.fish"""
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands.

    And their options, nodes, jobs and steps. Names are asked of the daemon, for a second at most; if it is silent,
    none are offered.
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows these three"
    click.echo(script(ctx.find_root().command, {}, "fastcheck", _VARIABLE).source())


F = TypeVar("F", bound=Callable[..., Any])


def _days(default: int) -> Callable[[F], F]:
    return click.option(
        "--days", type=click.IntRange(1, 36500), default=default, show_default=True, help="Valid so long."
    )


folder_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the authority and of what it signs.",
)


@click.group()
def certs() -> None:
    """Make certificates, for trying: an authority in a folder. Nothing is overwritten."""


@certs.command()
@click.argument("cluster", type=Name("cluster"))
@folder_option
@_days(3650)
def init(cluster: str, folder: Path, days: int) -> None:
    """Make the authority of the cluster CLUSTER (its cluster_id)."""
    LocalAuthority.create(folder, cluster, days=days)
    say(f"the authority of cluster {cluster} is in {folder}; keep {folder / 'ca.key'} to yourself")


@certs.command()
@click.argument("node", type=Name("node"))
@click.option(
    "--host", "hosts", multiple=True, help="An address or name that others reach it by; repeatable."
)
@folder_option
@_days(365)
def node(node: str, hosts: tuple[str, ...], folder: Path, days: int) -> None:
    """Make a certificate for the node NODE (its node_id)."""
    made = LocalAuthority(folder).node(node, hosts, days=days)
    say("copy these to the node, and into its configuration:")
    click.echo(f"tls_cert_file: {made}\ntls_key_file: {made.with_name(f'node-{node}.key')}")
    click.echo(f"tls_ca_file: {folder / 'ca.pem'}")


@certs.command()
@click.argument("name", type=Name("name"))
@folder_option
@_days(365)
def admin(name: str, folder: Path, days: int) -> None:
    """Make a certificate for the operator NAME."""
    _exports(LocalAuthority(folder).admin(name, days=days), f"admin-{name}.key", folder)


@certs.command()
@click.argument("name", type=Name("name"))
@folder_option
@_days(365)
def trainer(name: str, folder: Path, days: int) -> None:
    """Make a certificate for trainers, whose jobs NAME owns."""
    _exports(LocalAuthority(folder).trainer(name, days=days), f"trainer-{name}.key", folder)


def _exports(made: Path, key: str, folder: Path) -> None:
    for variable, path in zip(VARIABLES, (made, made.with_name(key), folder / "ca.pem"), strict=True):
        click.echo(f"export {variable}={path}")
