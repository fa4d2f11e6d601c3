"""The `fastcheck` command group, and the commands that query a cluster: one question, one output, an exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..admin import AdminClient
from . import shell_completion, tables
from .local_commands import demo, local
from .maintenance_commands import delete, drain, forget, history, safe_to_stop
from .offline_commands import certs, completion, config, plan
from .options import FastCheckGroup, admin_options, examples, job_argument, patient_admin_options
from .output import Exit, emit, exit_for_health, say
from .top import top
from .voter_commands import voters

F = TypeVar("F", bound=Callable[..., Any])


def _step_option(default: str) -> Callable[[F], F]:
    """`--step`, to narrow a question to one step."""
    return click.option(
        "--step",
        type=click.IntRange(min=0),
        shell_complete=shell_completion.steps,
        help=f"Only this step. Default: {default}.",
    )


@click.group(
    cls=FastCheckGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 error, 2 usage, 3 unreachable, 4 critical, 5 degraded.",
)
@click.version_option(package_name="fastcheck", prog_name="fastcheck")
def cli() -> None:
    """Ask a FastCheck cluster how it is and what it holds."""


@cli.command(
    epilog=examples(
        "fastcheck status                                   what is wrong, and what to do",
        "fastcheck status -o json | jq -r '.codes[].code'   only the codes",
        "fastcheck status --address 10.20.0.11:7450         ask another node",
    )
)
@admin_options
@click.pass_context
def status(ctx: click.Context, address: str, timeout_s: float, output: str) -> None:
    """Say whether all is well, and if not, what to do. Exits 4 when critical, 5 when degraded."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.status()
    emit(result, output, tables.status)
    ctx.exit(exit_for_health(result["health"]))


@cli.command()
@admin_options
def nodes(address: str, timeout_s: float, output: str) -> None:
    """List the nodes: state and why, memory, last sign of life.

    Also the bulk lane of each, its labels, and with -o json its counters.
    """
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.nodes(), output, tables.nodes)


@cli.command()
@admin_options
def jobs(address: str, timeout_s: float, output: str) -> None:
    """List the jobs and their newest committed step."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.jobs(), output, tables.jobs)


@cli.command()
@job_argument
@admin_options
def checkpoints(job: str, address: str, timeout_s: float, output: str) -> None:
    """List a job's steps: committed, replicating, provisional."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.checkpoints(job)
    if not result["registry_answered"]:
        say("The registry does not answer: these are the steps that the nodes hold complete.")
    emit(result, output, tables.checkpoints)


@cli.command(epilog=examples("fastcheck replicas gpt --step 4000"))
@job_argument
@_step_option("all that are kept")
@admin_options
def replicas(job: str, step: int | None, address: str, timeout_s: float, output: str) -> None:
    """List which nodes say that they hold which shard."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.replicas(job, step), output, tables.replicas)


@cli.command(epilog=examples("fastcheck inspect gpt 4000"))
@job_argument
@click.argument("step", type=click.IntRange(min=0), shell_complete=shell_completion.steps)
@admin_options
def inspect(job: str, step: int, address: str, timeout_s: float, output: str) -> None:
    """Show everything about one committed step."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.inspect(job, step), output, tables.inspect)


@cli.command(epilog=examples("fastcheck verify gpt --step 4000 --timeout 60"))
@job_argument
@_step_option("all that is held")
@patient_admin_options(600.0)
@click.pass_context
def verify(
    ctx: click.Context, job: str, step: int | None, address: str, timeout_s: float, output: str
) -> None:
    """Have every node check what it holds of a job now.

    Exits 5 when something bad was found, or a node did not answer: then not all was checked.
    """
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.verify(job, step)
    emit(result, output, tables.verify)
    ctx.exit(Exit.DEGRADED if result["bad"] or result["unreachable"] else Exit.OK)


for command in (
    history, drain, safe_to_stop, forget, delete, voters, plan, certs, config, completion, top, local, demo,
):  # fmt: skip
    cli.add_command(command)
