"""`fastcheck local ...`, a cluster on this machine, and `fastcheck demo`, which trains on one and kills a node."""

from __future__ import annotations

import importlib.util
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
import yaml
from rich.console import RenderableType

from ..demo import NODES, TrainSettings
from ..demo.display import Display, summary
from ..demo.scenario import LEADER, Demo
from ..errors import FastCheckError
from ..local import LocalCluster, layout
from . import shell_completion, tables
from .options import examples, output_option, timeout_option
from .output import Exit, dump, emit, say, stderr_console, stdout_console

F = TypeVar("F", bound=Callable[..., Any])


_dir_option = click.option(
    "--dir",
    "cluster_dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=layout.default_dir,
    show_default="a folder in the user's runtime or temporary directory",
    help="Folder of the cluster.",
)


def _local_options(command: F) -> F:
    return _dir_option(timeout_option(60.0, "Longest wait until the nodes are UP.")(output_option(command)))


def _setting(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r}: write --set key=value")
    return key, yaml.safe_load(value)


node_argument = click.argument("node", shell_complete=shell_completion.local_nodes)


@click.group()
def local() -> None:
    """Run a whole cluster on this machine, for trying."""


@local.command(
    epilog=examples(
        "fastcheck local up --nodes 3",
        "fastcheck local up --nodes 8 --tolerate 2 --ram-budget 512MiB --set log_format=json",
    )
)
@click.option(
    "--nodes", type=click.IntRange(1, layout.NODES_MAX), default=4, show_default=True, help="How many nodes."
)
@click.option(
    "--tolerate",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Node losses at once that a committed step survives.",
)
@click.option("--ram-budget", metavar="SIZE", help="RAM store of each node, e.g. 512MiB.")
@click.option(
    "--codec",
    type=click.Choice(["auto", "always", "never"]),
    help="What travels: what makes a step faster, all that shrinks, or nothing encoded. Default: auto, which on "
    "loopback mostly means raw.",
)
@click.option("--tls", is_flag=True, help="Certificates for all nodes, and every port under TLS.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A config key for every node.")
@_local_options
def up(
    *,
    nodes: int,
    tolerate: int,
    ram_budget: str | None,
    codec: str | None,
    tls: bool,
    settings: tuple[str, ...],
    cluster_dir: Path,
    timeout_s: float,
    output: str,
) -> None:
    """Start a fresh cluster and wait until all nodes are UP."""
    chosen = dict(_setting(text) for text in settings)
    if codec is not None:
        chosen["codec"] = codec
    cluster = LocalCluster(cluster_dir, on_event=say)
    cluster.up(nodes, tolerate=tolerate, ram_budget=ram_budget, settings=chosen, tls=tls, timeout_s=timeout_s)
    emit(cluster.status(), output, _nodes_table)
    say(f"trainers and commands find node-0 with: {_export(cluster, 'node-0')}")


def _export(cluster: LocalCluster, node: str) -> str:
    return f"export FASTCHECK_ADDRESS={shlex.quote(cluster.address(node))}"


@local.command(epilog=examples('eval "$(fastcheck local env)"', 'eval "$(fastcheck local env node-2)"'))
@click.argument("node", default="node-0", shell_complete=shell_completion.local_nodes)
@_dir_option
def env(node: str, cluster_dir: Path) -> None:
    """Print the line that makes a shell use one of the nodes.

    Trainers and commands that are started there then speak to it. Default: node-0.
    """
    click.echo(_export(LocalCluster(cluster_dir), node))


@local.command()
@_local_options
def down(cluster_dir: Path, timeout_s: float, output: str) -> None:
    """Stop all nodes and delete their RAM; logs stay."""
    cluster = LocalCluster(cluster_dir, on_event=say)
    if not cluster.exists:
        say(f"there is no local cluster in {cluster.dir}")
    cluster.down()
    emit({"nodes": [], "dir": str(cluster.dir)}, output, _nodes_table)


@local.command()
@_local_options
def status(cluster_dir: Path, timeout_s: float, output: str) -> None:
    """List the nodes and their processes."""
    emit(LocalCluster(cluster_dir).status(), output, _nodes_table)


@local.command()
@node_argument
@click.option("--wipe", is_flag=True, help="Also delete its RAM directory, as a power cut would.")
@_local_options
def kill(node: str, wipe: bool, cluster_dir: Path, timeout_s: float, output: str) -> None:
    """SIGKILL all processes of a node, as a crash would."""
    cluster = LocalCluster(cluster_dir, on_event=say)
    killed = cluster.kill(node, wipe=wipe)
    if not killed:
        say(f"{node} was not running")
    emit({**cluster.status(), "killed_pids": killed}, output, _nodes_table)


@local.command()
@node_argument
@_local_options
def start(node: str, cluster_dir: Path, timeout_s: float, output: str) -> None:
    """Start a killed node again, or add a new one (node-N)."""
    cluster = LocalCluster(cluster_dir, on_event=say)
    cluster.start(node, timeout_s=timeout_s)
    emit(cluster.status(), output, _nodes_table)


def _nodes_table(result: dict[str, Any]) -> RenderableType:
    """Nodes of the cluster on this machine."""
    table = tables.columns("NODE", "STATE", "ADDRESS", "PIDS", "RAM DIRECTORY")
    for node in result["nodes"]:
        table.add_row(
            node["node_id"],
            tables.state(node["state"]),
            node["address"],
            " ".join(map(str, node["pids"])),
            node["ram_dir"],
        )
    return tables.or_note(table, "the cluster has no nodes")


@click.command()
@click.option(
    "--steps", type=click.IntRange(4, 1000), default=TrainSettings.steps, show_default=True, help="Steps."
)
@click.option("--kill-at", type=click.IntRange(min=2), help="Kill after this step. Default: in the middle.")
@click.option(
    "--victim",
    type=click.Choice([LEADER, *(f"node-{index}" for index in range(NODES))]),
    default=LEADER,
    show_default=True,
    help="Which node dies; the leader is the one that leads the registry then.",
)
@click.option("--seed", type=int, default=TrainSettings.seed, show_default=True, help="Of the training.")
@output_option
@click.pass_context
def demo(ctx: click.Context, *, steps: int, kill_at: int | None, victim: str, seed: int, output: str) -> None:
    """Train on 4 nodes, lose one, and go on bit for bit.

    From the other nodes' RAM, without a file. Takes a minute or two.

    Exits 1 when anything differs from an uninterrupted run.
    """
    for package, extra in (("torch", "torch"), ("fastcheckd", "'fastcheck[daemon,cli]'")):
        if importlib.util.find_spec(package) is None:
            raise FastCheckError(
                f"the demo needs {package}, which is not installed; run: pip install {extra}"
            )
    # So that `kill` takes the cluster down just as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    console = stdout_console() if output == "table" else stderr_console()
    settings = TrainSettings(steps=steps, seed=seed)
    with Display(console) as display:
        result = Demo(settings, display, kill_at=kill_at or steps // 2, victim=victim).run()
    console.print(summary(result))
    if output != "table":
        sys.stdout.write(dump(result, output, one_line=True))
    ctx.exit(Exit.OK if result["bit_identical"] and result["losses_identical"] else Exit.ERROR)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
