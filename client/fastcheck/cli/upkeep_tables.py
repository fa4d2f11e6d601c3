"""Tables for what is done about nodes, copies and voters, and for plans. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .output import human_bytes
from .tables import columns, or_note, silent, state

Json = dict[str, Any]


def history(result: Json) -> RenderableType:
    """Changes of nodes' states, the newest last."""
    table = columns("WHEN", "NODE", ">INCARNATION", "FROM", "TO", "WHY", ">EPOCH")
    for change in result["transitions"]:
        table.add_row(
            change["at"] or "",
            change["node_id"],
            str(change["incarnation"]),
            state(change["from"] or "new"),
            state(change["to"] or "forgotten"),
            change["reason"],
            str(change["epoch"]),
        )
    return or_note(table, "nothing is remembered")


def safe_to_stop(verdict: Json) -> RenderableType:
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


def deletion(result: Json) -> RenderableType:
    """What went, or would go, and what stays."""
    if not result["deleted_steps"] and not result["ends_sessions"]:
        return Text(f"{what_goes(result)}. {what_stays(result)}")
    table = columns("NODE", ">REPLICAS", ">BYTES")
    for node in result["nodes"]:
        table.add_row(node["node_id"], str(node["replicas"]), human_bytes(node["stored_bytes"]))
    verb = "is deleted" if result["deleted"] else "would be deleted"
    lines: list[RenderableType] = [Text(f"{what_goes(result)} {verb}"), table, Text(what_stays(result))]
    if result["unreachable"]:
        lines.append(
            Text(f"not reached, and drop theirs when they are back: {', '.join(result['unreachable'])}")
        )
    return Group(*lines)


def what_goes(result: Json) -> str:
    """The steps that go, in words."""
    steps = ", ".join(map(str, result["deleted_steps"]))
    if result["everything"]:
        return f"all of job {result['job']}" + (f" (step {steps})" if steps else "")
    if not steps:
        return f"nothing to delete: step {result['step']} of job {result['job']} is not kept"
    return f"step {steps} of job {result['job']}"


def what_stays(result: Json) -> str:
    """The steps that can be loaded afterwards, in words."""
    steps = ", ".join(map(str, result["kept_steps"]))
    return (
        f"Left of job {result['job']}: step {steps}" if steps else f"Nothing is left of job {result['job']}"
    )


def drain(result: Json) -> RenderableType:
    """What was asked for, and the verdict if that was waited for."""
    what = "is being drained" if result["draining"] else "is not drained any more"
    line = Text(f"{result['node_id']} {what}")
    return Group(line, safe_to_stop(result["verdict"])) if "verdict" in result else line


def forget(result: Json) -> RenderableType:
    """What was done."""
    return Text(f"{result['node_id']} is forgotten")


def verify(result: Json) -> RenderableType:
    """How much was checked, and what was bad."""
    lines: list[RenderableType] = [
        Text(
            f"{result['checked']} replicas checked, {human_bytes(result['checked_bytes'])}, {len(result['bad'])} bad"
        )
    ]
    if result["bad"]:
        table = columns("NODE", "JOB", ">STEP", ">RANK", ">SHARD")
        for bad in result["bad"]:
            table.add_row(bad["node_id"], bad["job"], str(bad["step"]), str(bad["rank"]), str(bad["shard"]))
        lines += [Text("dropped, to be made anew from good copies:", style="red"), table]
    return Group(*lines, *silent(result["unreachable"], "what they hold was not checked"))


def voters(result: Json) -> RenderableType:
    """The voters and how they are."""
    table = columns("VOTER", "STATE", "REGISTRY", "LEADER", ">VERSION", "ADDRESS")
    for voter in result["voters"]:
        table.add_row(
            voter["node_id"],
            state(voter["state"] or "not known"),
            "answers" if voter["answers"] else Text("no answer", style="red"),
            "yes" if voter["leader"] else "",
            "" if voter["version"] is None else str(voter["version"]),
            voter["address"] or "",
        )
    return table


def replaced_voters(result: Json) -> RenderableType:
    """The voters from now on."""
    table = columns("VOTER", "REGISTRY ADDRESS", "RAFT ADDRESS")
    for voter in result["voters"]:
        table.add_row(voter["node_id"], voter["registry_address"], voter["raft_address"])
    return table


def plan(result: Json) -> RenderableType:
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
    table = columns(">LOST AT ONCE", ">NOTHING LOST", ">ELSE 1 IN", ">GEMINI'S BOUND", ">RING", ">EVERYWHERE")
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
