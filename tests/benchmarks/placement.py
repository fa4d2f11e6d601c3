"""`--only placement`: how long deciding takes on a large membership. No cluster; one core, no I/O."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from fastcheck_proto.placement_groups import Groups
from fastcheck_proto.placement_odds import copysets_of, recovery_probability
from fastcheckd.placement import Plan, place, substitute

from .report import Figure

NODES = 1000
RANKS_PER_NODE = 8
CHUNK_BYTES = 4 << 20


class _World:
    """The ranks of a large job, sizes varying by 20 % either way."""

    def __init__(self, racks: int) -> None:
        self.members = {f"node-{n:04}": f"rack-{n % racks}" if racks else "" for n in range(NODES)}
        rnd = random.Random(1)
        self.sizes = [int((1 << 30) * rnd.uniform(0.8, 1.2)) for _ in range(NODES * RANKS_PER_NODE)]
        self.load: Counter[str] = Counter()

    def owner(self, rank: int) -> str:
        return f"node-{rank // RANKS_PER_NODE:04}"

    def place(self, rank: int, groups: Groups, previous: Sequence[Sequence[str]] = ()) -> Plan:
        owner = self.owner(rank)
        return place(
            members=self.members,
            owner=owner,
            owner_domain=self.members[owner],
            job="bench",
            rank=rank,
            state_bytes=self.sizes[rank],
            chunk_bytes=CHUNK_BYTES,
            tolerate=1,
            spread=3,
            load=self.load,
            groups=groups,
            previous=previous,
        )

    def place_all(self) -> dict[int, Plan]:
        groups = Groups(self.members, 3)
        plans = {}
        for rank in range(len(self.sizes)):
            plans[rank] = self.place(rank, groups)
            for planned in plans[rank].shards:
                for holder in planned.holders:
                    self.load[holder] += planned.size_bytes
        return plans


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def _lose(world: _World, plans: dict[int, Plan], lost: str) -> int:
    """Find a substitute for every shard that a node held; how many there were."""
    members = {node: domain for node, domain in world.members.items() if node != lost}
    groups = Groups(world.members, 3)
    shards = 0
    for rank, plan in plans.items():
        before = [planned.holders for planned in plan.shards]
        for shard, holders in enumerate(before):
            if lost in holders:
                owner = world.owner(rank)
                found = substitute(
                    members=members,
                    owner=owner,
                    owner_domain=world.members[owner],
                    holders=[holder for holder in holders if holder != lost],
                    domains_of=world.members,
                    job="bench",
                    rank=rank,
                    shard=shard,
                    tolerate=1,
                    spread=3,
                    load=world.load,
                    groups=groups,
                    previous=before,
                )
                shards += found is not None
    return shards


def measure(rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """PlacementClient all ranks at first, again with their holders, after a loss; and the odds of the outcome."""
    runs: dict[str, list[float]] = {name: [] for name in ("first", "racks", "again", "loss", "odds")}
    for number in range(rounds):
        world, racked = _World(0), _World(50)
        plans: dict[int, Plan] = {}
        runs["first"].append(_ms(lambda world=world, plans=plans: plans.update(world.place_all())))  # type: ignore[misc]
        runs["racks"].append(_ms(racked.place_all))
        groups = Groups(world.members, 3)
        previous = {rank: [planned.holders for planned in plan.shards] for rank, plan in plans.items()}

        def again(
            world: _World = world, groups: Groups = groups, kept: dict[int, list[tuple[str, ...]]] = previous
        ) -> None:
            for rank, holders in kept.items():
                world.place(rank, groups, holders)

        runs["again"].append(_ms(again))
        runs["loss"].append(_ms(lambda world=world, plans=plans: _lose(world, plans, "node-0444")))  # type: ignore[misc]
        copysets = copysets_of((world.owner(rank), kept) for rank, kept in previous.items())
        runs["odds"].append(_ms(lambda c=copysets, g=groups: recovery_probability(c, g.order, 8)))  # type: ignore[misc]
        say(f"placement round {number + 1} of {rounds}")
    what = f"{NODES} nodes, {NODES * RANKS_PER_NODE} ranks"
    return [
        Figure(f"place all at first: {what}", "ms", runs["first"], goal="well under 1 s"),
        Figure("the same in 50 racks", "ms", runs["racks"], goal="well under 1 s"),
        Figure("place all again, with their holders", "ms", runs["again"], goal="well under 1 s"),
        Figure("substitutes for all shards of one lost node", "ms", runs["loss"]),
        Figure("exact odds of 8 losses", "ms", runs["odds"]),
    ]
