"""What stopping a node for good would cost: committed copies, and the registry's quorum. Pure."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from .model import Ref, State, is_live
from .redundancy import counts, kept_shards, replicas_of

REASONS_MAX = 16
#: Jobs that an answer names.
JOBS_SHOWN_MAX = 64


@dataclass(frozen=True, kw_only=True)
class StopVerdict:
    """What stopping a node for good would cost."""

    #: Every committed shard keeps the wanted copies elsewhere, and the registry its quorum.
    safe: bool
    #: Nothing committed would be lost, nor the quorum.
    survivable: bool
    #: Why it is not safe, a sentence each.
    reasons: tuple[str, ...]
    short_shards: int
    lost_shards: int
    #: Jobs with such shards.
    jobs: tuple[str, ...]


def stop_verdict(
    state: State,
    node_id: str,
    *,
    tolerate: int,
    voters: Collection[str],
    unwell: Set[str] = frozenset(),
) -> StopVerdict:
    """Judge a node that is to be stopped.

    Args:
        voters: node ids of all voters.
        unwell: nodes that may be dead already; what they hold counts for nothing.
    """
    others = {other: node for other, node in state.nodes.items() if other != node_id and other not in unwell}
    counting = {other: node.incarnation for other, node in others.items() if counts(node)}
    live = {other: node.incarnation for other, node in others.items() if is_live(node)}
    short: dict[str, int] = {}
    gone: dict[str, int] = {}
    for shard_id, record, shard in kept_shards(state):
        good, readable = set(), False
        lost = set(map(Ref.of, shard.lost))
        for ref in replicas_of(record, shard):
            if live.get(ref.node_id) != ref.incarnation or ref in lost:
                continue
            readable = True
            if ref.node_id in counting:
                good.add(ref.node_id)
        if len(good) <= tolerate:
            short[shard_id.job] = short.get(shard_id.job, 0) + 1
            if not readable:
                gone[shard_id.job] = gone.get(shard_id.job, 0) + 1
    reasons = [
        f"job {job}: {_shards(count)} would have no copy left on another node" for job, count in gone.items()
    ]
    reasons += [
        f"job {job}: {_shards(count)} would have fewer than {tolerate + 1} copies on nodes that stay"
        for job, count in short.items()
    ]
    standing = {voter for voter in voters if voter in live}
    quorum = not voters or 2 * len(standing) > len(voters)
    if not quorum:
        reasons.insert(
            0,
            f"the registry would have {len(standing)} of its {len(voters)} voters, "
            f"{len(voters) // 2 + 1} are needed: start others, or replace {node_id} as a voter first",
        )
    return StopVerdict(
        safe=quorum and not short,
        survivable=quorum and not gone,
        reasons=tuple(reasons[:REASONS_MAX]),
        short_shards=sum(short.values()),
        lost_shards=sum(gone.values()),
        jobs=tuple(sorted(short)[:JOBS_SHOWN_MAX]),
    )


def _shards(count: int) -> str:
    return "one shard" if count == 1 else f"{count} shards"
