"""What `--only paper` takes, prints and writes."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import paper
from .paper_goals import BASELINES, OURS, Comparison, Run

CEILING_GOAL, GAIN_GOAL, GAIN_HOLDERS = 0.95, 2.9, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part."""
    plan = paper.Plan()
    parser.add_argument(
        "--paper-states", type=Path, default=plan.states, help="paper: folder where trained models are kept"
    )
    parser.add_argument(
        "--paper-server",
        type=Path,
        default=paper.SERVER_PYTHON,
        help="paper: interpreter that has the storage server (make bench-paper-server)",
    )
    parser.add_argument("--paper-rounds", type=int, default=plan.rounds, help="paper: saves of each system")
    parser.add_argument("--paper-codec", choices=("always", "auto"), default=plan.codec)
    parser.add_argument(
        "--paper-nodes", type=int, nargs="+", choices=list(plan.layouts), default=list(plan.layouts)
    )
    parser.add_argument("--paper-gbits", type=float, nargs="+", default=list(plan.gbits_per_s))


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print, and give back everything for the JSON file."""
    if arguments.quick:
        plan = paper.quick(arguments.paper_states)
    else:
        plan = paper.Plan()
        plan = dataclasses.replace(
            plan,
            layouts={nodes: plan.layouts[nodes] for nodes in arguments.paper_nodes},
            gbits_per_s=tuple(arguments.paper_gbits),
            rounds=arguments.paper_rounds,
            codec=arguments.paper_codec,
            states=arguments.paper_states,
        )
    results = paper.measure(plan, say, arguments.paper_server)
    comparisons: list[Comparison] = results["comparisons"]
    print_comparisons(comparisons)
    for ceiling in results["server_bytes_per_s"]:
        up, down = (statistics.median(ceiling[way]) * 8e-9 for way in ("up", "down"))
        print(f"storage server alone, links not shaped: {up:.2f} Gbit/s up, {down:.2f} Gbit/s down")
    for system, reason in results["not_run"].items():
        print(f"{system}: not run: {reason}")
    return results | {"comparisons": [comparison.to_json() for comparison in comparisons]}


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    """One row each."""
    table = Table(title="The paper's experiment (median, lowest to highest)")
    for column in ("where", "what", "seconds", *(f"less than {name}" for name in BASELINES), "paper", "goal"):
        table.add_column(column)
    table.add_column("bytes per byte sent")
    table.add_column("limits")
    for c in comparisons:
        table.add_row(
            str(c.where),
            f"{c.what}, {c.system}",
            _seconds(c.runs),
            *(_reduction(c, name) for name in BASELINES),
            f"{c.paper:.1f} %",
            _goal(c),
            f"{c.codec_ratio:.2f}",
            limits(c),
        )
    Console(width=200).print(table)


def limits(comparison: Comparison) -> str:
    """How near the links' limits it came, with the goals of that; and how busy the machine was."""
    said = [f"at most {comparison.possible:.0f} % possible"]
    if (share := comparison.ceiling_share) is not None:
        said.append(f"{share:.1%} of the ceiling{'' if share >= CEILING_GOAL else ', MISSED 95 %'}")
    if (gain := comparison.holders_gain) is not None:
        exact = comparison.system == OURS
        missed = exact and comparison.where.holders == GAIN_HOLDERS and gain < GAIN_GOAL
        said.append(f"{gain:.2f} x one holder{f', MISSED {GAIN_GOAL}' if missed else ''}")
    said.append(f"{statistics.median(run.cores_busy for run in comparison.runs):.1f} cores busy")
    return "; ".join(said)


def _seconds(runs: Sequence[Run]) -> str:
    times = [run.seconds for run in runs]
    return f"{statistics.median(times):.3g} ({min(times):.3g} to {max(times):.3g}, n={len(times)})"


def _reduction(comparison: Comparison, baseline: str) -> str:
    if baseline not in comparison.baselines:
        return "not run"
    spread = comparison.reductions(baseline)
    within = f" ({min(spread):.1f} to {max(spread):.1f})" if spread else ""
    return f"{comparison.reduction(baseline):.1f} %{within} of {_seconds(comparison.baselines[baseline])}"


def _goal(comparison: Comparison) -> str:
    if comparison.goal is None:
        return ""
    return f"{comparison.goal:.0f} %{'' if comparison.met else ', MISSED'}"
