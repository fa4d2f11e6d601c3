"""Commands that change a cluster, or help to decide on a change: history, safe-to-stop, drain, forget, delete.

Each that changes something first says what would happen, and asks.
"""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from ..admin import AdminClient
from . import shell_completion, tables
from .options import (
    Name,
    admin_options,
    examples,
    go_ahead,
    job_argument,
    node_argument,
    patient_admin_options,
    yes_option,
)
from .output import Exit, emit, human_bytes, say

Json = dict[str, Any]

#: How often `drain --wait` asks again.
POLL_S = 1.0


@click.command(epilog=examples("fastcheck history node-7 --limit 20"))
@click.argument("node", type=Name("node"), required=False, shell_complete=shell_completion.nodes)
@click.option("--limit", type=click.IntRange(min=1, max=512), help="Only so many, the newest. Default: all.")
@admin_options
def history(node: str | None, limit: int | None, address: str, timeout_s: float, output: str) -> None:
    """List what became of the nodes, when and why; newest last."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.history(node or "", limit or 0), output, _history_table)


@click.command(
    "safe-to-stop", epilog=examples("fastcheck safe-to-stop node-7 && ssh node-7 systemctl stop fastcheckd")
)
@node_argument
@admin_options
@click.pass_context
def safe_to_stop(ctx: click.Context, node: str, address: str, timeout_s: float, output: str) -> None:
    """Say whether a node may be stopped for good. Exits 0: safe, 5: survivable, 4: neither."""
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.safe_to_stop(node)
    emit(result, output, _verdict)
    ctx.exit(_exit_for(result))


@click.command(
    epilog=examples(
        "fastcheck drain node-7 --wait 600 && ssh node-7 systemctl stop fastcheckd",
        "fastcheck drain node-7 --undo",
    )
)
@node_argument
@click.option("--undo", is_flag=True, help="End the draining.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Follow until the node may be stopped; exits as safe-to-stop does.",
)
@yes_option
@admin_options
@click.pass_context
def drain(
    ctx: click.Context,
    node: str,
    undo: bool,
    wait_s: float | None,
    yes: bool,
    address: str,
    timeout_s: float,
    output: str,
) -> None:
    """Make a node's copies elsewhere, so that it may be stopped.

    It gets nothing new and goes on serving what it has, until it leaves or --undo.
    """
    if undo and wait_s is not None:
        raise click.UsageError("--undo and --wait exclude each other")
    if not undo:
        what = (
            f"To drain {node}: it gets nothing new, and its copies are made on other nodes, while it runs on."
        )
        go_ahead(ctx, what, yes=yes)
    with AdminClient(address, timeout_s=timeout_s) as client:
        result = client.drain(node, undo=undo)
        if wait_s is not None:
            result["verdict"] = _follow(client, node, wait_s)
    emit(result, output, _draining)
    if wait_s is not None:
        ctx.exit(_exit_for(result["verdict"]))


def _follow(client: AdminClient, node: str, wait_s: float) -> Json:
    """Poll until the node may be stopped or the time is up; the last verdict."""
    deadline = time.monotonic() + wait_s
    told = ""
    while True:
        verdict = client.safe_to_stop(node)
        left = f"{verdict['short_shards']} shards short without {node}, {verdict['lost_shards']} lost"
        if verdict["safe"]:
            say(f"{node} may be stopped")
            return verdict
        if left != told:
            say(left)
            told = left
        if time.monotonic() + POLL_S > deadline:
            say(f"not safe within {wait_s:g} s; {node} is still being drained")
            return verdict
        time.sleep(POLL_S)


def _exit_for(verdict: Json) -> Exit:
    if verdict["safe"]:
        return Exit.OK
    return Exit.DEGRADED if verdict["survivable"] else Exit.CRITICAL


@click.command(epilog=examples("fastcheck forget node-7 --yes"))
@node_argument
@yes_option
@admin_options
@click.pass_context
def forget(ctx: click.Context, node: str, yes: bool, address: str, timeout_s: float, output: str) -> None:
    """Take a DOWN node off the list."""
    what = f"To take {node} off the list of nodes: started again, it would be a new one."
    go_ahead(ctx, what, yes=yes)
    with AdminClient(address, timeout_s=timeout_s) as client:
        emit(client.forget(node), output, _forgotten)


@click.command(
    epilog=examples(
        "fastcheck delete gpt 4000 --dry-run   what would go, by node",
        "fastcheck delete gpt --all --yes      a job that has ended",
    )
)
@job_argument
@click.argument("step", type=click.IntRange(min=0), required=False, shell_complete=shell_completion.steps)
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
            emit(plan, output, _deletion_table)
            if plan["refusal"] is not None:
                say(f"fastcheck: {plan['refusal']}")
                ctx.exit(Exit.ERROR)
            return
        go_ahead(ctx, describe(plan), yes=yes)
        done = client.delete(job, step, everything=everything, even_if_running=even_if_running)
    emit(done, output, _deletion_table)


def will_change(plan: Json) -> bool:
    """Whether there is anything to delete."""
    return bool(plan["deleted_steps"] or plan["ends_sessions"])


def describe(plan: Json) -> str:
    """The plan in a few sentences, shown before the question."""
    lines = [f"{_what_goes(plan)}: {human_bytes(plan['stored_bytes'])} on {len(plan['nodes'])} nodes"]
    lines += [f"  {node['node_id']}: {human_bytes(node['stored_bytes'])}" for node in plan["nodes"]]
    lines.append(_what_stays(plan))
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


def _history_table(result: Json) -> RenderableType:
    """Changes of nodes' states, the newest last."""
    table = tables.columns("WHEN", "NODE", ">INCARNATION", "FROM", "TO", "WHY", ">EPOCH")
    for change in result["transitions"]:
        table.add_row(
            change["at"] or "",
            change["node_id"],
            str(change["incarnation"]),
            tables.state(change["from"] or "new"),
            tables.state(change["to"] or "forgotten"),
            change["reason"],
            str(change["epoch"]),
        )
    return tables.or_note(table, "nothing is remembered")


