"""The odds of losing something: against brute force, and against the figures that others have published."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.placement import Groups, odds, place
from fastcheckd.placement.odds import (
    TangledError,
    copysets_of,
    recovery_probability,
)


def nodes_named(count):
    return [f"node-{n:02}" for n in range(count)]


def by_trying_all(copysets, nodes, losses):
    survived = [not any(c <= set(lost) for c in copysets) for lost in combinations(nodes, losses)]
    return Fraction(sum(survived), len(survived))


@st.composite
def layouts(draw):
    nodes = nodes_named(draw(st.integers(1, 11)))
    copyset = st.frozensets(st.sampled_from(nodes), min_size=1, max_size=4)
    return nodes, draw(st.sets(copyset, max_size=12)), draw(st.integers(0, len(nodes)))


@given(layouts())
def test_the_probability_is_that_of_trying_all_choices(layout):
    nodes, copysets, losses = layout
    exact = by_trying_all(copysets, nodes, losses)
    assert recovery_probability(copysets, nodes, losses) == exact


@given(st.integers(3, 12), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
def test_of_real_placements_too(count, tolerate, spread_more, losses):
    members = dict.fromkeys(nodes_named(count), "")
    tolerate = min(tolerate, count - 1)
    placed = [
        (owner, [p.holders for p in place(
            members=members, owner=owner, owner_domain="", job="gpt", rank=rank, state_bytes=64 << 20,
            chunk_bytes=4 << 20, tolerate=tolerate, spread=tolerate + spread_more,
        ).shards])
        for rank, owner in enumerate(members)
    ]  # fmt: skip
    copysets, losses = copysets_of(placed), min(losses, count)
    exact = recovery_probability(copysets, list(members), losses)
    assert exact == by_trying_all(copysets, list(members), losses)
    assert (exact == 1) == (losses <= tolerate)


def test_geminis_published_example_comes_out():
    """16 machines, 2 copies, 2 lost at once: 93.3 % in groups, 86.7 % in a ring."""
    nodes = nodes_named(16)
    pairs = {frozenset(nodes[i : i + 2]) for i in range(0, 16, 2)}
    assert recovery_probability(pairs, nodes, 2) == Fraction(14, 15)
    assert recovery_probability(
        {frozenset((nodes[i - 1], nodes[i])) for i in range(16)}, nodes, 2
    ) == Fraction(13, 15)
    assert recovery_probability(set(map(frozenset, combinations(nodes, 2))), nodes, 2) == 0


def test_a_large_cluster_is_counted_exactly():
    members = dict.fromkeys([f"node-{n:04}" for n in range(1000)], "")
    groups = Groups(members, 3)
    copysets = {frozenset(pair) for node in members for pair in combinations([node, *groups.ring(node)], 2)}
    # Two losses are fatal exactly if they meet in one of the 250 groups of four.
    assert recovery_probability(copysets, list(members), 2) == 1 - Fraction(250 * 6, comb(1000, 2))
    three = comb(250, 3) * 4**3
    assert recovery_probability(copysets, list(members), 3) == Fraction(three, comb(1000, 3))


def test_what_cannot_be_counted_says_so(monkeypatch):
    monkeypatch.setattr(odds, "SETS_MAX", 100)
    nodes = nodes_named(20)
    with pytest.raises(TangledError):
        recovery_probability(set(map(frozenset, combinations(nodes, 3))), nodes, 10)


@pytest.mark.parametrize("ask", [
    lambda: recovery_probability(set(), ["a"], 2),
    lambda: recovery_probability({frozenset("ab")}, ["a"], 1),
])  # fmt: skip
def test_numbers_that_make_no_cluster_are_refused(ask):
    with pytest.raises(ValueError, match="cannot be lost|not among"):
        ask()
