"""What a person sees while the demo runs: the view that the scenario changes, its rendering, and the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..cli.output import human_bytes
from ..cli.tables import state as state_text

_STORY_LINES = 9
_BAR_WIDTH = 40
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass
class RunProgress:
    """One run of the training."""

    name: str
    steps: int
    step: int = 0
    committed: int | None = None
    #: State bytes over bytes sent.
    ratio: float | None = None
    losses: list[float] = field(default_factory=list)


@dataclass
class DemoView:
    """Everything on the screen."""

    title: str = "FastCheck"
    started_at_s: float = field(default_factory=time.monotonic)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    leader: str | None = None
    lost_node: str | None = None
    runs: list[RunProgress] = field(default_factory=list)
    story: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=200))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last values as a line of bars, the lowest the shortest."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round((v - low) / span * (len(_SPARKS) - 1))] for v in shown)


def render(view: DemoView) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_nodes(view), Text()] if view.nodes else []
    parts += [_runs(view), Text(), _story(view)]
    return Panel(Group(*parts), title=view.title, title_align="left", border_style="cyan", box=box.ROUNDED)


def _nodes(view: DemoView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in ("NODE", "STATE", "REGISTRY", "TRAINS", "CHECKPOINTS IN RAM"):
        table.add_column(column)
    for index, node in enumerate(view.nodes):
        name = node["node_id"]
        lost = name == view.lost_node
        role = "★ leader" if name == view.leader and not lost else "voter" if node["voter"] else ""
        table.add_row(
            Text(name, style="bold red" if lost else ""),
            Text("KILLED", style="bold red")
            if lost and node["state"] != "DOWN"
            else state_text(node["state"]),
            role,
            f"rank {index}" if not lost else Text("nothing", style="red"),
            human_bytes(node["ram_used_bytes"]) if not lost else Text("lost", style="red"),
        )
    return table


def _runs(view: DemoView) -> Table:
    table = Table.grid(padding=(0, 2))
    for run in view.runs:
        line = f"step {run.step:>2} of {run.steps}"
        if run.losses:
            line += f"   loss {run.losses[-1]:.3f}"
        committed = "" if run.committed is None else f"committed {run.committed}"
        table.add_row(
            Text(run.name, style="bold"),
            ProgressBar(total=run.steps, completed=run.step, width=_BAR_WIDTH, finished_style="green"),
            line,
            Text(committed, style="green"),
            Text("" if run.ratio is None else f"sent 1/{run.ratio:.1f}", style="magenta"),
            Text(sparkline(run.losses), style="cyan"),
        )
    return table


def _story(view: DemoView) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for at_s, text, style in list(view.story)[-_STORY_LINES:]:
        table.add_row(Text(f"{at_s:6.1f} s", style="dim"), Text(text, style=style))
    return table


def summary(result: dict[str, Any]) -> RenderableType:
    """The end of the story in figures."""
    good = result["bit_identical"] and result["losses_identical"]
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, show_edge=False)
    raw, sent = result["bytes_raw"], result["bytes_sent"]
    stall, staged, copy = result["save_stall_ms"], result["save_copy_ms"], result["memcpy_ms"]
    rows = [
        ("trained", f"{result['params']:,} parameters, {result['ranks']} ranks, {result['steps']} steps"),
        ("lost", f"{result['killed_node']} at step {result['killed_at_step']}, with all its memory"),
        ("resumed", f"after step {result['restored_step']}, read from the RAM of the others"),
        (
            "recovery",
            f"{result['recovery_s']:.1f} s from the kill to the next step done: "
            f"{result['detection_s']:.1f} to notice, {result['restart_s']:.1f} to start processes, "
            f"{result['load_s']:.1f} to load, {result['first_step_s']:.1f} to train",
        ),
        (
            "save stalls",
            "not measured"
            if stall is None
            else f"{stall:.1f} ms per step, {staged:.1f} of it copying; a plain copy takes {copy:.1f} ms",
        ),
        (
            "sent",
            f"{human_bytes(sent)} per copy, for {human_bytes(raw)} of state"
            + (f": {result['ratio']:.1f} times smaller" if result["ratio"] else ""),
        ),
    ]
    for name, text in rows:
        table.add_row(Text(name, style="bold"), text)
    verdict = (
        "identical bit for bit to a run that was never interrupted: every loss and the final state"
        if good
        else "NOT identical to the uninterrupted run: " + "; ".join(result["differences"])
    )
    mark = Text("✔ " if good else "✘ ", style="bold green" if good else "bold red")
    return Group(Text(), table, Text(), mark + Text(verdict, style="bold"))


_REFRESH_PER_S = 6


class Display:
    """Shows a view live on a terminal; elsewhere one line per thing that happens. A context manager."""

    def __init__(self, console: Console) -> None:
        self.view = DemoView()
        self._console = console
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=console,
                refresh_per_second=_REFRESH_PER_S,
                transient=False,
            )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, text: str, style: str = "") -> None:
        """One sentence of the story."""
        at_s = time.monotonic() - self.view.started_at_s
        self.view.story.append((at_s, text, style))
        if self._live is None:
            self._console.print(f"{at_s:6.1f} s  {text}", style=style, markup=False, soft_wrap=True)

    def step(self, run: RunProgress, step: int, loss: float) -> None:
        """A run got one step further."""
        if step <= run.step:
            return
        run.step = step
        run.losses.append(loss)
        if self._live is None:
            committed = "" if run.committed is None else f", newest committed step {run.committed}"
            self.tell(f"{run.name}: step {step} of {run.steps}, loss {loss:.4f}{committed}")

    def _render(self) -> RenderableType:
        return render(self.view)
