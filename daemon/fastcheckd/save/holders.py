"""Which holders a shard is sent to: those of a placement that are needed still, and not those that just failed us."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb


class Quarantine:
    """Peers that just failed us and get nothing from us for a while."""

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        #: By peer and job; no job: for all of them.
        self._until: dict[tuple[str, str], float] = {}

    def add(self, node_id: str, job: str = "") -> None:
        """Give a peer a rest, from one job if it is that one's alone."""
        self._until[node_id, job] = time.monotonic() + self._rest_s

    def members(self, job: str) -> list[str]:
        """Peers that a job does without now."""
        now = time.monotonic()
        self._until = {resting: t for resting, t in self._until.items() if t > now}
        return sorted({node_id for node_id, whose in self._until if whose in {"", job}})


def pick_holders(
    shard: int, wanted: int, taken: Iterable[str], placement: rpb.PlaceResponse
) -> list[pb.Holder]:
    """Choose up to `wanted` holders for a shard from a placement, none of them in `taken`.

    The placement's own choice for the shard comes first; others of the group follow, rotated by
    the shard's index so that several shards in need do not all go to one node. Pure.
    """
    own = [h for s in placement.shards if s.shard == shard for h in s.holders]
    everyone = [h for s in placement.shards for h in s.holders]
    turn = shard % len(everyone) if everyone else 0
    chosen: dict[str, pb.Holder] = {}
    for holder in own + everyone[turn:] + everyone[:turn]:
        if len(chosen) < wanted and holder.node.node_id not in taken:
            chosen.setdefault(holder.node.node_id, holder)
    return list(chosen.values())
