"""Which copy of each shard to ask, in which order. Pure.

The commit names the holders and the owner; those that are UP are asked together, each shard starting with
another one so that the load spreads where a shard has more sources than are asked at once. Nodes that the view holds
DOWN come last instead of never: the view may lag, and a refused connection costs little against a lost step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb


@dataclass(frozen=True)
class ShardPlan:
    """One shard to get and the peers to try, best first."""

    record: rpb.ShardRecord
    sources: tuple[pb.Holder, ...]
    #: Of these so many may be asked together, the first ones; the others only when nobody is left.
    at_once: int


def plan_fetch(
    record: rpb.RankRecord, nodes: Mapping[str, rpb.NodeRecord], own_node_id: str
) -> list[ShardPlan]:
    """Order the sources of every shard of a rank.

    Args:
        record: the rank's part of a committed step.
        nodes: the membership by node id; a node that is not in it has no address and cannot be asked.
        own_node_id: this node, which needs no network to ask itself.
    """
    plans = []
    for shard in record.shards:
        names = [h.node_id for h in shard.holders]
        turn = shard.shard % len(names) if names else 0
        names = names[turn:] + names[:turn]
        names.append(record.owner.node_id)
        known = [nodes[n] for n in dict.fromkeys(names) if n in nodes and n != own_node_id]
        known.sort(key=lambda n: n.state == rpb.NODE_STATE_DOWN)
        up = sum(n.state != rpb.NODE_STATE_DOWN for n in known)
        plans.append(ShardPlan(shard, tuple(_holder(n) for n in known), up))
    return plans


def other_sources(plan: ShardPlan, nodes: Mapping[str, rpb.NodeRecord], own_node_id: str) -> list[pb.Holder]:
    """Live nodes that the commit does not name but that may hold the shard all the same.

    A rank that was restored somewhere else left its bytes there, and a later repair may have too.
    """
    tried = {h.node.node_id for h in plan.sources} | {own_node_id}
    return [_holder(n) for n in nodes.values() if n.node_id not in tried and n.state == rpb.NODE_STATE_UP]


def _holder(node: rpb.NodeRecord) -> pb.Holder:
    return pb.Holder(
        node=pb.NodeRef(node_id=node.node_id, incarnation=node.incarnation),
        data_address=node.data_address,
        lane_address=node.lane_address,
    )
