"""Tables for people: from the JSON shape of a question's answer to something to print. Pure.

Tables of commands that change something stand beside those; what all tables have in common is here.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .output import human_age, human_bytes, human_seconds

Json = dict[str, Any]

STYLES = {
    "UP": "green",
    "SUSPECT": "yellow",
    "DRAINING": "cyan",
    "DOWN": "red",
    "OK": "bold green",
    "DEGRADED": "bold yellow",
    "CRITICAL": "bold red",
    "committed": "green",
    "replicating": "yellow",
    "provisional": "yellow",
    "running": "green",
    "stopped": "red",
}


def state(word: str) -> Text:
    """A state, in its colour."""
    return Text(word, style=STYLES.get(word, ""))


def precision(*, lossy: bool) -> Text:
    """Whether the step is exact; a lossy one stands out."""
    return Text("LOSSY", style="bold magenta") if lossy else Text("exact", style="dim")


def sharing(*, replicated: bool) -> Text:
    """Whether each rank saved a state of its own, or a part of a replicated one."""
    return Text(
        "replicated: a part each" if replicated else "a state each", style="" if replicated else "dim"
    )


def ratio(codecs: Json) -> str:
    """Raw bytes over sent bytes, over all codecs; empty where unknown."""
    raw = sum(use["raw_bytes"] for use in codecs.values())
    encoded = sum(use["encoded_bytes"] for use in codecs.values())
    return f"{raw / encoded:.2f}" if encoded else ""


def memory(contract: Json | None) -> Text:
    """What a rank's node has set aside for it; a lean contract stands out."""
    if contract is None:
        return Text("")
    return Text(
        f"{contract['contract']} ({human_bytes(contract['bytes'])})",
        style="yellow" if contract["contract"] == "lean" else "",
    )


def columns(*titles: str) -> Table:
    """An empty table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in titles:
        # A leading ">" marks numbers, which line up on the right.
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def or_note(table: Table, note: str) -> RenderableType:
    """The table, or a note in place of an empty one."""
    return table if table.row_count else Text(note, style="dim")


def status(result: Json) -> RenderableType:
    """Health in one line, the membership in another, then what is wrong and what to do."""
    head = Table.grid(padding=(0, 2))
    head.add_row("health", state(result["health"]))
    head.add_row("cluster", result["cluster_id"])
    head.add_row("leader", Text(result["leader"] or "none", style="" if result["leader"] else "red"))
    head.add_row("epoch", str(result["epoch"]))
    head.add_row("nodes", f"{result['nodes_up']} of {result['nodes_total']} up")
    head.add_row("voters", ", ".join(result["voters"]))
    if redundancy := result["redundancy"]:
        head.add_row("copies", _copies(redundancy))
    for odds in result["survival"]:
        head.add_row(
            "odds",
            f"{100 * odds['probability']:.4g} % that losing {odds['losses']} nodes at once costs nothing",
        )
    if not result["codes"]:
        return head
    codes = columns("CODE", "WHAT", "DO")
    for code in result["codes"]:
        codes.add_row(Text(code["code"], style=STYLES.get(code["severity"], "")), code["detail"], code["do"])
    return Group(head, Text(), codes)


def _copies(redundancy: Json) -> str:
    if not redundancy["short_shards"] and not redundancy["lost_shards"]:
        return f"{redundancy['wanted_copies']} of every committed shard, or more"
    lost = f", {redundancy['lost_shards']} shards have none" if redundancy["lost_shards"] else ""
    return (
        f"{redundancy['short_shards']} shards ({human_bytes(redundancy['short_bytes'])}) have fewer than "
        f"{redundancy['wanted_copies']}{lost}; {redundancy['repairing']} copies are being made"
    )


def nodes(result: Json) -> RenderableType:
    """Members with their state and memory."""
    now = datetime.datetime.now(datetime.UTC)
    table = columns(
        "NODE", "STATE", ">SINCE", "REASON", ">HEARD", "DATA", ">INCARNATION", "ADDRESS", "LANE", "VOTER", ">HELD",
        ">BUDGET", ">USED %", "LABELS",
    )  # fmt: skip
    for node in result["nodes"]:
        used, budget = node["ram_used_bytes"], node["ram_budget_bytes"]
        word = state(node["state"])
        if not node["reachable"] and node["state"] != "DOWN":
            word.append(" (no answer)", style="yellow")
        heard_ms = node["heard_ms_ago"]
        table.add_row(
            node["node_id"],
            word,
            _since(node["since_ms"], now),
            node["reason"],
            "" if heard_ms is None else f"{heard_ms / 1000:.1f} s",
            "" if node["data"] in ("OK", "UNSPECIFIED") else Text(node["data"], style="yellow"),
            str(node["incarnation"]),
            node["address"],
            _lane(node),
            "yes" if node["voter"] else "",
            human_bytes(used),
            human_bytes(budget),
            f"{100 * used / budget:.0f} %" if budget else "",
            ", ".join(f"{name}={value}" for name, value in node["labels"].items()),
        )
    return or_note(table, "no node has registered yet")


def _lane(node: Json) -> Text:
    """The bulk lane: its address, its interface, and why puts are paced, if they are."""
    lane = node["lane"]
    text = Text(node["lane_address"])
    if lane is None:
        return text
    if lane["interface"]:
        text.append(f" {lane['interface']}", style="yellow" if lane["faster_interface"] else "")
    if lane["tls"]:
        text.append(" TLS")
    pacing = lane["pacing"]
    if pacing["reason"] != "none":
        rate = f" {human_bytes(pacing['bytes_per_s'])}/s" if pacing["bytes_per_s"] else ""
        text.append(f" ({pacing['reason']}{rate})", style="yellow")
    return text


def _since(unix_ms: int | None, now: datetime.datetime) -> str:
    if unix_ms is None:
        return ""
    return human_age(datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC).isoformat(), now)


def last_commit(job: Json) -> str:
    """How long ago a job's newest step was committed."""
    age_s = job["last_commit_age_s"]
    return "" if age_s is None else f"{human_seconds(age_s)} ago"


