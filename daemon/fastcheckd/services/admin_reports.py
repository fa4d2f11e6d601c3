"""Who is there and who holds what, joined from the registry's view and what the nodes answered. Pure.

`services/admin.py` asks; this module joins, `health_codes.py` judges. Neither calls anybody nor reads a clock.
The registry knows committed steps and those that are reported; what was replicated while it did not answer only the
nodes know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastcheck_proto.placement_odds import TangledError, copysets_of, recovery_probability
from fastcheck_proto.v1 import admin_pb2, common_pb2, node_pb2, peer_pb2, registry_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..restore.survey import complete_steps


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What was said. A node that is missing did not answer, or was not asked because it is DOWN."""

    #: node id → its data process' memory and counters.
    stats: Mapping[str, peer_pb2.GetStatsResponse] = field(default_factory=dict)
    #: node id → everything that it holds.
    replicas: Mapping[str, Sequence[peer_pb2.Replica]] = field(default_factory=dict)
    #: Each job's newest committed step.
    newest_steps: Sequence[registry_pb2.StepRecord] = ()
    #: Job that commits nothing → the ranks that its steps wait for.
    late: Mapping[str, Sequence[registry_pb2.LateRank]] = field(default_factory=dict)
    #: What the leader says about the copies; None: it said nothing.
    redundancy: registry_pb2.GetRedundancyResponse | None = None


def node_ids_to_ask(view: registry_pb2.ClusterView) -> list[str]:
    """Nodes worth a call: a DOWN one would only cost the caller its deadline."""
    return [n.node_id for n in view.nodes if n.state != registry_pb2.NODE_STATE_DOWN]


def node_reports(
    view: registry_pb2.ClusterView, stats: Mapping[str, peer_pb2.GetStatsResponse]
) -> list[admin_pb2.NodeReport]:
    """One report per member, by node id, with fresher memory figures where the node answered."""
    reports = []
    for record in sorted(view.nodes, key=lambda n: n.node_id):
        report = admin_pb2.NodeReport(record=record)
        answer = stats.get(record.node_id)
        if answer is not None:
            report.reachable = True
            report.counters.update(answer.counters)
            if answer.HasField("lane"):
                report.lane.CopyFrom(answer.lane)
            report.record.ram_used_bytes = answer.ram_used_bytes
            report.record.ram_budget_bytes = answer.ram_budget_bytes
        reports.append(report)
    return reports


def memory_of(job: str, stats: Mapping[str, peer_pb2.GetStatsResponse]) -> list[peer_pb2.RankMemory]:
    """What the nodes have set aside for the ranks of a job, by rank."""
    found = [
        memory
        for answer in stats.values()
        for saves in answer.saves
        if saves.job == job
        for memory in saves.memory
    ]
    return sorted(found, key=lambda memory: memory.rank)


def voter_reports(
    known: Sequence[node_pb2.VoterRecord], views: Mapping[str, registry_pb2.ClusterView | None]
) -> list[admin_pb2.VoterReport]:
    """One report per voter, by node id.

    Args:
        known: the voters that the asked node goes by.
        views: each one's own view, None where it did not answer. The newest says who votes and how the nodes are.
    """
    answered = {node_id: view for node_id, view in views.items() if view is not None}
    newest = max(
        answered.values(),
        key=lambda view: (view.has_leader, view.version),
        default=registry_pb2.ClusterView(),
    )
    nodes = {node.node_id: node for node in newest.nodes}
    found = []
    for record in sorted(newest.voter_records or known, key=lambda voter: voter.node_id):
        own, node = answered.get(record.node_id), nodes.get(record.node_id)
        report = admin_pb2.VoterReport(record=record, answers=own is not None)
        if node is not None:
            report.state, report.agent_address = node.state, node.agent_address
            if own is None and node.state == registry_pb2.NODE_STATE_UP and record.node_id in views:
                report.state = registry_pb2.NODE_STATE_SUSPECT
        if own is not None:
            report.leader = newest.has_leader and newest.leader == record.node_id
            report.version, report.epoch = own.version, own.epoch
        found.append(report)
    return found


