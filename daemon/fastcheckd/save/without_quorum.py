"""Placement without a registry: by what this node knew last. Pure, but for the memory of what that was.

Wrong guesses cost a refused offer or a copy that no commit names; they never cost a committed step, since only the
registry commits, and it checks every holder's life then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..placement import place

#: Ranks whose last placement is remembered; a node has a few trainers.
PLACEMENTS_MAX = 256
#: How long an unanswered call speaks for the ones after it. Steps that wait for their commit ask more often.
SILENCE_COUNTS_S = 5.0


class Silence:
    """Whether the registry was silent when it was last asked, a moment ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0

    def heard(self) -> None:
        """The registry answered."""
        self._until = 0.0

    def noted(self) -> None:
        """It did not."""
        self._until = self._clock() + SILENCE_COUNTS_S

    @property
    def lasts(self) -> bool:
        """Asking now would probably be in vain."""
        return self._clock() < self._until


class LastPlacements:
    """Each rank's newest placement: where its copies went, as far as it came to that."""

    def __init__(self) -> None:
        self._by_rank: OrderedDict[tuple[str, int], rpb.PlaceResponse] = OrderedDict()

    def remember(self, job: str, rank: int, placement: rpb.PlaceResponse) -> None:
        """Take the place of what was known."""
        self._by_rank[job, rank] = placement
        self._by_rank.move_to_end((job, rank))
        if len(self._by_rank) > PLACEMENTS_MAX:
            self._by_rank.popitem(last=False)

    def get(self, job: str, rank: int) -> rpb.PlaceResponse | None:
        """What was remembered last."""
        return self._by_rank.get((job, rank))


def place_alone(
    *,
    previous: rpb.PlaceResponse | None,
    nodes: Collection[rpb.NodeRecord],
    is_gone: Callable[[pb.NodeRef], bool],
    owner: str,
    job: str,
    rank: int,
    state_bytes: int,
    chunk_bytes: int,
    tolerate: int,
    spread: int,
    failure_domain: str = "",
    avoid: Collection[str] = (),
) -> rpb.PlaceResponse:
    """A placement by the last view: the rank's holders stay, those that are gone or rest are replaced.

    Args:
        previous: the rank's last placement; None: there was none.
        nodes: all that the last view names.
        is_gone: whether the view says that a life is over.
        failure_domain: label whose values fail together; empty: every node is by itself.
        avoid: nodes that get nothing while others can take their place.

    Raises:
        PlacementError: fewer than `tolerate` nodes beside the owner are known to be there.
    """
    there = [n for n in nodes if n.state in {rpb.NODE_STATE_UP, rpb.NODE_STATE_SUSPECT}]
    known = {n.node_id: _holder(n) for n in there}
    domains = {n.node_id: n.labels.get(failure_domain, "") for n in nodes} if failure_domain else {}
    shards = previous.shards if previous is not None else ()
    for shard in shards:
        for holder in shard.holders:
            if not is_gone(holder.node):
                known.setdefault(holder.node.node_id, holder)
    plan = place(
        members={node_id: domains.get(node_id, "") for node_id in known},
        owner=owner,
        owner_domain=domains.get(owner, ""),
        job=job,
        rank=rank,
        state_bytes=state_bytes,
        chunk_bytes=chunk_bytes,
        tolerate=tolerate,
        spread=spread,
        avoid=frozenset(avoid),
        previous=[[holder.node.node_id for holder in shard.holders] for shard in shards],
    )
    return rpb.PlaceResponse(
        epoch=previous.epoch if previous is not None else 0,
        generation=previous.generation if previous is not None else 0,
        domains_short=plan.domains_short,
        shards=[
            rpb.ShardPlacement(shard=shard.shard, holders=[known[node_id] for node_id in shard.holders])
            for shard in plan.shards
        ],
    )


def as_placed(
    placement: rpb.PlaceResponse, acknowledged: Mapping[int, Iterable[pb.Holder]]
) -> rpb.PlaceResponse:
    """The placement as it turned out: shard → those that hold it."""
    return rpb.PlaceResponse(
        epoch=placement.epoch,
        generation=placement.generation,
        shards=[
            rpb.ShardPlacement(
                shard=shard, holders=sorted(holders, key=lambda holder: str(holder.node.node_id))
            )
            for shard, holders in sorted(acknowledged.items())
        ],
    )


def _holder(node: rpb.NodeRecord) -> pb.Holder:
    return pb.Holder(
        node=pb.NodeRef(node_id=node.node_id, incarnation=node.incarnation),
        data_address=node.data_address,
        lane_address=node.lane_address,
    )
