"""The order in which one rank's possible holders are preferred; `choose.py` takes them.

    healthy → another failure domain → within reach → fewest shards of this rank → fewest bytes → its turn

"Within reach" are those that hold shards of this rank already and, while these are fewer than `spread`, the
owner's group. Strangers come in only where the group has nobody: each ties another group to this one's fate.
Shards count before bytes, so that a node that comes back empty is not flooded.

Turns go round: the ranks of a node, one after the other, use all of its group alike. That alone balances ranks
that are about as large as each other, whatever order they come in. Going by bytes from the first one on would
not: whoever comes last finds that its group has held back for it, and it alone gives nothing to itself. So a
first placement goes by bytes only where they differ by more than its `slack_bytes`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice

from fastcheck_proto.placement_groups import Groups, domain_of

from ..errors import PlacementError

Domain = tuple[str, str]


class Preference:
    """The order of preference for one rank."""

    def __init__(
        self,
        members: Mapping[str, str],
        owner: str,
        owner_domain: str,
        tolerate: int,
        spread: int,
        avoid: Set[str],
        load: Mapping[str, int],
        groups: Groups | None,
        domains_of: Mapping[str, str] | None = None,
    ) -> None:
        if groups is None or owner not in groups or groups.spread != spread:
            groups = Groups({owner: owner_domain, **members}, spread)
        self._members = members
        self._owner = owner
        self._owner_domain = domain_of(owner, owner_domain)
        self._tolerate = tolerate
        self._spread = spread
        self._avoid = avoid
        self._load = load
        self._groups = groups
        self._domains_of = domains_of or {}
        #: Shards of this rank that a node has.
        self._shards: Counter[str] = Counter()
        self._group = [node for node in groups.ring(owner) if node in members]
        self._healthy = [node for node in self._group if node not in avoid]
        self._turn: dict[str, int] = {}
        #: Nodes whose loads differ by less are equal.
        self.slack_bytes = 0
        #: Copies of a shard that have to be on nodes to avoid.
        self._avoided_max = 0
        if len(self._healthy) < tolerate:
            strangers = sum(1 for _ in islice(self._healthy_strangers(), tolerate))
            self._avoided_max = max(0, tolerate - len(self._healthy) - strangers)
        others = len(members) - (owner in members)
        if others < tolerate:
            raise PlacementError(
                f"{tolerate} healthy nodes beside the owner {owner} are needed to hold copies, but there "
                f"are only {others}: start more nodes, or lower the config key 'tolerate'"
            )
        #: Domains that healthy holders may lie in: all of them, or the first `tolerate` that were found.
        self._foreign = self._foreign_domains()

    def _healthy_strangers(self) -> Iterator[str]:
        for node in self._groups.strangers(self._owner):
            if node in self._members and node not in self._avoid:
                yield node

    def _foreign_domains(self) -> set[Domain]:
        found = {self._domain(node) for node in self._healthy} - {self._owner_domain}
        if len(found) < self._tolerate and len(found) < len(self._groups.domains - {self._owner_domain}):
            for node in self._healthy_strangers():
                found |= {self._domain(node)} - {self._owner_domain}
                if len(found) >= self._tolerate:
                    break
        return found

    @property
    def _domains_enough(self) -> bool:
        return len(self._foreign) >= self._tolerate

    def _domain(self, node: str) -> Domain:
        label = self._members.get(node)
        return domain_of(node, self._domains_of.get(node, "") if label is None else label)

    def _fit(self) -> list[str]:
        """Those of the group that holders are taken from, unless there are too few."""
        if not self._domains_enough:
            return self._healthy
        return [node for node in self._healthy if self._domain(node) != self._owner_domain]

    def reach(self) -> int:
        """Nodes that the shards of this rank are spread over, at most `spread` and at least `tolerate`."""
        return max(self._tolerate, min(self._spread, len(self._fit())))

    def take_turns(self, job: str, rank: int, shards: int) -> None:
        """Order the group so that the next rank goes on where this one ends."""
        fit = self._fit()
        if fit:
            step = min(self.reach(), shards * self._tolerate)
            start = (zlib.crc32(job.encode()) + rank) * step
            self._turn = {node: (i - start) % len(fit) for i, node in enumerate(fit)}
        for node in self._group:
            self._turn.setdefault(node, len(self._turn))

    def keep(self, before: Iterable[str]) -> list[str]:
        """Those that stay: members, not to avoid, in domains of their own if that can be had."""
        stay: list[str] = []
        avoided = 0
        for node in before:
            if len(stay) == self._tolerate:
                break
            if node == self._owner or node not in self._members or node in stay:
                continue
            if self._domains_enough and self.clashes(node, stay):
                continue
            if node in self._avoid:
                if avoided == self._avoided_max:
                    continue
                avoided += 1
            stay.append(node)
            self.takes(node)
        return stay

    def takes(self, node: str) -> None:
        """The node has one more shard of this rank."""
        self._shards[node] += 1

    def clashes(self, node: str, holders: Iterable[str]) -> bool:
        """Whether the node shares a domain with the owner or one of the holders."""
        domain = self._domain(node)
        return domain == self._owner_domain or any(domain == self._domain(other) for other in holders)

    def share_a_domain(self, holders: Sequence[str]) -> bool:
        """Whether any two of the owner and the holders share a domain."""
        return any(self.clashes(node, holders[:i]) for i, node in enumerate(holders))

    def one(self, holders: Collection[str]) -> str | None:
        """The best node that does not hold the shard yet."""
        near = [*self._group, *(node for node in self._shards if node not in self._turn)]
        taken = {self._domain(node) for node in holders} | {self._owner_domain}
        best = self._best(near, holders, taken)
        # All others are looked at only when nobody near will do and one of them may.
        if best is None or best in self._avoid or (self._domain(best) in taken and self._foreign - taken):
            best = self._best([*near, *self._groups.strangers(self._owner)], holders, taken)
        return best

    def _best(self, nodes: Sequence[str], holders: Collection[str], taken: Set[Domain]) -> str | None:
        full = len(self._shards) >= self._spread
        # The least loaded sets the mark; in a first placement all within the slack are as good.
        enough = self.slack_bytes and self.slack_bytes + min(self._load.get(node, 0) for node in nodes)
        best: tuple[tuple[bool, bool, int, int, int, int], str] | None = None
        for i, node in enumerate(nodes):
            if node == self._owner or node in holders or node not in self._members:
                continue
            key = (
                node in self._avoid,
                self._domain(node) in taken,
                0 if node in self._shards else (1 if full else 0) if node in self._turn else 2,
                self._shards.get(node, 0),
                max(enough, self._load.get(node, 0)),
                self._turn.get(node, i),
            )
            if best is None or key < best[0]:
                best = key, node
        return best and best[1]
