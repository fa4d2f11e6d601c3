"""Whether a node is ready: registered, called UP, its store adopted, and in touch with the registry. Pure.

Liveness is another question and has no rule: whoever answers lives. What makes a node unready mends itself, or
needs somebody; a restart would only add the time of a restart.
"""

from __future__ import annotations

from fastcheck_proto.v1 import registry_pb2 as rpb

from .agent_metrics import NodeFacts

_DATA = {
    rpb.DATA_HEALTH_UNSPECIFIED: "the data process has not been heard of",
    rpb.DATA_HEALTH_STARTING: "the data process is starting: it adopts what the RAM directory holds",
    rpb.DATA_HEALTH_GONE: "the data process has ended; another one is to be started",
    rpb.DATA_HEALTH_HUNG: "the data process is there and makes no progress",
}


def why_not_ready(facts: NodeFacts) -> list[str]:
    """Why the node takes no work that it could take, a sentence each; none: it is ready."""
    reasons = []
    if facts.data != rpb.DATA_HEALTH_OK:
        reasons.append(_DATA[facts.data])
    reasons.extend(facts.troubles)
    if not facts.incarnation:
        return [*reasons, "the registry has not registered this node yet"]
    if not facts.has_quorum:
        reasons.append("no majority of the registry's voters answers this node")
    if facts.not_up:
        reasons.append(facts.not_up)
    return reasons
