"""What `--only paper` takes, prints and writes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import paper
from .paper_goals import BASELINES, EQUAL, HOLDERS, OURS, Comparison, Run

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
    parser.add_argument("--paper-codec", choices=("always", "auto"), default=plan.codec)
    some = parser.add_argument_group("a part of the paper's experiment")
    some.add_argument(
        "--paper-nodes", type=int, nargs="+", choices=list(plan.layouts), default=list(plan.layouts)
    )
    some.add_argument("--paper-links", nargs="+", choices=(EQUAL, HOLDERS), default=[EQUAL, HOLDERS])
    some.add_argument("--paper-gbits", type=float, nargs="+", default=list(plan.gbits_per_s))
    some.add_argument(
        "--paper-link-scale",
        type=float,
        default=plan.link_scale,
        help="below 1: a scale model, all links that much slower, for nodes that share few cores; with --paper-models",
    )
    some.add_argument("--paper-stages", type=int, nargs="+", default=list(plan.stages), help="training steps")
    some.add_argument("--paper-models", type=int, default=plan.models, help="in the state, 40 MB each")
    some.add_argument("--paper-rounds", type=int, default=plan.rounds, help="saves of each system")
    some.add_argument("--paper-recoveries", type=int, default=plan.recoveries, help="of each system")


def plan_of(arguments: argparse.Namespace) -> paper.Plan:
    """The experiment that was asked for.

    Raises:
        SystemExit: none of the nodes that were asked for has such links.
    """
    if arguments.quick:
        plan = paper.quick(arguments.paper_states)
        return dataclasses.replace(plan, link_scale=arguments.paper_link_scale)
    layouts = {
        nodes: tuple(links for links in paper.Plan().layouts[nodes] if links in arguments.paper_links)
        for nodes in arguments.paper_nodes
    }
    if not any(layouts.values()):
        sys.exit(f"nothing to run: {arguments.paper_nodes} nodes have no links {arguments.paper_links}")
    return paper.Plan(
        layouts={nodes: links for nodes, links in layouts.items() if links},
        gbits_per_s=tuple(arguments.paper_gbits),
        link_scale=arguments.paper_link_scale,
        stages=tuple(sorted(arguments.paper_stages)),
        models=arguments.paper_models,
        rounds=arguments.paper_rounds,
        recoveries=arguments.paper_recoveries,
        codec=arguments.paper_codec,
        states=arguments.paper_states,
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print, and give back everything for the JSON file."""
    plan = plan_of(arguments)
    results = paper.measure(plan, say, arguments.paper_server)
    comparisons: list[Comparison] = results["comparisons"]
    print_comparisons(comparisons)
    for nodes in plan.layouts:
        print(cores_said(nodes, len(os.sched_getaffinity(0)), plan.link_scale))
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


def cores_said(nodes: int, cores: int, link_scale: float) -> str:
    """How much computing stood beside how much network."""
    own = cores / nodes
    said = f"{nodes} nodes shared {cores} cores: {own:.2g} each"
    if link_scale != 1:
        said += (
            f"; scale model: to links 1/{1 / link_scale:g} as fast that is what {own / link_scale:.2g} cores "
            "are at the full rate"
        )
    return said


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
    model = "" if comparison.where.link_scale == 1 else " (scale model)"
    return f"{comparison.goal:.0f} %{model}{'' if comparison.met else ', MISSED'}"
