"""Rows of figures: medians with spread, ratios to a limit, a table for people and JSON for machines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured thing, and the limit it is compared with."""

    name: str
    unit: str
    runs: Sequence[float]
    #: The limit's runs in the same rounds, and its name; empty when there is none.
    limit_runs: Sequence[float] = ()
    limit: str = ""
    #: What is wanted of the ratio (or of the value, without a limit), in words.
    goal: str = ""

    @property
    def median(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)

    @property
    def ratio(self) -> float | None:
        """Median of the figure over the median of its limit."""
        return self.median / statistics.median(self.limit_runs) if self.limit_runs else None

    def to_json(self) -> dict[str, Any]:
        """Every run, and what the table shows."""
        return dataclasses.asdict(self) | {"median": self.median, "ratio": self.ratio}


def print_table(figures: Sequence[Figure]) -> None:
    """One row per figure."""
    table = Table(title="FastCheck benchmarks (median, lowest to highest)")
    for column in ("what", "figure", "limit of the same run", "ratio", "goal"):
        table.add_column(column)
    for figure in figures:
        limit = f"{figure.limit}: {spread(figure.limit_runs, figure.unit)}" if figure.limit_runs else ""
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        table.add_row(figure.name, spread(figure.runs, figure.unit), limit, ratio, figure.goal)
    Console(width=170).print(table)


def spread(runs: Sequence[float], unit: str) -> str:
    """Median, lowest to highest, how many."""
    return f"{statistics.median(runs):.4g} ({min(runs):.3g} to {max(runs):.3g}, n={len(runs)}) {unit}"
