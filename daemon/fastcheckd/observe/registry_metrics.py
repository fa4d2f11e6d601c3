"""A registry process' metrics: this voter, and, where it leads, the cluster and its copies. Pure.

What is the same at every voter (nodes, jobs) is told by the leader alone: sums over all instances are then right, and
a thousand nodes do not tell of a thousand nodes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from fastcheck_proto.v1 import registry_pb2 as rpb

from .families import JOBS_MAX, OTHERS, counter, gauge

_STATES = ("UP", "SUSPECT", "DOWN", "DRAINING")


@dataclass(frozen=True, kw_only=True)
class LeaderFacts:
    """What only the leader knows."""

    #: Its view, with the signs of life that it has heard.
    view: rpb.ClusterView
    redundancy: rpb.GetRedundancyResponse
    #: Job → its committed shards that are short of copies.
    short_shards: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class VoterFacts:
    """A voter at one moment."""

    has_leader: bool
    term: int
    epoch: int
    #: Of the replicated state: what all voters have been seen to know.
    schema: int
    voters: int
    durations: Sequence[Metric]
    #: None: this voter does not lead.
    leading: LeaderFacts | None


def families(facts: VoterFacts) -> list[Metric]:
    """Everything, for one scrape."""
    leading = facts.leading
    return [
        gauge("registry_is_leader", "1: this voter leads.", int(leading is not None)),
        gauge("registry_has_leader", "1: this voter has heard a leader lately.", int(facts.has_leader)),
        gauge("registry_term", "Raft's term: one more for each election.", facts.term),
        gauge("registry_epoch", "Version of the membership, as applied here.", facts.epoch),
        gauge("registry_schema", "Schema of the state, which all voters have agreed on.", facts.schema),
        gauge("registry_voters", "Voters, as this one knows.", facts.voters),
        *facts.durations,
        *([] if leading is None else _leader_families(leading)),
    ]


def _leader_families(facts: LeaderFacts) -> list[Metric]:
    copies = facts.redundancy
    states = Counter(rpb.NodeState.Name(node.state).removeprefix("NODE_STATE_") for node in facts.view.nodes)
    heard_ms = [
        node.heard_ms_ago
        for node in facts.view.nodes
        if node.state != rpb.NODE_STATE_DOWN and node.HasField("heard_ms_ago")
    ]
    jobs = [(job.job, job.kept_steps[-1]) for job in facts.view.jobs if job.kept_steps]
    return [
        gauge(
            "cluster_nodes",
            "Nodes by state.",
            {(state,): states.get(state, 0) for state in _STATES},
            ("state",),
        ),
        gauge(
            "cluster_heartbeat_age_seconds_max",
            "Longest since the leader heard a node that is not DOWN.",
            max(heard_ms, default=0) / 1000,
        ),
        gauge(
            "cluster_job_committed_step",
            "Newest committed step of each job; of those beyond the first jobs by name, the lowest.",
            _bounded(jobs, min),
            ("training_job",),
        ),
        gauge(
            "cluster_shards_short",
            "Committed shards that miss a copy, lost ones included.",
            copies.short_shards,
        ),
        gauge("cluster_shards_short_bytes", "Bytes of those.", copies.short_bytes),
        gauge(
            "cluster_shards_lost", "Committed shards of which no live node has a copy.", copies.lost_shards
        ),
        gauge(
            "cluster_job_shards_short",
            "Committed shards that miss a copy, by job; absent where none does.",
            _bounded(sorted(facts.short_shards.items()), sum),
            ("training_job",),
        ),
        gauge(
            "cluster_shards_domain_short",
            "Committed shards with copies in one failure domain for no need.",
            copies.domains_short_shards,
        ),
        gauge("cluster_repairs_running", "Copies that are being made anew.", copies.repairing),
        counter("cluster_repairs", "Copies made anew since this voter leads.", copies.repaired),
        counter("cluster_repairs_failed", "Attempts at that which failed.", copies.repair_failures),
        gauge(
            "cluster_copies_wanted",
            "Copies that each shard is to have, the owner's included.",
            copies.wanted_copies,
        ),
    ]


def _bounded(
    by_job: Sequence[tuple[str, int]], join: Callable[[list[int]], int]
) -> dict[tuple[str, ...], float]:
    """By job, and beyond `JOBS_MAX` jobs, which are in order of their names, one number for the rest."""
    found: dict[tuple[str, ...], float] = {(job,): value for job, value in by_job[:JOBS_MAX]}
    if rest := [value for _, value in by_job[JOBS_MAX:]]:
        found[(OTHERS,)] = join(rest)
    return found
