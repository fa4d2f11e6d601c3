"""Who shares whose fate: the members cut into bounded groups.

Copies are spread, so that a restore pulls from several nodes at once, but only inside a bounded group: if
every node held something of every other node, any two losses at once would be fatal for someone. The members
are ordered so that neighbours lie in different failure domains, and each group is a stretch of that order.

Nothing here remembers: a membership that changes has other groups. The daemon keeps placements stable where it
chooses holders. `fastcheck plan` computes with the same groups. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def domain_of(node_id: str, label: str) -> tuple[str, str]:
    """What fails together with the node: others with the same label, or nobody ("" or its own id).

    A pair, so that a rack that is called like a node is not that node.
    """
    return ("node", node_id) if label in ("", node_id) else ("label", label)


def interleaved(domains: Mapping[str, str]) -> list[str]:
    """The nodes in an order in which each domain is spread evenly; sorted where every node is by itself."""
    by_domain: dict[tuple[str, str], list[str]] = {}
    for node_id in sorted(domains):
        by_domain.setdefault(domain_of(node_id, domains[node_id]), []).append(node_id)
    # Node i of the n of a domain stands at (i + 1/2) / n of the way; whole numbers, so that all agree: the
    # common denominator is left out by comparing (2i + 1) / n as a pair of quotient and remainder.
    placed = [
        (((2 * i + 1) << 40) // len(nodes), domain, node_id)
        for domain, nodes in by_domain.items()
        for i, node_id in enumerate(nodes)
    ]
    return [node_id for _, _, node_id in sorted(placed)]


def group_bounds(count: int, spread: int, domains: int) -> list[tuple[int, int]]:
    """Where the groups of `count` nodes begin and end: spread + 1 to 2 * spread + 1 nodes each.

    One smaller group when there are no more nodes than that. Lengths differ by one at most, and each has
    about as many nodes of every domain when there are few: holders lie in other domains than the owner, and
    whoever is alone in its domain would hold more than the others.
    """
    smallest = spread + 1
    wanted = smallest if domains > smallest else -(-smallest // domains) * domains
    groups = max(1, count // wanted, -(-count // (2 * spread + 1)))
    return [(count * g // groups, count * (g + 1) // groups) for g in range(groups)]


class Groups:
    """The groups of one membership, to be kept for as long as it lasts.

    Args:
        domains: node id → label of its failure domain; "" or its own id where it is by itself.
        spread: holders that one rank's shards are spread over.
    """

    def __init__(self, domains: Mapping[str, str], spread: int) -> None:
        self.spread = spread
        self.order: Sequence[str] = interleaved(domains)
        self.domains = frozenset(domain_of(node_id, label) for node_id, label in domains.items())
        self._position = {node_id: i for i, node_id in enumerate(self.order)}
        self._bounds: list[tuple[int, int]] = []
        for bounds in group_bounds(len(self.order), spread, max(1, len(self.domains))):
            self._bounds += [bounds] * (bounds[1] - bounds[0])

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._position

    def ring(self, node_id: str) -> tuple[str, ...]:
        """The node's group as a ring that starts behind it, without it.

        Raises:
            KeyError: it is not among the members.
        """
        here = self._position[node_id]
        first, behind = self._bounds[here]
        return (*self.order[here + 1 : behind], *self.order[first:here])

    def strangers(self, node_id: str) -> Iterator[str]:
        """All nodes of other groups, the nearest behind the node's own group first."""
        first, behind = self._bounds[self._position[node_id]]
        yield from self.order[behind:]
        yield from self.order[:first]
