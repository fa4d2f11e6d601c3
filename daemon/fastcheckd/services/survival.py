"""How likely the newest committed steps survive further losses, by where the registry says their copies are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fastcheck_proto.placement_odds import TangledError, copysets_of, recovery_probability
from fastcheck_proto.v1 import admin_pb2, registry_pb2

#: Nodes of a cluster for which it is counted: an operator waits for the answer.
NODES_MAX = 256
#: Numbers of losses that are counted, from the smallest that can be fatal.
LOSSES_COUNTED = 2


def survival(
    view: registry_pb2.ClusterView, newest_steps: Sequence[registry_pb2.StepRecord]
) -> list[admin_pb2.Survival]:
    """The odds for the smallest number of losses that can cost a shard, and for one more.

    Empty when there is nothing to lose, when something is lost already, or when it cannot be counted.
    """
    there = {n.node_id for n in view.nodes if n.state != registry_pb2.NODE_STATE_DOWN}
    if len(there) > NODES_MAX:
        return []
    copysets = copysets_of(
        (rank.owner.node_id, [[holder.node_id for holder in shard.holders] for shard in rank.shards])
        for record in newest_steps
        for rank in record.ranks
    )
    live = {copyset & there for copyset in copysets}
    if not live or not all(live):
        return []
    fatal = min(len(copyset) for copyset in live)
    found = []
    for losses in range(fatal, min(fatal + LOSSES_COUNTED, len(there) + 1)):
        try:
            probability = recovery_probability(live, sorted(there), losses)
        except TangledError:
            break
        found.append(admin_pb2.Survival(losses=losses, probability=float(probability)))
    return found
