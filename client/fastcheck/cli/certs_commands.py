"""`fastcheck certs ...`: a small certificate authority, for trying."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..certs import LocalAuthority
from ..security import VARIABLES
from .options import Name
from .output import say

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
