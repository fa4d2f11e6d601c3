"""Which missing copies to make now, where, and from whom; whom to wait for, and how long before trying again. Pure.

Wanted at any moment is little: the copies that matter most, one per target, a bounded number in all. The
rest is computed again when one of them is done, from the state as it is then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from fastcheck_proto.placement_groups import Groups, domain_of
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..placement import substitute
from .loads import domain_label
from .model import DOWN, Ref, ShardId, State, is_live
from .redundancy import (
    Shortage,
    Survey,
    counts,
    find_shard,
)

SOURCES_MAX = 8
#: Shards that one planning looks at closely.
LOOKS_MAX = 512
#: A machine that restarts with its memory costs less than copying what it held; its daemon needs seconds for that.
GONE_GRACE_S = 5.0
#: A node that came back checks what it has first; as long as it says something, it is waited for.
RETURN_GRACE_S = 5.0
#: After a failure of a shard at a target, doubled with each.
BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 60.0
#: Of a shard that nobody can take or give at present.
NO_TARGET_PAUSE_S = 5.0


class Absences:
    """Lives that are over, and for how long each is still waited for."""

    def __init__(self) -> None:
        self._gone_at: dict[Ref, float] = {}
        #: The node is back, in this newer life, since then or since it last said something.
        self._back: dict[str, tuple[int, float]] = {}
        self._reported: dict[str, int] = {}

    def heard(self, node: Ref, now: float, *, finished: bool) -> None:
        """A node that came back has said what it holds: part of it, or the last part."""
        self._back[node.node_id] = (node.incarnation, now)
        if finished:
            self._reported[node.node_id] = node.incarnation

    def spared(self, dead: Set[Ref], nodes: Mapping[str, rpb.NodeRecord], now: float) -> frozenset[Ref]:
        """Those of the lives that are over whose bytes may come back by themselves, soon."""
        self._gone_at = {ref: self._gone_at.get(ref, now) for ref in dead}
        names = {ref.node_id for ref in dead}
        self._back = {name: seen for name, seen in self._back.items() if name in names}
        self._reported = {name: life for name, life in self._reported.items() if name in names}
        return frozenset(ref for ref in dead if self._is_spared(ref, nodes.get(ref.node_id), now))

    def _is_spared(self, ref: Ref, node: rpb.NodeRecord | None, now: float) -> bool:
        if node is None:
            return False
        if not is_live(node):
            return now < self._gone_at[ref] + GONE_GRACE_S
        incarnation = node.incarnation
        if self._reported.get(ref.node_id) == incarnation:
            return False
        back, heard_at = self._back.get(ref.node_id, (0, 0.0))
        if back != incarnation:
            self._back[ref.node_id] = (incarnation, now)
            return True
        return now < heard_at + RETURN_GRACE_S


class Attempts:
    """What has failed, and when it may be tried again. Bounded by what is short."""

    def __init__(self) -> None:
        self._failures: dict[tuple[ShardId, str], int] = {}
        self._not_before: dict[tuple[ShardId, str], float] = {}
        self._resting: dict[ShardId, float] = {}

    def failed(self, shard: ShardId, target: str, now: float) -> None:
        """A copy could not be made there."""
        count = self._failures[shard, target] = self._failures.get((shard, target), 0) + 1
        self._not_before[shard, target] = now + min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (count - 1))

    def nobody(self, shard: ShardId, now: float) -> None:
        """No target or no source was to be had."""
        self._resting[shard] = now + NO_TARGET_PAUSE_S

    def resting(self, shard: ShardId, now: float) -> bool:
        """Whether the shard is not to be looked at now."""
        return now < self._resting.get(shard, now)

    def refused(self, shard: ShardId, now: float) -> set[str]:
        """Targets that are not to be tried again now."""
        if not self._not_before:
            return set()
        return {target for (which, target), at in self._not_before.items() if which == shard and now < at}

    def membership_changed(self) -> None:
        """There may be a target now."""
        self._resting.clear()

    def keep(self, short: Set[ShardId]) -> None:
        """Forget what is not short any more."""
        self._failures = {key: count for key, count in self._failures.items() if key[0] in short}
        self._not_before = {key: at for key, at in self._not_before.items() if key[0] in short}
        self._resting = {shard: at for shard, at in self._resting.items() if shard in short}


@dataclass(frozen=True, kw_only=True)
class Order:
    """One copy to be made."""

    shortage: Shortage
    target: Ref
    target_address: str
    #: Nodes to pull from, the best first.
    sources: tuple[Ref, ...]
    #: Holder that the new copy takes the place of in the record.
    replaces: Ref | None
    #: The target is a holder by the record already, and has lost the bytes.
    refill: bool = False

    def change(self) -> log_pb2.HolderChange:
        """What the state has to learn when it is done, unless it is a `refill`."""
        return log_pb2.HolderChange(
            key=self.shortage.id.message(),
            digest=self.shortage.digest,
            add=self.target.message(),
            remove=None if self.replaces is None else self.replaces.message(),
        )


@dataclass(kw_only=True)
class Planner:
    """Turns a survey into orders.

    Args:
        tolerate, spread, domain_key: as the placement has them.
        orders_max: copies under way at once in the cluster.
    """

    tolerate: int
    spread: int
    domain_key: str
    orders_max: int
    attempts: Attempts = field(default_factory=Attempts)
    #: By owner, for one planning.
    _groups: dict[str, Groups] = field(default_factory=dict)

    def orders(
        self,
        state: State,
        survey: Survey,
        *,
        spared: Set[Ref],
        unwell: Set[str],
        under_way: Mapping[ShardId, Order],
        now: float,
    ) -> list[Order]:
        """What to begin now.

        Args:
            spared: lives that are over and are waited for, see `Absences`.
            unwell: nodes that are suspected or damped: neither targets nor, if others can serve, sources.
            under_way: orders that have not ended.
        """
        members = {
            node_id: domain_label(node, self.domain_key)
            for node_id, node in state.nodes.items()
            if counts(node)
        }
        busy = {order.target.node_id for order in under_way.values()}
        serving = Counter(order.sources[0].node_id for order in under_way.values() if order.sources)
        load = dict(survey.held_bytes)
        for order in under_way.values():
            load[order.target.node_id] = load.get(order.target.node_id, 0) + order.shortage.bytes
        free_targets = set(members) - unwell - busy
        made: list[Order] = []
        looks = 0
        self._groups = {}
        for shortage in survey.shortages:
            if len(under_way) + len(made) >= self.orders_max or not free_targets or looks >= LOOKS_MAX:
                break
            if shortage.id in under_way or self.attempts.resting(shortage.id, now):
                continue
            if shortage.missing and sum(1 for ref in shortage.dead if ref in spared) >= shortage.missing:
                continue
            looks += 1
            next_one = self._order(state, shortage, members, free_targets, unwell, spared, load, serving, now)
            if next_one is None:
                continue
            made.append(next_one)
            free_targets.discard(next_one.target.node_id)
            serving[next_one.sources[0].node_id] += 1
            load[next_one.target.node_id] = load.get(next_one.target.node_id, 0) + shortage.bytes
        return made

    def _order(
        self,
        state: State,
        shortage: Shortage,
        members: Mapping[str, str],
        free_targets: Set[str],
        unwell: Set[str],
        spared: Set[Ref],
        load: Mapping[str, int],
        serving: Mapping[str, int],
        now: float,
    ) -> Order | None:
        nodes = state.nodes
        sources = _sources(shortage, unwell, serving)
        if not sources:
            self.attempts.nobody(shortage.id, now)
            return None
        refused = self.attempts.refused(shortage.id, now)
        full = {n for n in members if load.get(n, 0) + shortage.bytes > nodes[n].ram_budget_bytes}
        holders = {ref.node_id for ref in (*shortage.live, *shortage.draining, *shortage.lost)}
        may_not = (set(members) - free_targets) | refused | full
        chosen = self._choose(state, shortage, holders, members, may_not, load)
        refill = False
        if chosen is None or chosen in may_not:
            # Nobody else: then the holder that lost it, if it still is one.
            lost = [ref.node_id for ref in shortage.lost if ref.node_id != shortage.owner]
            again = [node_id for node_id in lost if node_id in members and node_id not in may_not]
            if not again or (chosen is not None and chosen not in refused | full | unwell):
                if chosen is None or chosen in refused | full:
                    self.attempts.nobody(shortage.id, now)
                return None  # or the one to be had is busy, and worth waiting for
            chosen, refill = again[0], True
        domains = {n: domain_of(n, label) for n, label in members.items()} if self.domain_key else {}
        replaces = None if refill else _replaced(shortage, spared, chosen, domains)
        if not shortage.missing and replaces is None:
            self.attempts.nobody(shortage.id, now)
            return None  # another copy would not bring the domains apart
        return Order(
            shortage=shortage,
            target=Ref(chosen, nodes[chosen].incarnation),
            target_address=nodes[chosen].data_address,
            sources=sources,
            replaces=replaces,
            refill=refill,
        )

    def _choose(
        self,
        state: State,
        shortage: Shortage,
        holders: Set[str],
        members: Mapping[str, str],
        avoid: Set[str],
        load: Mapping[str, int],
    ) -> str | None:
        """The node that placement would take next."""
        nodes = state.nodes
        owner = shortage.owner
        owner_domain = domain_label(nodes[owner], self.domain_key) if owner in nodes else ""
        if owner not in self._groups:
            standing = {n: domain_label(nodes[n], self.domain_key) for n in nodes if nodes[n].state != DOWN}
            self._groups[owner] = Groups({owner: owner_domain, **standing}, self.spread)
        recorded = find_shard(state, shortage.id)
        shards = [] if recorded is None else list(recorded[0].shards)
        return substitute(
            members=members,
            owner=owner,
            owner_domain=owner_domain,
            holders=holders - {owner},
            domains_of={n: domain_label(nodes[n], self.domain_key) for n in holders if n in nodes},
            job=shortage.id.job,
            rank=shortage.id.rank,
            tolerate=self.tolerate,
            spread=self.spread,
            avoid=avoid,
            previous=[[holder.node_id for holder in shard.holders] for shard in shards],
            load=load,
            groups=self._groups[owner],
        )


def _sources(shortage: Shortage, unwell: Set[str], serving: Mapping[str, int]) -> tuple[Ref, ...]:
    """Whom to pull from: holders that are UP, the owner, nodes that leave, suspects; of equals the idlest."""

    def rank(ref: Ref) -> tuple[int, int]:
        if ref.node_id in unwell:
            kind = 3
        elif ref in shortage.draining:
            kind = 2
        else:
            kind = 1 if ref.node_id == shortage.owner else 0
        return kind, serving.get(ref.node_id, 0)

    return tuple(sorted((*shortage.live, *shortage.draining), key=rank)[:SOURCES_MAX])


def _replaced(
    shortage: Shortage, spared: Set[Ref], target: str, domains: Mapping[str, tuple[str, str]]
) -> Ref | None:
    """The holder that goes from the record when `target` comes in. Its own older life goes by itself."""
    if any(ref.node_id == target for ref in shortage.dead):
        return None
    over = [ref for ref in shortage.dead if ref not in spared]
    for ref in (*over, *shortage.lost, *shortage.draining):
        if ref.node_id != shortage.owner:
            return ref
    if shortage.missing:
        return None
    if any(domains.get(ref.node_id) == domains[target] for ref in shortage.live):
        return None
    # For the domains' sake: a holder that shares its domain with another copy.
    shared = Counter(domains.get(ref.node_id) for ref in shortage.live)
    for ref in reversed(shortage.live):
        if ref.node_id != shortage.owner and shared[domains.get(ref.node_id)] > 1:
            return ref
    return None
