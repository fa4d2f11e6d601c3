"""What a placement goes by besides the rules: who held a rank before, and how much each node has. Pure.

Read off the replicated state, once per version of it, plus what was placed since and is not committed yet:
the ranks of a job's first step would all go by the same empty nodes otherwise. What is placed is the leader's
alone and may be forgotten; it only balances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastcheck_proto.placement_groups import Groups
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..placement import Plan
from .model import DOWN, UP, State

#: Ranks whose placement is remembered until it is committed; the oldest go first.
PLACED_MAX = 1 << 16


def domain_label(node: rpb.NodeRecord, label: str) -> str:
    """What the node's failure domain is called; empty: it is by itself."""
    return node.labels.get(label, "") if label else ""


def committed_holders(state: State, job: str, rank: int, world_size: int) -> list[list[str]]:
    """Holders of each shard of a rank in the newest committed step; none if another number of ranks saved that."""
    steps = state.steps_of(job)
    if not steps or steps[-1].world_size != world_size:
        return []
    return [[holder.node_id for holder in shard.holders] for shard in steps[-1].ranks[rank].shards]


def committed_bytes(state: State) -> Counter[str]:
    """Bytes that each node holds of committed steps, its own ranks' included."""
    held: Counter[str] = Counter()
    for job in state.jobs.values():
        for step in job.steps:
            for record in step.ranks:
                held[record.owner.node_id] += record.state_bytes
                for shard in record.shards:
                    for holder in shard.holders:
                        held[holder.node_id] += shard.bytes
    return held


@dataclass(frozen=True)
class _Placed:
    step: int
    #: Bytes that it adds, by node.
    added: Mapping[str, int]
    #: Of each shard.
    holders: Sequence[Sequence[str]]


class NodeLoads:
    """The bytes by node, the members and the groups, kept for as long as the state they were made from."""

    def __init__(self) -> None:
        self._version = -1
        self._sum: Counter[str] = Counter()
        #: (job, rank, world size) → its newest placement that is not committed yet.
        self._placed: dict[tuple[str, int, int], _Placed] = {}
        self._members: tuple[tuple[int, str], Mapping[str, str]] | None = None
        self._groups: tuple[tuple[int, str, int], Groups] | None = None

    def forget(self) -> None:
        """The term is over."""
        self._version = -1
        self._placed.clear()

    def by_node(self, state: State) -> Mapping[str, int]:
        """Bytes that each node holds, or is about to hold for the first time."""
        if state.version != self._version:
            self._version = state.version
            self._sum = committed_bytes(state)
            jobs = state.jobs
            self._placed = {
                key: entry
                for key, entry in self._placed.items()
                if key[0] in jobs and entry.step > jobs[key[0]].newest
            }
            for entry in self._placed.values():
                self._sum.update(entry.added)
        return self._sum

    def earlier(self, state: State, job: str, rank: int, world_size: int) -> list[list[str]]:
        """Who the rank's shards were placed on last, or else committed on. None: it has not been placed yet."""
        under_way = self._placed.get((job, rank, world_size))
        if under_way is not None:
            return [list(holders) for holders in under_way.holders]
        return committed_holders(state, job, rank, world_size)

    def placed(self, state: State, job: str, rank: int, world_size: int, step: int, plan: Plan) -> None:
        """A rank was placed; what its holders have of its newest committed step does not count again."""
        before = committed_holders(state, job, rank, world_size)
        added: Counter[str] = Counter()
        for planned in plan.shards:
            known = before[planned.shard] if planned.shard < len(before) else ()
            for holder in planned.holders:
                if holder not in known:
                    added[holder] += planned.size_bytes
        self._drop((job, rank, world_size))
        self._placed[(job, rank, world_size)] = _Placed(step, added, [p.holders for p in plan.shards])
        self._sum.update(added)
        while len(self._placed) > PLACED_MAX:
            self._drop(next(iter(self._placed)))

    def _drop(self, key: tuple[str, int, int]) -> None:
        if (entry := self._placed.pop(key, None)) is not None:
            self._sum.subtract(entry.added)

    def members(self, state: State, label: str) -> Mapping[str, str]:
        """Nodes that may hold copies → label of their failure domain: those that are UP."""
        made_from = (state.epoch, label)
        if self._members is None or self._members[0] != made_from:
            up = {
                node_id: domain_label(node, label)
                for node_id, node in state.nodes.items()
                if node.state == UP
            }
            self._members = made_from, up
        return self._members[1]

    def groups(self, state: State, label: str, spread: int) -> Groups:
        """Groups of all nodes that are not DOWN: one that drains comes back to the same."""
        made_from = (state.epoch, label, spread)
        if self._groups is None or self._groups[0] != made_from:
            domains = {
                node_id: domain_label(node, label)
                for node_id, node in state.nodes.items()
                if node.state != DOWN
            }
            self._groups = made_from, Groups(domains, spread)
        return self._groups[1]
