"""The cluster as a voter shows it: the replicated state plus what only this voter knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fastcheck_proto.v1 import registry_pb2

from .records import Json

_STATES = {
    "UP": registry_pb2.NODE_STATE_UP,
    "SUSPECT": registry_pb2.NODE_STATE_SUSPECT,
    "DOWN": registry_pb2.NODE_STATE_DOWN,
    "DRAINING": registry_pb2.NODE_STATE_DRAINING,
}


def job_view(name: str, job: Json) -> registry_pb2.JobView:
    """One job: its kept steps, oldest first."""
    steps = [kept["step"] for kept in job["steps"]]
    return registry_pb2.JobView(job=name, kept_steps=steps, world_size=job["world_size"])


def cluster_view(
    state: Json,
    *,
    cluster_id: str,
    leader: str,
    voters: Sequence[str],
    suspects: Collection[tuple[str, int]],
    ram_used_bytes: Mapping[str, int],
) -> registry_pb2.ClusterView:
    """The view now. `leader` is empty when this voter hears none; `suspects` are (node, incarnation)."""
    view = registry_pb2.ClusterView(
        cluster_id=cluster_id,
        epoch=state["epoch"],
        leader=leader,
        version=state["version"],
        voters=voters,
        has_leader=bool(leader),
        jobs=[job_view(name, job) for name, job in sorted(state["jobs"].items())],
    )
    for node_id, node in sorted(state["nodes"].items()):
        shown = node["state"]
        if shown == "UP" and (node_id, node["incarnation"]) in suspects:
            shown = "SUSPECT"
        view.nodes.add(
            node_id=node_id,
            incarnation=node["incarnation"],
            state=_STATES[shown],
            agent_address=node["agent_address"],
            data_address=node["data_address"],
            lane_address=node["lane_address"],
            voter=node["voter"],
            ram_budget_bytes=node["ram_budget_bytes"],
            ram_used_bytes=ram_used_bytes.get(node_id, 0),
        )
    return view
