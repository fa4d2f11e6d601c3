"""What `fastcheck plan` computes is what the daemon's placement comes to."""

import json
from fractions import Fraction
from itertools import combinations

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck import placement_odds
from fastcheck.cli.app import cli
from fastcheck.errors import InvalidArgumentError
from fastcheckd.placement import Groups, odds, place


def members_of(nodes, domains):
    """As `plan` lays them out: domains of equal size, give or take one."""
    if not domains:
        return {f"node-{n:04}": "" for n in range(nodes)}
    sizes = [nodes * (d + 1) // domains - nodes * d // domains for d in range(domains)]
    labels = [f"rack-{d:03}" for d, size in enumerate(sizes) for _ in range(size)]
    return {f"node-{n:04}": label for n, label in enumerate(labels)}


@st.composite
def clusters(draw, nodes_max=40):
    nodes = draw(st.integers(2, nodes_max))
    tolerate = draw(st.integers(1, min(3, nodes - 1)))
    spread = draw(st.integers(tolerate, 6))
    domains = draw(st.one_of(st.just(0), st.integers(1, nodes)))
    return nodes, tolerate, spread, domains


def groups_of(members, spread):
    groups = Groups(members, spread)
    return {frozenset({node, *groups.ring(node)}) for node in members}


@given(clusters(nodes_max=200))
def test_the_groups_are_the_daemons(cluster):
    nodes, tolerate, spread, domains = cluster
    plan = placement_odds.layout(nodes, tolerate, spread, domains)
    members = members_of(nodes, domains)
    shapes = []
    for group in groups_of(members, spread):
        labels = [members[node] for node in group]
        apart = domains > tolerate
        shapes.append(tuple(sorted(labels.count(x) for x in set(labels))) if apart else (1,) * len(group))
    assert sorted(shapes) == sorted(plan.groups)


def worst_copysets(members, tolerate, spread, domains):
    """Any tolerate + 1 nodes of a group, in different domains where these are kept apart."""
    return {
        frozenset(chosen)
        for group in groups_of(members, spread)
        for chosen in combinations(sorted(group), tolerate + 1)
        if domains <= tolerate or len({members[node] for node in chosen}) == tolerate + 1
    }


@given(clusters(), st.integers(0, 8))
def test_the_odds_are_those_that_the_daemon_counts(cluster, losses):
    nodes, tolerate, spread, domains = cluster
    losses = min(losses, nodes)
    members = members_of(nodes, domains)
    copysets = worst_copysets(members, tolerate, spread, domains)
    exact = odds.recovery_probability(copysets, Groups(members, spread).order, losses)
    found = placement_odds.odds(placement_odds.layout(nodes, tolerate, spread, domains), losses)
    assert found.survival == exact
    ring = {frozenset(f"node-{(i + j) % nodes:04}" for j in range(tolerate + 1)) for i in range(nodes)}
    assert found.ring == odds.recovery_probability(ring, list(members), losses)


@settings(max_examples=30)
@given(clusters(nodes_max=24), st.integers(1, 5))
def test_what_is_placed_is_never_worse_and_with_many_ranks_just_that(cluster, losses):
    nodes, tolerate, spread, domains = cluster
    losses = min(losses, nodes)
    members, groups = members_of(nodes, domains), Groups(members_of(nodes, domains), spread)
    placed = []
    for rank in range(nodes * 12):
        owner = f"node-{rank // 12:04}"
        plan = place(
            members=members, owner=owner, owner_domain=members[owner], job="gpt", rank=rank,
            state_bytes=1 << 30, chunk_bytes=4 << 20, tolerate=tolerate, spread=spread, groups=groups,
        )  # fmt: skip
        placed.append((owner, [planned.holders for planned in plan.shards]))
    copysets = odds.copysets_of(placed)
    worst = worst_copysets(members, tolerate, spread, domains)
    if not copysets <= worst:
        assert domains, "only to find other domains are strangers asked"
        return
    real = odds.recovery_probability(copysets, groups.order, losses)
    planned_odds = placement_odds.odds(
        placement_odds.layout(nodes, tolerate, spread, domains), losses
    ).survival
    assert real >= planned_odds
    if tolerate == 1 and not domains:
        assert copysets == worst and real == planned_odds


def test_geminis_example_is_a_plan_too():
    """16 machines in pairs: 93.3 %; in a ring 86.7 %."""
    found = placement_odds.odds(placement_odds.layout(16, 1, 1), 2)
    assert (found.survival, found.gemini_bound, found.ring) == (
        Fraction(14, 15),
        Fraction(14, 15),
        Fraction(13, 15),
    )
    assert found.everywhere == 0


def test_a_whole_domain_may_go_when_there_are_more_domains_than_losses():
    racks = placement_odds.layout(12, 1, 3, 4)
    # Three of a rack, out of three groups of four: the only losses of three that lie in one domain per group
    # are those that hit each group once, or one rack only.
    assert not racks.domains_short
    assert placement_odds.layout(12, 1, 3, 1).domains_short
    assert placement_odds.layout(12, 2, 3, 2).domains_short


@pytest.mark.parametrize(
    "arguments", [(1, 1, 3), (3, 3, 3), (10, 2, 1), (10, 0, 3), (10, 1, 3, 11), (5000, 1, 3)]
)
def test_what_cannot_be_is_refused(arguments):
    with pytest.raises(InvalidArgumentError):
        placement_odds.layout(*arguments)
    with pytest.raises(InvalidArgumentError, match="from 0 to 10"):
        placement_odds.odds(placement_odds.layout(10, 1, 3), 11)


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *arguments], env={"NO_COLOR": "1", "COLUMNS": "160"})


def test_plan_needs_no_cluster_and_prints_exact_odds():
    result = run("--nodes", "16", "--tolerate", "1", "--spread", "1", "--losses", "2", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["groups"] == [{"nodes": 2, "count": 8}]
    (odds_of_two,) = found["odds"]
    assert odds_of_two["losses"] == 2 and abs(odds_of_two["survival"] - 14 / 15) < 1e-12
    assert odds_of_two["loses_one_in"] == 15


def test_plan_says_what_is_never_lost_and_when_racks_are_too_few():
    table = run("--nodes", "16", "--tolerate", "2", "--domains", "2").stdout
    assert "too few to keep 3 copies apart" in table
    assert table.count("never") == 2, "one loss and two"


def test_a_plan_that_cannot_be_says_why():
    result = run("--nodes", "3", "--tolerate", "3")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "at least 4 nodes" in result.stderr
