"""The cluster as a voter shows it: the replicated state plus what only this voter knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fastcheck_proto.v1 import node_pb2, registry_pb2

from ..config import Voter
from ..health.detector import Life
from .model import UNKNOWN, UP, Job, Ref, State
from .raft.membership import voter_message
from .sessions import is_running, nodes_there


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


def voter_records(state: State, voters: Sequence[Voter]) -> list[node_pb2.VoterRecord]:
    """The voters that the registry names or, until it does, those of the engine."""
    return state.voters or list(map(voter_message, voters))


def job_view(job: Job, there: Collection[str]) -> registry_pb2.JobView:
    """One job: its kept steps, oldest first. `there`: the nodes that are not DOWN."""
    return registry_pb2.JobView(
        job=job.name,
        kept_steps=job.kept,
        world_size=job.world_size,
        owner=job.owner,
        void_below_session=job.void,
        next_session=job.next_session,
        running_ranks=sum(is_running(seat, there) for seat in job.ranks.values()),
        superseded=[
            registry_pb2.SupersededSteps(below_step=step, below_session=session)
            for step, session in job.superseded
        ],
        live_from_session=min((seat.session for seat in job.ranks.values()), default=0),
        committed_at_ms=job.steps[-1].committed_at_ms if job.steps else 0,
    )


def late_ranks(state: State, name: str, ranks: Sequence[int]) -> list[registry_pb2.LateRank]:
    """Ranks that others wait for, with the nodes on which they took their places."""
    seats = state.jobs[name].ranks if name in state.jobs else {}
    late = []
    for rank in ranks:
        seat = seats.get(rank)
        node = None if seat is None else state.nodes.get(seat.node.node_id)
        late.append(
            registry_pb2.LateRank(
                rank=rank,
                node_id="" if seat is None else seat.node.node_id,
                node_state=UNKNOWN if node is None else node.state,
                closed=seat is not None and seat.closed,
            )
        )
    return late


def job_views(state: State) -> list[registry_pb2.JobView]:
    """All jobs by name."""
    there = nodes_there(state)
    return [job_view(job, there) for _, job in sorted(state.jobs.items())]


def cluster_view(
    state: State,
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
        epoch=state.epoch,
        leader=leader,
        version=state.version,
        voters=[voter.node_id for voter in named],
        voter_records=named,
        has_leader=bool(leader),
        jobs=job_views(state),
    )
    for node_id, node in sorted(state.nodes.items()):
        life = Ref.of(node)
        heard = signs.get(life, NO_SIGNS)
        shown = view.nodes.add()
        shown.CopyFrom(node)
        shown.ClearField("life_id")
        shown.ClearField("draining")
        shown.voter = node_id in voting
        if node.state == UP:
            shown.reason = heard.reason or node.reason
            if life in suspects:
                shown.state = registry_pb2.NODE_STATE_SUSPECT
        shown.ram_used_bytes = ram_used_bytes.get(node_id, 0)
        if heard.heard_ms_ago is not None:
            shown.heard_ms_ago = heard.heard_ms_ago
        shown.data = heard.data
        shown.trouble = heard.trouble
    return view