def replica_reports(
    record: registry_pb2.StepRecord, held: Mapping[str, Sequence[peer_pb2.Replica]]
) -> list[admin_pb2.ReplicaReport]:
    """Every shard of a committed step with the nodes that say they hold it, by rank and shard.

    A replica counts when its digest is the committed one, whatever else lies under the same key. Bytes
    that another node than the owner published after a restore count as a copy: they serve readers as well.
    """
    found: dict[tuple[int, int, bytes], list[tuple[str, peer_pb2.Replica]]] = {}
    for node_id, replicas in held.items():
        for replica in replicas:
            if replica.key.job == record.job and replica.key.step == record.step:
                key = (replica.key.rank, replica.key.shard, replica.digest)
                found.setdefault(key, []).append((node_id, replica))
    reports = []
    for rank in sorted(record.ranks, key=lambda r: r.rank):
        for shard in sorted(rank.shards, key=lambda s: s.shard):
            holding = found.get((rank.rank, shard.shard, shard.digest), [])
            copies = [(node_id, r) for node_id, r in holding if node_id != rank.owner.node_id]
            reports.append(
                admin_pb2.ReplicaReport(
                    step=record.step,
                    rank=rank.rank,
                    shard=shard.shard,
                    owner=rank.owner.node_id,
                    holders=sorted({node_id for node_id, _ in copies}),
                    placed=sorted(holder.node_id for holder in shard.holders),
                    bytes=shard.bytes,
                    digest=shard.digest,
                    verified_at_ms=min((r.verified_at_ms for _, r in copies or holding), default=0),
                    owner_holds=len(copies) < len(holding),
                    lossy=rank.lossy,
                    stored_bytes=sum(r.stored_bytes for _, r in holding),
                    codecs=sum_uses(use for _, r in copies for use in r.codecs),
                )
            )
    return reports


def deleted_bytes(
    outcome: registry_pb2.DeleteStepsResponse, held: Mapping[str, Sequence[peer_pb2.Replica]]
) -> list[admin_pb2.DeletedBytes]:
    """What each node holds of steps that go, by node id; where all of a job goes, whatever it holds of it."""
    going = set(outcome.deleted_steps)
    found = []
    for node_id, replicas in sorted(held.items()):
        gone = [
            replica
            for replica in replicas
            if replica.key.step in going or (outcome.ends_sessions and not outcome.kept_steps)
        ]
        if gone:
            stored = sum(replica.stored_bytes for replica in gone)
            found.append(admin_pb2.DeletedBytes(node_id=node_id, replicas=len(gone), stored_bytes=stored))
    return found


def sum_uses(uses: Iterable[common_pb2.CodecUse]) -> list[common_pb2.CodecUse]:
    """One entry per codec, by name, with the bytes of all."""
    raw: Counter[str] = Counter()
    encoded: Counter[str] = Counter()
    for use in uses:
        raw[use.codec] += use.raw_bytes
        encoded[use.codec] += use.encoded_bytes
    return [common_pb2.CodecUse(codec=c, raw_bytes=raw[c], encoded_bytes=encoded[c]) for c in sorted(raw)]


def short_shards(reports: Iterable[admin_pb2.ReplicaReport]) -> list[admin_pb2.ReplicaReport]:
    """Shards that fewer nodes hold than the commit named."""
    return [report for report in reports if len(report.holders) < len(report.placed)]


def down(view: registry_pb2.ClusterView) -> list[str]:
    """Members that are DOWN, and were not asked: what they hold is not known."""
    return [n.node_id for n in view.nodes if n.state == registry_pb2.NODE_STATE_DOWN]


def unanswered(view: registry_pb2.ClusterView, answered: Mapping[str, object]) -> list[str]:
    """Members that should have answered and did not."""
    return [node_id for node_id in node_ids_to_ask(view) if node_id not in answered]


def with_provisional(
    job: str,
    view: rpb.ClusterView,
    listed: Sequence[rpb.StepSummary] | None,
    held: Mapping[str, Sequence[peer_pb2.Replica]],
) -> list[rpb.StepSummary]:
    """All steps, oldest first.

    Args:
        view: the newest that could be had.
        listed: the registry's answer; None: it does not answer.
        held: node id → what it says it holds of the job.
    """
    kept = {step for known in view.jobs if known.job == job for step in known.kept_steps}
    found = {step.step: step for step in complete_steps(job, held)}
    if listed is None:
        return [
            found[number].summary(rpb.STEP_STATE_COMMITTED if number in kept else rpb.STEP_STATE_PROVISIONAL)
            for number in sorted(found)
        ]
    steps = {summary.step: summary for summary in listed}
    newest = max((s.step for s in listed if s.state == rpb.STEP_STATE_COMMITTED), default=-1)
    for number, step in found.items():
        if step.provisional and number > newest:
            steps[number] = step.summary(rpb.STEP_STATE_PROVISIONAL)
    return [steps[number] for number in sorted(steps)]


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
