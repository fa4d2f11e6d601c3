"""`fastcheck voters ...`: the registry's voters, and their replacement. Says first what would happen, and asks."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..admin import AdminClient
from . import shell_completion, tables
from .options import Name, admin_options, examples, go_ahead, patient_admin_options, yes_option
from .output import emit, say

Json = dict[str, Any]


@click.group(invoke_without_command=True)
@admin_options
@click.pass_context
def voters(ctx: click.Context, address: str, timeout_s: float, output: str) -> None:
    """List the registry's voters, or replace one."""
    if ctx.invoked_subcommand is not None:
        return
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.voters(), output, _voters_table)


@voters.command(epilog=examples("fastcheck voters replace node-2 node-5"))
@click.argument("old", type=Name("node"), shell_complete=shell_completion.nodes)
@click.argument("new", type=Name("node"), shell_complete=shell_completion.nodes)
@click.option("--registry-address", default="", metavar="HOST:PORT", help="Default: NEW's host, OLD's port.")
@click.option("--raft-address", default="", metavar="HOST:PORT", help="Default: NEW's host, OLD's port.")
@yes_option
@patient_admin_options(120.0)
@click.pass_context
def replace(
    ctx: click.Context,
    old: str,
    new: str,
    registry_address: str,
    raft_address: str,
    yes: bool,
    address: str,
    timeout_s: float,
    output: str,
) -> None:
    """Have node NEW vote in place of OLD, which is gone for good.

    OLD must be DOWN. NEW copies the registry first.
    """
    what = f"To have {new} vote in the place of {old}: {old} never votes again, whatever it still knows."
    go_ahead(ctx, what, yes=yes)
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.replace_voter(old, new, registry_address=registry_address, raft_address=raft_address)
    emit(result, output, _new_voters)
    say("write these voters into the config key 'voters' of every node")


@voters.command("add", epilog=examples("fastcheck voters add node-3 node-4"))
@click.argument("nodes", type=Name("node"), nargs=-1, required=True, shell_complete=shell_completion.nodes)
@click.option(
    "--registry-address",
    "registry_addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="For each node, in their order. Default: its host, the first voter's port.",
)
@click.option(
    "--raft-address",
    "raft_addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="For each node, in their order. Default: its host, the first voter's port.",
)
@yes_option
@patient_admin_options(120.0)
@click.pass_context
def add(
    ctx: click.Context,
    nodes: tuple[str, ...],
    registry_addresses: tuple[str, ...],
    raft_addresses: tuple[str, ...],
    yes: bool,
    address: str,
    timeout_s: float,
    output: str,
) -> None:
    """Have more nodes vote, so that there are 3, 5 or 7 voters.

    Each copies the registry first.
    """
    go_ahead(ctx, f"To have {', '.join(nodes)} vote as well.", yes=yes)
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.add_voters(
            nodes, registry_addresses=registry_addresses, raft_addresses=raft_addresses
        )
    emit(result, output, _new_voters)
    say("write these voters into the config key 'voters' of every node")


def _voters_table(result: Json) -> RenderableType:
    """The voters and their health."""
    table = tables.columns("VOTER", "STATE", "REGISTRY", "LEADER", ">VERSION", "ADDRESS")
    for voter in result["voters"]:
        table.add_row(
            voter["node_id"],
            tables.state(voter["state"] or "not known"),
            "answers" if voter["answers"] else Text("no answer", style="red"),
            "yes" if voter["leader"] else "",
            "" if voter["version"] is None else str(voter["version"]),
            voter["address"] or "",
        )
    return table


def _new_voters(result: Json) -> RenderableType:
    """The voters from now on."""
    table = tables.columns("VOTER", "REGISTRY ADDRESS", "RAFT ADDRESS")
    for voter in result["voters"]:
        table.add_row(voter["node_id"], voter["registry_address"], voter["raft_address"])
    return table
