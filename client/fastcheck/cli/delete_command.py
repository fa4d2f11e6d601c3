"""`fastcheck delete`: says what would go and what stays, asks, and then does it."""

from __future__ import annotations

from typing import Any

import click

from ..admin import AdminClient
from . import completing
from . import upkeep_tables as tables
from .options import examples, go_ahead, job_argument, patient_admin_options, yes_option
from .output import Exit, emit, human_bytes, say

Json = dict[str, Any]


@click.command(
    epilog=examples(
        "fastcheck delete gpt 4000 --dry-run   what would go, by node",
        "fastcheck delete gpt --all --yes      a job that has ended",
    )
)
@job_argument
@click.argument("step", type=click.IntRange(min=0), required=False, shell_complete=completing.steps)
@click.option("--all", "everything", is_flag=True, help="All steps of the job, those under way included.")
@click.option(
    "--even-if-running",
    is_flag=True,
    help="Also what a running trainer would be restored from. What it has under way is refused; then it saves on.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go. Exits 1 if it would be refused.")
@yes_option
@patient_admin_options(15.0)
@click.pass_context
def delete(
    ctx: click.Context,
    job: str,
    step: int | None,
    everything: bool,
    even_if_running: bool,
    dry_run: bool,
    yes: bool,
    address: str,
    timeout_s: float,
    output: str,
) -> None:
    """Delete a committed step, or a whole job, to free memory.

    Says first what would go and what stays, by node. The newest step, and a whole job, go only when no trainer of it
    runs, or with --even-if-running. What is not kept is nothing to delete, and exits 0.
    """
    if (step is None) != everything:
        raise click.UsageError("name a STEP, or --all, and not both")
    with AdminClient(address, timeout_s=timeout_s) as client:
        plan = client.delete(job, step, everything=everything, even_if_running=even_if_running, dry_run=True)
        if dry_run or plan["refusal"] is not None or not will_change(plan):
            emit(plan, output, tables.deletion)
            if plan["refusal"] is not None:
                say(f"fastcheck: {plan['refusal']}")
                ctx.exit(Exit.ERROR)
            return
        go_ahead(ctx, describe(plan), yes=yes)
        done = client.delete(job, step, everything=everything, even_if_running=even_if_running)
    emit(done, output, tables.deletion)


def will_change(plan: Json) -> bool:
    """Whether there is anything to delete."""
    return bool(plan["deleted_steps"] or plan["ends_sessions"])


def describe(plan: Json) -> str:
    """The plan in a few sentences, for a person who is about to be asked."""
    lines = [f"{tables.what_goes(plan)}: {human_bytes(plan['stored_bytes'])} on {len(plan['nodes'])} nodes"]
    lines += [f"  {node['node_id']}: {human_bytes(node['stored_bytes'])}" for node in plan["nodes"]]
    lines.append(tables.what_stays(plan))
    if plan["running_ranks"] and plan["ends_sessions"]:
        ranks = ", ".join(map(str, plan["running_ranks"]))
        lines.append(
            f"The trainers of rank {ranks} run: what they have under way is refused, and then they save on. "
            "To go back to an older step, end them first."
        )
    if plan["unreachable"]:
        lines.append(
            f"Not reached: {', '.join(plan['unreachable'])}; what they hold goes when they are back."
        )
    return "\n".join(lines)