def jobs(result: Json) -> RenderableType:
    """Jobs with their newest step."""
    table = columns("JOB", ">RANKS", ">NEWEST STEP", ">LAST COMMIT", "KEPT STEPS")
    for job in result["jobs"]:
        table.add_row(
            job["job"],
            str(job["world_size"]),
            "none" if job["newest_step"] is None else str(job["newest_step"]),
            last_commit(job),
            ", ".join(map(str, job["kept_steps"])),
        )
    return or_note(table, "no job has saved anything yet")


def checkpoints(result: Json) -> RenderableType:
    """A job's steps."""
    table = columns(">STEP", "STATE", ">RANKS", "RANKS HOLD", ">BYTES", ">COPIES", "PRECISION")
    for step in result["checkpoints"]:
        table.add_row(
            str(step["step"]),
            state(step["state"]),
            f"{step['ranks']} of {step['world_size']}",
            sharing(replicated=step["replicated"]),
            human_bytes(step["bytes"]),
            str(step["copies"]),
            precision(lossy=step["lossy"]) if step["state"] in {"committed", "provisional"} else "",
        )
    shown = or_note(table, "no step of this job is committed or under way")
    return Group(shown, *silent(result["unreachable"], "what only they hold is not listed"))


def replicas(result: Json) -> RenderableType:
    """Shards and their holders; missing holders stand out."""
    now = datetime.datetime.now(datetime.UTC)
    table = columns(
        ">STEP", ">RANK", ">SHARD", "OWNER", "HOLDERS", ">BYTES", ">STORED", ">RATIO", "PRECISION", "DIGEST",
        ">VERIFIED",
    )  # fmt: skip
    for replica in result["replicas"]:
        holders = Text(", ".join(replica["holders"]))
        for node_id in sorted(set(replica["placed"]) - set(replica["holders"])):
            holders.append(" " if holders else "")
            holders.append(f"{node_id} missing", style="red")
        owner = Text(replica["owner"], style="" if replica["owner_holds"] else "dim strike")
        table.add_row(
            str(replica["step"]),
            str(replica["rank"]),
            str(replica["shard"]),
            owner,
            holders,
            human_bytes(replica["bytes"]),
            human_bytes(replica["stored_bytes"]),
            ratio(replica["codecs"]),
            precision(lossy=replica["lossy"]),
            replica["digest"][:12],
            human_age(replica["verified_at"], now),
        )
    shown = or_note(table, "no committed step of this job is kept")
    return Group(shown, *silent(result["unreachable"], "what they hold is not known"))


def inspect(result: Json) -> RenderableType:
    """One step: head, ranks, replicas."""
    head = Table.grid(padding=(0, 2))
    head.add_row("job", result["job"])
    head.add_row("step", f"{result['step']} ({result['state']})")
    head.add_row("ranks", str(result["world_size"]))
    head.add_row("ranks hold", sharing(replicated=result["replicated"]))
    head.add_row("bytes", human_bytes(result["bytes"]))
    head.add_row("copies", f"{result['copies']} on other nodes")
    head.add_row("precision", precision(lossy=result["lossy"]))
    ranks = columns(">RANK", "OWNER", ">INCARNATION", ">SHARDS", ">BYTES", ">RATIO", "MEMORY", "CODECS")
    for rank in result["ranks"]:
        ranks.add_row(
            str(rank["rank"]),
            rank["owner"],
            str(rank["incarnation"]),
            str(rank["shards"]),
            human_bytes(rank["bytes"]),
            ratio(rank["codecs"]),
            memory(rank["memory"]),
            ", ".join(
                f"{codec} {human_bytes(use['raw_bytes'])} → {human_bytes(use['encoded_bytes'])}"
                for codec, use in rank["codecs"].items()
            ),
        )
    return Group(head, Text(), ranks, Text(), replicas(result))


def silent(nodes: Sequence[str], what: str) -> list[RenderableType]:
    """A line about the nodes that did not answer, if any: without them a result is incomplete."""
    return [Text(f"no answer from {', '.join(nodes)}: {what}", style="yellow")] if nodes else []


def verify(result: Json) -> RenderableType:
    """How much was checked, and the bad replicas."""
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
