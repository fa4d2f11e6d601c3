"""Which nodes hold a rank's shards: place a state, or find one more holder for a shard that lost one.

Both go by the same order of preference (`preference.py`), so that what a repair chose is what the next placement
keeps. Whoever held a shard of the newest step and may still hold it keeps it: the next step is coded against what
it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from fastcheck_proto.placement_groups import Groups

from .preference import Preference

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
    pick = Preference(members, owner, owner_domain, tolerate, spread, avoid, load or {}, groups)
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
    tolerate: int,
    spread: int,
    avoid: Set[str] = frozenset(),
    previous: Sequence[Sequence[str]] = (),
    load: Mapping[str, int] | None = None,
    groups: Groups | None = None,
) -> str | None:
    """One more node for a shard that lost a copy: the one that `place` would name next. None: nobody is left.

    A node to avoid comes last but does come: whoever wants none leaves it out of `members`.

    Args:
        holders: nodes that still hold the shard, and those that are about to.
        domains_of: labels of nodes that hold it and may not be members, such as draining ones.
        previous: holders of each shard of the rank, so that it stays on few nodes.

    The others as in `place`.
    """
    others = len(members) - (owner in members)
    if not others:
        return None
    pick = Preference(
        members, owner, owner_domain, min(tolerate, others), spread, avoid, load or {}, groups, domains_of
    )
    pick.take_turns(job, rank, max(1, len(previous)))
    for shard_holders in previous or [list(holders)]:
        for holder in shard_holders:
            if holder in members and holder != owner:
                pick.takes(holder)
    return pick.one(holders)