def _verdict(verdict: Json) -> RenderableType:
    """A verdict and why."""
    if verdict["safe"]:
        return Text(f"{verdict['node_id']} may be stopped: nothing would be lost, nor short", style="green")
    word = "survivable" if verdict["survivable"] else "not safe"
    lines = [
        Text(
            f"stopping {verdict['node_id']} is {word}",
            style="yellow" if verdict["survivable"] else "bold red",
        )
    ]
    lines += [Text(f"  {reason}") for reason in verdict["reasons"]]
    if verdict["jobs"]:
        lines.append(Text(f"  jobs: {', '.join(verdict['jobs'])}"))
    return Group(*lines)


def _draining(result: Json) -> RenderableType:
    """The node's draining, and the verdict if it was waited for."""
    what = "is being drained" if result["draining"] else "is not drained any more"
    line = Text(f"{result['node_id']} {what}")
    return Group(line, _verdict(result["verdict"])) if "verdict" in result else line


def _forgotten(result: Json) -> RenderableType:
    """The node that was forgotten."""
    return Text(f"{result['node_id']} is forgotten")


def _deletion_table(result: Json) -> RenderableType:
    """The steps deleted, or to be deleted, and the steps kept."""
    if not result["deleted_steps"] and not result["ends_sessions"]:
        return Text(f"{_what_goes(result)}. {_what_stays(result)}")
    table = tables.columns("NODE", ">REPLICAS", ">BYTES")
    for node in result["nodes"]:
        table.add_row(node["node_id"], str(node["replicas"]), human_bytes(node["stored_bytes"]))
    verb = "is deleted" if result["deleted"] else "would be deleted"
    lines: list[RenderableType] = [Text(f"{_what_goes(result)} {verb}"), table, Text(_what_stays(result))]
    if result["unreachable"]:
        lines.append(
            Text(f"not reached, and drop theirs when they are back: {', '.join(result['unreachable'])}")
        )
    return Group(*lines)


def _what_goes(result: Json) -> str:
    """The steps to be deleted, in words."""
    steps = ", ".join(map(str, result["deleted_steps"]))
    if result["everything"]:
        return f"all of job {result['job']}" + (f" (step {steps})" if steps else "")
    if not steps:
        return f"nothing to delete: step {result['step']} of job {result['job']} is not kept"
    return f"step {steps} of job {result['job']}"


def _what_stays(result: Json) -> str:
    """The steps kept, in words."""
    steps = ", ".join(map(str, result["kept_steps"]))
    return (
        f"Left of job {result['job']}: step {steps}" if steps else f"Nothing is left of job {result['job']}"
    )
