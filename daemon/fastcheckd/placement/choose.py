"""Which nodes hold a rank's shards: place a state, or find one more holder for a shard that lost one.

Both pick one holder after the other by the same order of preference, so that what a repair chose is what the
next placement keeps:

    healthy → another failure domain → within reach → fewest shards of this rank → fewest bytes → its turn

"Within reach" are those that hold shards of this rank already and, while these are fewer than `spread`, the
owner's group. Strangers come in only where the group has nobody: each ties another group to this one's fate.
Whoever held a shard of the newest step and may still hold it keeps it: the next step is coded against what
it has. Shards count before bytes, so that a node that comes back empty is not flooded.

Turns go round: the ranks of a node, one after the other, use all of its group alike. That alone balances ranks
that are about as large as each other, whatever order they come in. Going by bytes from the first one on would
not: whoever comes last finds that its group has held back for it, and it alone gives nothing to itself. So a
first placement goes by bytes only where they differ by more than `LOAD_SLACK` such ranks; whoever stands in
for a lost holder is the one with the fewest.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, pairwise

from ..errors import PlacementError
from .groups import Groups, domain_of

Domain = tuple[str, str]

#: Differences of load below that of so many ranks, all copies of each, are taken for chance at a first placement.
LOAD_SLACK = 8


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One slice [offset, offset + size_bytes) of a rank's state and the nodes that are to hold it."""

    shard: int
    offset: int
    size_bytes: int
    #: Distinct, never the owner; as many as losses are tolerated.
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Where a rank's shards go."""

    shards: tuple[PlannedShard, ...]
    #: Copies of a shard share a failure domain with its owner or each other: the healthy members have no more.
    domains_short: bool


@dataclass(frozen=True)
class Substitute:
    """One more holder for a shard."""

    node_id: str
    #: It shares a failure domain with the owner or a holder.
    domains_short: bool


def plan_shards(state_bytes: int, chunk_bytes: int, count_max: int) -> tuple[tuple[int, int], ...]:
    """Cut a state into at most `count_max` slices (offset, bytes) of about the same size.

    Boundaries are multiples of `chunk_bytes`; no slice is empty, except the only one of an empty state.
    """
    chunks = -(-state_bytes // chunk_bytes)
    count = max(1, min(count_max, chunks))
    cuts = [min(chunks * i // count * chunk_bytes, state_bytes) for i in range(count)] + [state_bytes]
    return tuple((start, stop - start) for start, stop in pairwise(cuts))


def place(
    *,
    members: Mapping[str, str],
    owner: str,
    owner_domain: str,
    job: str,
    rank: int,
    state_bytes: int,
    chunk_bytes: int,
    tolerate: int,
    spread: int,
    avoid: Set[str] = frozenset(),
    previous: Sequence[Sequence[str]] = (),
    load: Mapping[str, int] | None = None,
    groups: Groups | None = None,
) -> Plan:
    """Split a rank's state and name `tolerate` holders for each shard.

    Args:
        members: node ids that may hold copies → label of their failure domain, "" or the node's own id where
            it is by itself. The owner may be among them; it is never chosen.
        owner_domain: label of the owner's failure domain.
        spread: most nodes that the rank's shards go to, where domains and lost holders allow it.
        avoid: members that get nothing while there are `tolerate` others.
        previous: holders of each shard in the rank's newest step. They stay where they may, and the state is
            cut into as many shards again.
        load: bytes that each node has so far.
        groups: the groups of the membership, if the caller keeps them; else they are made from `members`.

    Raises:
        PlacementError: fewer than `tolerate` members beside the owner.
    """
    pick = _Pick(members, owner, owner_domain, tolerate, spread, avoid, load or {}, groups)
    slices = plan_shards(state_bytes, chunk_bytes, len(previous) or pick.reach())
    pick.take_turns(job, rank, len(slices))
    if not previous:
        pick.slack_bytes = LOAD_SLACK * state_bytes * tolerate
    holding = [pick.keep(previous[shard] if shard < len(previous) else ()) for shard in range(len(slices))]
    short = False
    for holders in holding:
        while len(holders) < tolerate:
            found = pick.one(holders)
            assert found is not None, "there are `tolerate` members beside the owner"
            holders.append(found)
            pick.takes(found)
        short = short or pick.share_a_domain(holders)
    return Plan(
        tuple(
            PlannedShard(shard=shard, offset=offset, size_bytes=size_bytes, holders=tuple(holding[shard]))
            for shard, (offset, size_bytes) in enumerate(slices)
        ),
        short,
    )


def substitute(
    *,
    members: Mapping[str, str],
    owner: str,
    owner_domain: str,
    holders: Collection[str],
    domains_of: Mapping[str, str],
    job: str,
    rank: int,
    shard: int,
    tolerate: int,
    spread: int,
    avoid: Set[str] = frozenset(),
    previous: Sequence[Sequence[str]] = (),
    load: Mapping[str, int] | None = None,
    groups: Groups | None = None,
) -> Substitute | None:
    """One more node for a shard that lost a copy: the one that `place` would name next. None: nobody is left.

    A node to avoid comes last but does come: whoever wants none leaves it out of `members`.

    Args:
        shard: which of the rank's; the choice does not depend on it.
        holders: nodes that still hold the shard, and those that are about to.
        domains_of: labels of nodes that hold it and may not be members, such as draining ones.
        previous: holders of each shard of the rank, so that it stays on few nodes.

    The others as in `place`.
    """
    others = len(members) - (owner in members)
    if not others:
        return None
    pick = _Pick(
        members, owner, owner_domain, min(tolerate, others), spread, avoid, load or {}, groups, domains_of
    )
    pick.take_turns(job, rank, max(1, len(previous)))
    for shard_holders in previous or [list(holders)]:
        for holder in shard_holders:
            if holder in members and holder != owner:
                pick.takes(holder)
    found = pick.one(holders)
    if found is None:
        return None
    return Substitute(found, pick.clashes(found, holders))


class _Pick:
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
