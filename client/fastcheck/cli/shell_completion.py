"""Completion of names in a shell: jobs, steps and nodes, asked of the daemon.

The shell blocks meanwhile, so a daemon that is silent or refuses costs a second at most and yields no names. The daemon
is the one of --address on the line, else of FASTCHECK_ADDRESS, else this node's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from ..admin import AdminClient
from ..errors import FastCheckError
from ..local import LocalCluster

#: Longest wait for names.
PATIENCE_S = 1.0


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of jobs."""
    return _ask(ctx, incomplete, lambda client: (job["job"] for job in client.jobs()["jobs"]))


def steps(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Committed steps of the job on the line."""
    # An option that still lacks its value ends the parsing: then what stands before it is left over in `args`.
    name = ctx.params.get("job") or next(iter(ctx.args), None)
    return _ask(
        ctx,
        incomplete,
        lambda client: (
            str(step) for job in client.jobs()["jobs"] if job["job"] == name for step in job["kept_steps"]
        ),
    )


def nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids of nodes."""
    return _ask(ctx, incomplete, lambda client: (node["node_id"] for node in client.nodes()["nodes"]))


def local_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids of the nodes of the cluster on this machine, running or not."""
    try:
        return _matching(LocalCluster(ctx.params.get("cluster_dir")).node_ids, incomplete)
    except (FastCheckError, OSError, ValueError):
        return []


def _ask(ctx: click.Context, incomplete: str, question: Callable[[AdminClient], Iterable[str]]) -> list[str]:
    try:
        with AdminClient(ctx.params.get("address"), timeout_s=PATIENCE_S) as client:
            return _matching(question(client), incomplete)
    except FastCheckError:
        return []


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
