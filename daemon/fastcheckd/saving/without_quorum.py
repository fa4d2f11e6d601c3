"""Placing without a registry: by what this node knew last. Pure, but for the memory of what that was.

Wrong guesses cost a refused put or a copy that no commit names; they never cost a committed step, since only the
registry commits, and it checks every holder's life then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..errors import PlacementError
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
    nodes: Iterable[rpb.NodeRecord],
    is_gone: Callable[[pb.NodeRef], bool],
    owner: str,
    job: str,
    rank: int,
    state_bytes: int,
    chunk_bytes: int,
    tolerate: int,
    spread: int,
    avoid: Collection[str] = (),
) -> rpb.PlaceResponse:
    """A placement by the last view: the rank's holders stay, those that are gone or rest are replaced.

    Args:
        previous: the rank's last placement; None: there was none.
        nodes: all that the last view names.
        is_gone: whether the view says that a life is over.
        avoid: nodes that get nothing while others can take their place.

    Raises:
        PlacementError: fewer than `tolerate` nodes beside the owner are known to be there.
    """
    known = {n.node_id: _holder(n) for n in nodes if n.state in {rpb.NODE_STATE_UP, rpb.NODE_STATE_SUSPECT}}
    for shard in previous.shards if previous is not None else ():
        for holder in shard.holders:
            if not is_gone(holder.node):
                known.setdefault(holder.node.node_id, holder)
    known.pop(owner, None)
    chosen = [
        list(shard.holders)
        for shard in place(
            members=known,
            owner=owner,
            job=job,
            rank=rank,
            state_bytes=state_bytes,
            chunk_bytes=chunk_bytes,
            tolerate=tolerate,
            spread=spread,
            avoid=frozenset(avoid),
        )
    ]
    if not chosen:
        raise PlacementError(f"the last view of the cluster names nobody who could hold rank {rank}")
    if previous is not None and previous.shards:
        kept = [
            [h.node.node_id for h in s.holders if h.node.node_id in known and h.node.node_id not in avoid]
            for s in previous.shards
        ]
        chosen = [_filled(mine[:tolerate], chosen, shard, tolerate) for shard, mine in enumerate(kept)]
    return rpb.PlaceResponse(
        epoch=previous.epoch if previous is not None else 0,
        generation=previous.generation if previous is not None else 0,
        shards=[
            rpb.ShardPlacement(shard=index, holders=[known[node_id] for node_id in names])
            for index, names in enumerate(chosen)
        ],
    )


def _filled(kept: list[str], fresh: list[list[str]], shard: int, tolerate: int) -> list[str]:
    """The holders that stay, and as many of a fresh placement as are missing, each shard beginning elsewhere."""
    everyone = [name for names in fresh for name in names]
    turn = shard % len(everyone)
    candidates = fresh[shard % len(fresh)] + everyone[turn:] + everyone[:turn]
    return list(dict.fromkeys([*kept, *candidates]))[:tolerate]


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
