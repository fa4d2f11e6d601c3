"""Puts the demo's view on a terminal while it changes, or prints plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live

from .view import DemoView, RunProgress, render

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
