"""What losing k nodes at once does: exact probabilities that nothing committed is lost. Pure.

A *copyset* is the set of all nodes that hold some shard, its owner included. A loss is survived when no
copyset lies within the nodes lost. How many k-subsets of the nodes hold no copyset is a coefficient of a
polynomial; copysets that share no node, such as those of different groups, multiply. Within such a component
subsets are enumerated node by node, remembering of the nodes lost so far only those that still matter: a group
of g nodes takes at most 2^g sets, and a ring of thousands goes as well, because it is narrow. What is neither
small nor narrow raises `TangledError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from math import comb

Copyset = frozenset[str]
#: Sets of nodes that are told apart at one point of an enumeration, about 20 nodes' worth.
SETS_MAX = 1 << 20


class TangledError(ValueError):
    """The copysets hang together in too many ways to count."""


def copysets_of(placed: Iterable[tuple[str, Iterable[Sequence[str]]]]) -> set[Copyset]:
    """The copysets of ranks, each with its owner and the holders of every shard."""
    return {frozenset((owner, *holders)) for owner, shards in placed for holders in shards}


def recovery_probability(copysets: Collection[Copyset], nodes: Sequence[str], losses: int) -> Fraction:
    """The exact probability that `losses` nodes, each choice as likely, leave a copy of everything.

    Args:
        copysets: as of `copysets_of`.
        nodes: all nodes; neighbours in this order should share copysets, as in `Groups.order`.

    Raises:
        ValueError: more losses than nodes, or a copyset with a node that is none.
        TangledError: it cannot be counted exactly.
    """
    if not 0 <= losses <= len(nodes):
        raise ValueError(f"{losses} of {len(nodes)} nodes cannot be lost")
    position = {node: i for i, node in enumerate(nodes)}
    if not all(node in position for copyset in copysets for node in copyset):
        raise ValueError("a copyset names a node that is not among the nodes")
    # A copyset around another one adds nothing: when it is lost, so is the smaller one.
    sets = {frozenset(position[node] for node in copyset) for copyset in copysets}
    survived = [1]
    alone = len(nodes)
    for component in _components(sets):
        members = sorted(set().union(*component))
        alone -= len(members)
        survived = _product(survived, _count(component, members, losses), losses)
    survived = _product(survived, [comb(alone, lost) for lost in range(min(alone, losses) + 1)], losses)
    return Fraction(survived[losses] if losses < len(survived) else 0, comb(len(nodes), losses))


def _components(sets: Collection[frozenset[int]]) -> list[list[frozenset[int]]]:
    """The sets by what hangs together."""
    root: dict[int, int] = {}

    def find(node: int) -> int:
        root.setdefault(node, node)
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for nodes in sets:
        first, *others = nodes
        for other in others:
            root[find(other)] = find(first)
        find(first)
    components: dict[int, list[frozenset[int]]] = defaultdict(list)
    for nodes in sorted(sets, key=sorted):
        components[find(min(nodes))].append(nodes)
    return list(components.values())


def _count(sets: Sequence[frozenset[int]], members: Sequence[int], losses: int) -> list[int]:
    """For each number up to `losses`: how many choices of so many members contain none of the sets."""
    ending: dict[int, list[frozenset[int]]] = defaultdict(list)
    #: The last place at which it matters whether a node was lost.
    matters_until: dict[int, int] = {}
    for nodes in sets:
        last = max(nodes)
        ending[last].append(nodes - {last})
        for node in nodes:
            matters_until[node] = max(matters_until.get(node, last), last)
    # Lost nodes that matter → by how many are lost in all: the number of choices.
    choices: dict[frozenset[int], list[int]] = {frozenset(): [1]}
    for node in members:
        after: dict[frozenset[int], list[int]] = {}
        for lost, counts in choices.items():
            _add(after, frozenset(n for n in lost if matters_until[n] > node), counts, losses)
            if not any(rest <= lost for rest in ending[node]):
                with_node = frozenset(n for n in (*lost, node) if matters_until[n] > node)
                _add(after, with_node, [0, *counts], losses)
        choices = after
        if len(choices) > SETS_MAX:
            raise TangledError(
                f"more than {SETS_MAX} sets of lost nodes to tell apart among {len(members)} nodes"
            )
    total = [0] * (losses + 1)
    for counts in choices.values():
        for lost_count, ways in enumerate(counts):
            total[lost_count] += ways
    return total


def _add(into: dict[frozenset[int], list[int]], key: frozenset[int], counts: list[int], losses: int) -> None:
    if len(key) > losses:
        return
    counts = counts[: losses + 1]
    known = into.get(key, [])
    longer, shorter = (known, counts) if len(known) > len(counts) else (counts, known)
    into[key] = [ways + (shorter[i] if i < len(shorter) else 0) for i, ways in enumerate(longer)]


def _product(left: Sequence[int], right: Sequence[int], degree: int) -> list[int]:
    """Of two polynomials, up to a degree."""
    product = [0] * min(len(left) + len(right) - 1, degree + 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: degree + 1 - i]):
            product[i + j] += a * b
    return product
