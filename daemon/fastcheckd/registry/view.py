"""The cluster as a voter shows it: the replicated state plus what only this voter knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fastcheck_proto.v1 import node_pb2, registry_pb2

from ..config import Voter
from ..health.detector import Life
from .owners import owner_of
from .records import Json
from .sessions import is_running, nodes_there

_STATES = {
    "UP": registry_pb2.NODE_STATE_UP,
    "SUSPECT": registry_pb2.NODE_STATE_SUSPECT,
    "DOWN": registry_pb2.NODE_STATE_DOWN,
    "DRAINING": registry_pb2.NODE_STATE_DRAINING,
}


@dataclass(frozen=True)
class Signs:
    """What the answering voter itself knows of a node's life."""

    #: Since it was heard last; None: never.
    heard_ms_ago: int | None = None
    data: registry_pb2.DataHealth.ValueType = registry_pb2.DATA_HEALTH_UNSPECIFIED
    #: Why it is suspected or damped; empty: it is neither, or this voter neither leads nor is without a leader.
    reason: str = ""
    #: Which of its processes do not run as they should; empty: none.
    trouble: str = ""


NO_SIGNS = Signs()


def state_value(state: str) -> registry_pb2.NodeState.ValueType:
    """A node's state on the wire; the empty one of `history` is unspecified."""
    return _STATES.get(state, registry_pb2.NODE_STATE_UNSPECIFIED)


def voter_records(state: Json, voters: Sequence[Voter]) -> list[node_pb2.VoterRecord]:
    """The voters that the registry names or, until it does, those of the engine."""
    named = state["voters"]
    if named is None:
        named = [(voter.node_id, voter.registry_address, voter.raft_address) for voter in voters]
    return [
        node_pb2.VoterRecord(node_id=node_id, registry_address=registry, raft_address=raft)
        for node_id, registry, raft in named
    ]


def job_view(name: str, job: Json, there: Collection[str]) -> registry_pb2.JobView:
    """One job: its kept steps, oldest first. `there`: the nodes that are not DOWN."""
    return registry_pb2.JobView(
        job=name,
        kept_steps=[kept["step"] for kept in job["steps"]],
        world_size=job["world_size"],
        owner=owner_of(job),
        void_below_session=job.get("void", 0),
        next_session=job["next_session"],
        running_ranks=sum(is_running(seat, there) for seat in job["ranks"].values()),
        superseded=[
            registry_pb2.SupersededSteps(below_step=step, below_session=session)
            for step, session in job.get("superseded", ())
        ],
        live_from_session=min((seat["session"] for seat in job["ranks"].values()), default=0),
        committed_at_ms=job["steps"][-1].get("at_ms", 0) if job["steps"] else 0,
    )


def late_ranks(state: Json, name: str, ranks: Sequence[int]) -> list[registry_pb2.LateRank]:
    """Ranks that others wait for, with the nodes on which they took their places."""
    job = state["jobs"].get(name, {"ranks": {}})
    late = []
    for rank in ranks:
        seat = job["ranks"].get(str(rank))
        node = None if seat is None else state["nodes"].get(seat["node"][0])
        late.append(
            registry_pb2.LateRank(
                rank=rank,
                node_id="" if seat is None else seat["node"][0],
                node_state=state_value("" if node is None else node["state"]),
                closed=seat is not None and seat.get("closed", False),
            )
        )
    return late


def job_views(state: Json) -> list[registry_pb2.JobView]:
    """All jobs by name."""
    there = nodes_there(state)
    return [job_view(name, job, there) for name, job in sorted(state["jobs"].items())]


def cluster_view(
    state: Json,
    *,
    cluster_id: str,
    leader: str,
    voters: Sequence[Voter],
    suspects: Collection[Life],
    ram_used_bytes: Mapping[str, int],
    signs: Mapping[Life, Signs],
) -> registry_pb2.ClusterView:
    """The view now.

    Args:
        state: as applied here.
        cluster_id: the cluster's name.
        leader: its node id; empty when this voter hears none.
        voters: the engine's.
        suspects: lives that are shown as SUSPECT.
        ram_used_bytes: by node id, as last heard.
        signs: what this voter heard of each life; missing ones were never heard.
    """
    named = voter_records(state, voters)
    voting = {voter.node_id for voter in named}
    view = registry_pb2.ClusterView(
        cluster_id=cluster_id,
        epoch=state["epoch"],
        leader=leader,
        version=state["version"],
        voters=[voter.node_id for voter in named],
        voter_records=named,
        has_leader=bool(leader),
        jobs=job_views(state),
    )
    for node_id, node in sorted(state["nodes"].items()):
        life = (node_id, node["incarnation"])
        heard = signs.get(life, NO_SIGNS)
        shown, reason = node["state"], node["reason"]
        if shown == "UP":
            reason = heard.reason or reason
            if life in suspects:
                shown = "SUSPECT"
        view.nodes.add(
            node_id=node_id,
            incarnation=node["incarnation"],
            state=_STATES[shown],
            agent_address=node["agent_address"],
            data_address=node["data_address"],
            lane_address=node["lane_address"],
            voter=node_id in voting,
            ram_budget_bytes=node["ram_budget_bytes"],
            ram_used_bytes=ram_used_bytes.get(node_id, 0),
            labels=node["labels"],
            reason=reason,
            since_ms=node["since_ms"],
            heard_ms_ago=heard.heard_ms_ago,
            data=heard.data,
            trouble=heard.trouble,
        )
    return view
