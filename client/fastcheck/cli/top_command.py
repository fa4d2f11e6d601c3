"""`fastcheck top`: the cluster as it is, again and again, until it is interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.live import Live

from ..admin import AdminClient
from ..errors import FastCheckError
from .options import admin_options, examples
from .output import Exit, Json, emit, exit_for_health, stdout_console
from .top_view import snapshot, view


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
    """Questions, one every `interval_s`: each gets the moment before it and gives the newest."""
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
    """Until interrupted. A cluster that stops to answer keeps its last moment on the screen, and why it is old."""
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
