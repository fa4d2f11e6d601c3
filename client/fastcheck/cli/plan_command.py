"""`fastcheck plan`: what a cluster would survive. Asks nobody; `placement_odds.py` computes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import click

from .. import placement_odds
from . import upkeep_tables as tables
from .options import examples, output_option
from .output import emit

Json = dict[str, Any]

#: Losses that are shown when nobody asks for others, besides one more than is tolerated.
LOSSES = (1, 2, 3, 4)


@click.command(epilog=examples("fastcheck plan --nodes 1000 --tolerate 1 --domains 50 --losses 2 --losses 4"))
@click.option(
    "--nodes", type=click.IntRange(min=2, max=placement_odds.NODES_MAX), required=True, help="How many nodes."
)
@click.option(
    "--tolerate",
    type=click.IntRange(min=1, max=8),
    default=1,
    show_default=True,
    help="Losses at once that are always survived.",
)
@click.option(
    "--losses",
    type=click.IntRange(min=1, max=placement_odds.LOSSES_MAX),
    multiple=True,
    help="Nodes lost at once; may be repeated. Default: a few.",
)
@click.option(
    "--spread",
    type=click.IntRange(min=1),
    help="Holders of one rank. Default: 3, or tolerate if that is more.",
)
@click.option(
    "--domains",
    type=click.IntRange(min=1),
    help="Failure domains, such as racks, with as many nodes each. Default: every node by itself.",
)
@output_option
def plan(
    nodes: int, tolerate: int, losses: tuple[int, ...], spread: int | None, domains: int | None, output: str
) -> None:
    """Compute what a cluster would survive. Asks nobody: no cluster is needed."""
    layout = placement_odds.layout(nodes, tolerate, spread or max(3, tolerate), domains or 0)
    wanted = sorted({*losses}) if losses else sorted({*LOSSES, tolerate + 1})
    emit(
        {
            "nodes": nodes,
            "tolerate": tolerate,
            "copies": tolerate + 1,
            "spread": layout.spread,
            "domains": layout.domains or None,
            "domains_short": layout.domains_short,
            "groups": [
                {"nodes": size, "count": count}
                for size, count in sorted(Counter(sum(group) for group in layout.groups).items())
            ],
            "odds": [_odds(placement_odds.odds(layout, k)) for k in wanted if losses or k <= nodes],
        },
        output,
        tables.plan,
    )


def _odds(odds: placement_odds.Odds) -> Json:
    return {
        "losses": odds.losses,
        "survival": float(odds.survival),
        "loses_one_in": _one_in(odds.survival),
        "gemini_bound": float(odds.gemini_bound),
        "ring": float(odds.ring),
        "everywhere": float(odds.everywhere),
    }


def _one_in(survival: Fraction) -> float | None:
    """1 in how many such losses loses something; None: none does."""
    return None if survival == 1 else float(1 / (1 - survival))
