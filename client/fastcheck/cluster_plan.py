"""What a planned cluster survives: the arithmetic behind `fastcheck plan`. Pure.

The placement groups are the daemon's own (`fastcheck_proto.placement_groups`). The worst placement is assumed: in a
group any `tolerate` + 1 nodes in different failure domains hold all copies of some shard, as they do when every node
has many ranks. A loss is survived when in every group the lost nodes lie in at most `tolerate` domains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from fastcheck_proto.placement_groups import group_bounds, interleaved
from fastcheck_proto.placement_odds import gemini_bound, product

from .errors import InvalidArgumentError

NODES_MAX = 4096
LOSSES_MAX = 256


@dataclass(frozen=True)
class SurvivalOdds:
    """The odds when `losses` nodes are lost at once, each choice of nodes being equally likely."""

    losses: int
    #: Probability that nothing committed is lost.
    survival: Fraction
    #: Gemini's bound, for groups of just tolerate + 1 nodes.
    gemini_bound: Fraction
    #: For comparison: all copies of a node on the next ones, or shards of everyone everywhere.
    ring: Fraction
    everywhere: Fraction


@dataclass(frozen=True)
class ClusterPlan:
    """How a cluster would be cut into placement groups."""

    nodes: int
    tolerate: int
    spread: int
    #: Failure domains, with equally many nodes up to one. 0: every node is a domain by itself.
    domains: int
    #: For each group, how many of its nodes each of its domains has.
    groups: tuple[tuple[int, ...], ...]

    @property
    def domains_short(self) -> bool:
        """There are fewer domains than copies: losing one may lose something."""
        return 0 < self.domains <= self.tolerate


def plan_cluster(nodes: int, tolerate: int, spread: int, domains: int = 0) -> ClusterPlan:
    """Cut `nodes` into groups as the daemon does.

    Raises:
        InvalidArgumentError: no such cluster can be.
    """
    if not tolerate < nodes <= NODES_MAX:
        raise InvalidArgumentError(
            f"{tolerate} losses take at least {tolerate + 1} nodes, and at most {NODES_MAX} are possible: "
            f"not {nodes}"
        )
    if not 1 <= tolerate <= spread:
        raise InvalidArgumentError(
            f"spread {spread} must be at least tolerate {tolerate}, and that at least 1"
        )
    if not 0 <= domains <= nodes:
        raise InvalidArgumentError(f"{nodes} nodes cannot lie in {domains} failure domains")
    # By node: the number of its domain, or its own.
    sizes = [nodes * (d + 1) // domains - nodes * d // domains for d in range(domains)] or [1] * nodes
    labels = [number for number, size in enumerate(sizes) for _ in range(size)]
    order = interleaved({f"{node:04}": f"domain-{label:04}" for node, label in enumerate(labels)})
    # Copies cannot be kept apart when domains are short: then it is each node by itself that counts.
    apart = domains > tolerate
    groups = []
    for first, behind in group_bounds(nodes, spread, domains or nodes):
        members = Counter(labels[int(node)] if apart else node for node in order[first:behind])
        groups.append(tuple(sorted(members.values())))
    return ClusterPlan(nodes, tolerate, spread, domains, tuple(groups))


def survival_odds(plan: ClusterPlan, losses: int) -> SurvivalOdds:
    """The odds of a plan.

    Raises:
        InvalidArgumentError: more losses than nodes, or than `LOSSES_MAX`.
    """
    if not 0 <= losses <= min(plan.nodes, LOSSES_MAX):
        raise InvalidArgumentError(f"losses must be from 0 to {min(plan.nodes, LOSSES_MAX)}, not {losses}")
    survived = [1]
    for group, times in sorted(Counter(plan.groups).items()):
        one = _group(group, plan.tolerate)
        for _ in range(times):
            survived = product(survived, one, losses)
    ways = comb(plan.nodes, losses)
    return SurvivalOdds(
        losses=losses,
        survival=Fraction(survived[losses] if losses < len(survived) else 0, ways),
        gemini_bound=gemini_bound(plan.nodes, plan.tolerate + 1, losses),
        ring=Fraction(_ring(plan.nodes, plan.tolerate + 1, losses), ways),
        everywhere=Fraction(int(losses <= plan.tolerate)),
    )


def _group(domains: Sequence[int], tolerate: int) -> list[int]:
    """By number of nodes lost in a group: the choices that hit at most `tolerate` of its domains."""
    #: By domains hit, by nodes lost.
    choices = [[1]]
    for size in domains:
        hit = [0, *(comb(size, lost) for lost in range(1, size + 1))]
        after = [list(counts) for counts in choices] + [[0]]
        for already, counts in enumerate(choices):
            after[already + 1] = _sum(after[already + 1], product(counts, hit, sum(domains)))
        choices = after[: tolerate + 1]
    total = [0]
    for counts in choices:
        total = _sum(total, counts)
    return total


def _ring(nodes: int, copies: int, losses: int) -> int:
    """Choices of nodes on a ring of which no `copies` are adjacent."""
    if losses == nodes:
        return int(losses < copies)
    # Runs of fewer than `copies` between those that are left; each circle is counted once per one left.
    runs = [1]
    for _ in range(nodes - losses):
        runs = product(runs, [1] * copies, losses)
    return nodes * (runs[losses] if losses < len(runs) else 0) // (nodes - losses)


def _sum(left: Sequence[int], right: Sequence[int]) -> list[int]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return [a + (shorter[i] if i < len(shorter) else 0) for i, a in enumerate(longer)]
