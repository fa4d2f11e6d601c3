"""`fastcheck top`: the cluster as it is, again and again, until it is interrupted.

A `snapshot` is made of one round of answers and the snapshot before it; `view` renders one. Both are pure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ..admin import AdminClient
from ..errors import FastCheckError
from . import tables
from .options import admin_options, examples
from .output import Exit, Json, emit, exit_for_health, human_bytes, stdout_console

_BAR_CELLS = 20
#: From this share on a node's memory is called near full, as by `fastcheck status`.
_NEAR_FULL = 0.9
#: Counter → what its growth per second is called.
_RATES = {
    "bytes_staged": "staged_bytes_per_s",
    "bytes_sent": "sent_bytes_per_s",
    "bytes_received": "received_bytes_per_s",
    "repair_bytes": "repaired_bytes_per_s",
}


def snapshot(status: Json, nodes: Json, jobs: Json, at_s: float, before: Json | None) -> Json:
    """One snapshot.

    Args:
        at_s: when, by any clock that only goes forward.
        before: the snapshot before, for rates; None: rates are null.
    """
    earlier = {} if before is None else {node["node_id"]: node for node in before["nodes"]}
    seconds = 0.0 if before is None else at_s - before["at_s"]
    return {
        "at_s": at_s,
        "health": status["health"],
        "codes": status["codes"],
        "leader": status["leader"],
        "epoch": status["epoch"],
        "nodes_up": status["nodes_up"],
        "nodes_total": status["nodes_total"],
        "nodes": [
            {
                **{key: node[key] for key in _NODE_KEYS},
                **_rates(node, earlier.get(node["node_id"]), seconds),
            }
            for node in nodes["nodes"]
        ],
        "jobs": [
            {
                **{key: job[key] for key in _JOB_KEYS},
                "steps_per_s": _steps_per_s(job, before, seconds),
            }
            for job in jobs["jobs"]
        ],
    }


_JOB_KEYS = ("job", "world_size", "newest_step", "last_commit_at", "last_commit_age_s", "kept_steps")
_NODE_KEYS = (
    "node_id", "state", "incarnation", "reachable", "voter", "data", "ram_used_bytes", "ram_budget_bytes",
    "heard_ms_ago", "counters",
)  # fmt: skip


def _rates(node: Json, earlier: Json | None, seconds: float) -> Json:
    """Rates per second; null where unknown: a node that is new, silent, or counts from 0 again."""
    rates: Json = {}
    for counter, name in _RATES.items():
        now = node["counters"].get(counter)
        then = None if earlier is None else earlier["counters"].get(counter)
        told = now is not None and then is not None and seconds > 0 and now >= then
        rates[name] = round((now - then) / seconds) if told else None
    return rates


def _steps_per_s(job: Json, before: Json | None, seconds: float) -> float | None:
    then = next((j["newest_step"] for j in (before or {"jobs": []})["jobs"] if j["job"] == job["job"]), None)
    if then is None or job["newest_step"] is None or seconds <= 0 or job["newest_step"] < then:
        return None
    steps: int = job["newest_step"] - then
    return round(steps / seconds, 3)


def view(moment: Json, notice: str = "") -> RenderableType:
    """A screenful: health, what is wrong, nodes, jobs.

    Args:
        notice: why the snapshot is an old one; empty: it is not.
    """
    head = Text.assemble(
        tables.state(moment["health"]),
        f"   {moment['nodes_up']} of {moment['nodes_total']} nodes up   leader ",
        Text(moment["leader"] or "none", style="" if moment["leader"] else "red"),
        f"   epoch {moment['epoch']}",
    )
    parts: list[RenderableType] = [head]
    if notice:
        parts.append(Text(notice, style="bold yellow"))
    for code in moment["codes"]:
        parts.append(Text(f"{code['code']}: {code['detail']}", style=tables.STYLES.get(code["severity"], "")))
    parts += [Text(), _nodes(moment["nodes"]), Text(), _jobs(moment["jobs"])]
    return Panel(Group(*parts), title="fastcheck top", title_align="left", border_style="dim")


def _nodes(nodes: list[Json]) -> RenderableType:
    table = tables.columns(
        "NODE", "STATE", ">HEARD", "MEMORY", ">HELD", ">STAGED/s", ">SENT/s", ">RECEIVED/s", ">REPAIRED/s"
    )
    for node in nodes:
        word = tables.state(node["state"])
        if not node["reachable"] and node["state"] != "DOWN":
            word.append(" (no answer)", style="yellow")
        heard_ms = node["heard_ms_ago"]
        table.add_row(
            f"{node['node_id']}{' *' if node['voter'] else ''}",
            word,
            "" if heard_ms is None else f"{heard_ms / 1000:.1f} s",
            _bar(node["ram_used_bytes"], node["ram_budget_bytes"]),
            human_bytes(node["ram_used_bytes"]),
            *("" if node[name] is None else human_bytes(node[name]) for name in _RATES.values()),
        )
    return tables.or_note(table, "no node has registered yet")


def _bar(used: int, budget: int) -> Text:
    """A bar that shows how full a memory is."""
    share = min(1.0, used / budget) if budget else 0.0
    filled = round(share * _BAR_CELLS)
    style = "red" if share > _NEAR_FULL else "green"
    return Text.assemble(
        ("█" * filled, style), ("░" * (_BAR_CELLS - filled), "dim"), f" {100 * share:3.0f} %"
    )


def _jobs(jobs: list[Json]) -> RenderableType:
    table = tables.columns("JOB", ">RANKS", ">NEWEST STEP", ">LAST COMMIT", ">STEPS/s", "KEPT STEPS")
    for job in jobs:
        rate = job["steps_per_s"]
        table.add_row(
            job["job"],
            str(job["world_size"]),
            "none" if job["newest_step"] is None else str(job["newest_step"]),
            tables.last_commit(job),
            "" if rate is None else f"{rate:.2f}",
            ", ".join(map(str, job["kept_steps"])),
        )
    return tables.or_note(table, "no job has saved anything yet")


@click.command(
    epilog=examples(
        "fastcheck top --interval 1",
        "fastcheck top -o json   one moment, with rates",
    )
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="End after so many looks. Default: on a terminal never, else 2, the fewest that show rates.",
)
@admin_options
@click.pass_context
def top(
    ctx: click.Context, interval_s: float, count: int | None, address: str, timeout_s: float, output: str
) -> None:
    """Show nodes, memory, rates and jobs, live. Exits as `status` does for the last look."""
    live = output == "table" and sys.stdout.isatty()
    if count is None and not live:
        count = 2
    with AdminClient(address, timeout_s=timeout_s) as client:
        looks = _looks(client, interval_s, count)
        last = _show_live(looks, stdout_console()) if live else _last(looks)
    if last is None:
        ctx.exit(Exit.UNREACHABLE)
    if not live:
        emit(last, output, view)
    ctx.exit(exit_for_health(last["health"]))


def _looks(
    client: AdminClient, interval_s: float, count: int | None
) -> Iterator[Callable[[Json | None], Json]]:
    """Looks, one every `interval_s`: each takes the last snapshot and returns a new one."""
    asked = 0
    while count is None or asked < count:
        if asked:
            time.sleep(interval_s)
        asked += 1
        yield lambda before: snapshot(
            client.status(), client.nodes(), client.jobs(), time.monotonic(), before
        )


def _last(looks: Iterator[Callable[[Json | None], Json]]) -> Json | None:
    moment: Json | None = None
    for look in looks:
        moment = look(moment)
    return moment


def _show_live(looks: Iterator[Callable[[Json | None], Json]], console: Console) -> Json | None:
    """Refresh the screen until interrupted. While the cluster doesn't answer, show the last snapshot and the error."""
    moment: Json | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            for look in looks:
                try:
                    moment, notice = look(moment), ""
                except FastCheckError as error:
                    if moment is None:
                        raise
                    notice = f"no answer, this is {time.monotonic() - moment['at_s']:.0f} s old: {error}"
                screen.update(view(moment, notice), refresh=True)
    except KeyboardInterrupt:
        pass  # how one leaves
    return moment
