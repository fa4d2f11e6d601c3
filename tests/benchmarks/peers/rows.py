"""From the rounds of all candidates to one table: every figure as a multiple of a one-thread copy of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

#: What a table and the JSON call the figures, and what each is.
FIGURES = {
    "first": "first save blocks",
    "blocked": "save blocks",
    "safe": "until safe",
    "restore": "restore",
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One candidate: multiples of memcpy by figure, one per round of all its starts."""

    title: str
    safe: str
    versions: Mapping[str, str]
    multiples: Mapping[str, Sequence[float]]
    rounds: int
    #: Rounds whose restore was not identical, and the first tensor that was not.
    wrong_rounds: int
    first_wrong: str
    #: Why it, or one of its starts, was not run; empty when all were.
    reason: str

    @property
    def was_run(self) -> bool:
        """Whether there is any figure."""
        return self.rounds > 0


def side_of(found: Mapping[str, Any]) -> Side:
    """From what the JSON has about one candidate."""
    starts = found["starts"]

    def per_round(name: str) -> list[float]:
        return [
            seconds / memcpy_s
            for start in starts
            for seconds, memcpy_s in zip(start[name], start["memcpy_s"], strict=True)
        ]

    multiples = {
        "first": [start["first_blocked_s"] / start["first_memcpy_s"] for start in starts],
        "blocked": per_round("blocked_s"),
        "safe": per_round("safe_s"),
        "restore": per_round("restore_s"),
    }
    return Side(
        title=found["title"],
        safe=found["safe"],
        versions=found["versions"],
        multiples=multiples,
        rounds=sum(len(start["memcpy_s"]) for start in starts),
        wrong_rounds=sum(start["wrong_rounds"] for start in starts),
        first_wrong=next((start["first_wrong"] for start in starts if start["first_wrong"]), ""),
        reason=found["reason"],
    )


def multiples_text(multiples: Sequence[float]) -> str:
    """Median, lowest to highest."""
    if not multiples:
        return ""
    return f"{statistics.median(multiples):.3g} ({min(multiples):.3g} to {max(multiples):.3g})"


def cells(side: Side) -> list[str]:
    """One row of the table."""
    named = [side.title, ", ".join(f"{name} {version}" for name, version in side.versions.items())]
    if not side.was_run:
        return [*named, f"not run: {side.reason}", *[""] * (len(COLUMNS) - 3)]
    identical = f"NO, in {side.wrong_rounds} rounds: {side.first_wrong}" if side.wrong_rounds else "yes"
    if side.reason:
        identical += f"; a start failed: {side.reason}"
    figures = [multiples_text(side.multiples[figure]) for figure in FIGURES]
    return [*named, *figures, side.safe, identical, str(side.rounds)]


COLUMNS = ("what", "versions", *FIGURES.values(), "safe means", "restored identically", "rounds")


def print_sides(sides: Sequence[Side], memcpy_s: Sequence[float], state_bytes: int) -> None:
    """For a terminal."""
    copy = f"{statistics.median(memcpy_s) * 1e3:.3g} ms" if memcpy_s else "not measured"
    table = Table(
        title=f"Side by side, {state_bytes / 1e9:.3g} GB: multiples of a one-thread copy of the same bytes "
        f"({copy}), median (lowest to highest)"
    )
    for column in COLUMNS:
        table.add_column(column)
    for side in sides:
        table.add_row(*cells(side))
    Console(width=210).print(table)


def markdown(sides: Sequence[Side]) -> str:
    """The same table for the documentation."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(side) for side in sides)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
