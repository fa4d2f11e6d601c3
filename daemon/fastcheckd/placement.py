"""Where shards go: members and policy → shards and their holders. Pure, no I/O, no clock, no randomness.

Copies are spread, so that a restore pulls from several nodes at once, but only inside a bounded group:
if every node held something of every other node, any two losses at once would be fatal for someone.
The groups are cut from the sorted membership, so every voter and every restart computes the same
answer, and a rank keeps its holders for as long as the members stay.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Set
from dataclasses import dataclass
from itertools import pairwise

from .errors import PlacementError


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One slice [offset, offset + size_bytes) of a rank's state and the nodes that are to hold it."""

    shard: int
    offset: int
    size_bytes: int
    #: Distinct, never the owner; as many as losses are tolerated.
    holders: tuple[str, ...]


def plan_shards(state_bytes: int, chunk_bytes: int, count_max: int) -> tuple[tuple[int, int], ...]:
    """Cut a state into at most `count_max` slices (offset, bytes) of about the same size.

    Boundaries are multiples of `chunk_bytes`; no slice is empty, except the only one of an empty state.
    """
    chunks = -(-state_bytes // chunk_bytes)
    count = max(1, min(count_max, chunks))
    cuts = [min(chunks * i // count * chunk_bytes, state_bytes) for i in range(count)] + [state_bytes]
    return tuple((start, stop - start) for start, stop in pairwise(cuts))


def group_of(node_id: str, members: Collection[str], spread: int) -> tuple[str, ...]:
    """The group that `node_id` shares its fate with, as a ring that starts behind it, without it.

    Groups are stretches of the sorted members, of spread + 1 to 2 * spread + 1 nodes each (one smaller
    group when there are no more nodes than that).
    """
    ordered = sorted({*members, node_id})
    groups = max(1, len(ordered) // (spread + 1))
    position = ordered.index(node_id)
    # Cut evenly: group g is [n*g//groups, n*(g+1)//groups); the lengths differ by one at most.
    group = next(
        ordered[len(ordered) * g // groups : len(ordered) * (g + 1) // groups]
        for g in range(groups)
        if position < len(ordered) * (g + 1) // groups
    )
    here = group.index(node_id)
    return (*group[here + 1 :], *group[:here])


def place(
    *,
    members: Collection[str],
    owner: str,
    job: str,
    rank: int,
    state_bytes: int,
    chunk_bytes: int,
    tolerate: int,
    spread: int,
    avoid: Set[str] = frozenset(),
) -> tuple[PlannedShard, ...]:
    """Split a rank's state and name `tolerate` holders for each shard.

    Args:
        members: node ids that may hold copies (the owner may be among them; it is never chosen).
        avoid: members to leave out if others can take their place, first from the owner's group,
            then from the rest; with nobody else left they are used after all.

    Raises:
        PlacementError: fewer than `tolerate` members beside the owner.
    """
    others = sorted({*members} - {owner})
    if len(others) < tolerate:
        raise PlacementError(
            f"{tolerate} healthy nodes beside the owner {owner} are needed to hold copies, but there "
            f"are only {len(others)}: start more nodes, or lower the config key 'tolerate'"
        )
    group = group_of(owner, members, spread)
    holders = [node for node in group if node not in avoid][:spread]
    if len(holders) < tolerate:
        behind = next((i for i, node in enumerate(others) if node > owner), 0)
        ring = others[behind:] + others[:behind]
        reserve = [node for node in ring if node not in group and node not in avoid]
        reserve += [node for node in group if node in avoid]
        reserve += [node for node in ring if node not in group and node in avoid]
        # No more strangers than needed: each one ties another group to this one's fate.
        holders += reserve[: tolerate - len(holders)]
    # Ranks of one node start at different holders, so that many small states spread as well.
    start = zlib.crc32(job.encode()) + rank
    return tuple(
        PlannedShard(
            shard=shard,
            offset=offset,
            size_bytes=size_bytes,
            holders=tuple(holders[(start + shard + copy) % len(holders)] for copy in range(tolerate)),
        )
        for shard, (offset, size_bytes) in enumerate(plan_shards(state_bytes, chunk_bytes, len(holders)))
    )
