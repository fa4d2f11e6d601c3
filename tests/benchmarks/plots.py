"""Pictures of what a benchmark wrote: `python -m tests.benchmarks.plots FILE.json --out DIR`.

They are made from the JSON alone, so that any run, old ones too, can be drawn again. Each part of a file that can be
drawn gives a file of its own; a file without any is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .peers.rows import FIGURES, Side, side_of
from .svg import Bar, Chart, Group, draw

Results = Mapping[str, Any]
Figures = Sequence[Mapping[str, Any]]

#: Where goals stand, as multiples of memcpy; drawn as a line.
PEER_TITLES = {
    "blocked": "How long a save blocks training, warm",
    "first": "How long the first save blocks training",
    "safe": "Until a save is safe, by each one's own notion",
    "restore": "Restore into tensors that exist",
}
REASON_LENGTH = 72


def side_by_side(results: Results) -> Iterator[tuple[str, Chart]]:
    """One picture per figure; those that were not run stand there with the reason."""
    sides = [side_of(row) for row in results.get("side_by_side", [])]
    if not sides:
        return
    for figure in FIGURES:
        bars = [_bar_of(side, figure) for side in sides]
        chart = Chart(
            PEER_TITLES[figure],
            "multiples of a one-thread copy of the same bytes",
            [Group("", bars)],
            (1.0, "memcpy"),
        )
        yield f"peers-{figure}", chart


def _bar_of(side: Side, figure: str) -> Bar:
    label = side.title + (", NOT IDENTICAL" if side.wrong_rounds and figure == "restore" else "")
    text = f"not run: {side.reason}"
    if len(text) > REASON_LENGTH:
        text = text[: REASON_LENGTH - 1] + "…"
    return Bar(label, side.multiples[figure], ours=side.title.startswith("FastCheck"), text=text)


def detection(results: Results) -> Iterator[tuple[str, Chart]]:
    """Kills until everybody knows, and until the next commit."""
    figures = [figure for figure in _figures(results, r"killed until|SIGKILL") if len(figure["runs"]) > 1]
    if figures:
        yield "detection", Chart("After a kill", figures[0]["unit"], [Group("", _with_limits(figures))])


def restore(results: Results) -> Iterator[tuple[str, Chart]]:
    """Saving and restoring next to their limits; one picture per unit."""
    for unit, name in (("ms", "blocking"), ("GB/s", "rates")):
        found = _figures(results, r"^(save blocks|restore from|replicated to|commit after)")
        figures = [figure for figure in found if figure["unit"] == unit]
        if figures:
            groups = [Group(figure["name"], _limited(figure)) for figure in figures]
            yield f"transfer-{name}", Chart("Saving and restoring next to their limits", unit, groups)


def links(results: Results) -> Iterator[tuple[str, Chart]]:
    """Replication over links of several rates: raw, by the planner's choice, always encoded."""
    groups: dict[str, list[Bar]] = {}
    for figure in _figures(results, r"^replicate over "):
        link, kind = figure["name"].removeprefix("replicate over ").rsplit(", ", 1)
        groups.setdefault(link, []).append(Bar(kind, figure["runs"], ours=kind == "codec: auto"))
    if groups:
        found = [Group(link, bars) for link, bars in groups.items()]
        yield "links", Chart("From seal to last acknowledgement, by link", "seconds", found)


def codec(results: Results) -> Iterator[tuple[str, Chart]]:
    """Ratios next to those of general compressors on the same bytes."""
    rows = [row for row in results.get("codec", []) if not row["lossy"]]
    if not rows:
        return
    groups = [
        Group(
            f"{row['name']}, steps {row['base_step']} to {row['step']}",
            [
                Bar("FastCheck", [row["whole_ratio"]], ours=True),
                *(Bar(name, [peer[0]]) for name, peer in row["peers"].items()),
            ],
        )
        for row in rows
    ]
    yield "codec", Chart("Original bytes per encoded byte", "ratio", groups)


def growth(results: Results) -> Iterator[tuple[str, Chart]]:
    """Multiples of memcpy by size and by nodes; memory per node."""
    for name, pattern, title, axis in (
        (
            "growth-size",
            r"^growth in bytes",
            "Growth in bytes",
            "multiples of a one-thread copy of the same bytes",
        ),
        (
            "growth-nodes",
            r"^growth in nodes",
            "Growth in nodes",
            "multiples of the link's payload time",
        ),
        ("memory", r"^memory per node", "Memory of a node, all included", "multiples of its state"),
    ):
        groups: dict[str, list[Bar]] = {}
        for figure in _figures(results, pattern):
            what, _, row = figure["name"].partition(": ")[2].rpartition(", ")
            runs = figure["runs"]
            if figure["limit_runs"]:
                runs = [run / limit for run, limit in zip(runs, figure["limit_runs"], strict=True)]
            groups.setdefault(what, []).append(Bar(row, runs, ours=True))
        if groups:
            yield name, Chart(title, axis, [Group(what, bars) for what, bars in groups.items()])


PARTS: tuple[Callable[[Results], Iterator[tuple[str, Chart]]], ...] = (
    side_by_side,
    detection,
    restore,
    links,
    codec,
    growth,
)


def charts(results: Results) -> Iterator[tuple[str, Chart]]:
    """All that can be drawn of a file, by name."""
    for part in PARTS:
        yield from part(results)


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Draw all of it; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, chart in charts(results):
        path = folder / f"{name}.svg"
        path.write_text(draw(chart))
        paths.append(path)
    return paths


def _figures(results: Results, pattern: str) -> Figures:
    return [figure for figure in results.get("figures", []) if re.search(pattern, figure["name"])]


def _limited(figure: Mapping[str, Any]) -> list[Bar]:
    bars = [Bar("FastCheck", figure["runs"], ours=True)]
    return [*bars, Bar(figure["limit"], figure["limit_runs"])] if figure["limit_runs"] else bars


def _with_limits(figures: Figures) -> list[Bar]:
    return [Bar(figure["name"], figure["runs"], ours=True) for figure in figures]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw one file."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plots", description=__doc__)
    parser.add_argument("file", type=Path, help="what a benchmark wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    chosen = parser.parse_args(arguments)
    paths = write_plots(json.loads(chosen.file.read_text()), chosen.out)
    if not paths:
        sys.exit(f"{chosen.file} has nothing that can be drawn")
    for path in paths:
        print(path)


if __name__ == "__main__":
    main()
