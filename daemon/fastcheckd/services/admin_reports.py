"""What an operator is told, decided from the registry's view and what the nodes answered. Pure.

`services/admin.py` asks; this module judges. It never calls anybody and never reads a clock, so every
health code can be tested from a view made by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastcheck_proto.v1 import admin_pb2, common_pb2, peer_pb2, registry_pb2

#: A node above this share of its budget soon refuses saves: the codes warn before that happens.
MEMORY_NEAR_FULL_SHARE = 0.9
#: Shards and nodes named in one detail; the rest is a number.
NAMED_MAX = 3

_STATE_WORDS: dict[int, str] = {
    registry_pb2.NODE_STATE_UP: "UP",
    registry_pb2.NODE_STATE_SUSPECT: "SUSPECT",
    registry_pb2.NODE_STATE_DOWN: "DOWN",
    registry_pb2.NODE_STATE_DRAINING: "DRAINING",
}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the nodes said. A node that is missing did not answer, or was not asked because it is DOWN."""

    #: node id → its data process' memory and counters.
    stats: Mapping[str, peer_pb2.GetStatsResponse] = field(default_factory=dict)
    #: node id → everything that it holds.
    replicas: Mapping[str, Sequence[peer_pb2.Replica]] = field(default_factory=dict)


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
            report.record.ram_used_bytes = answer.ram_used_bytes
            report.record.ram_budget_bytes = answer.ram_budget_bytes
        reports.append(report)
    return reports


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


def unanswered(view: registry_pb2.ClusterView, answered: Mapping[str, object]) -> list[str]:
    """Members that should have answered and did not."""
    return [node_id for node_id in node_ids_to_ask(view) if node_id not in answered]


def health_codes(
    view: registry_pb2.ClusterView,
    answers: Answers,
    newest_steps: Sequence[registry_pb2.StepRecord],
    *,
    has_quorum: bool,
) -> list[admin_pb2.HealthCode]:
    """Everything that is wrong, the worst first.

    Args:
        view: the members as the registry last said.
        answers: what the nodes said about themselves.
        newest_steps: each job's newest committed step.
        has_quorum: whether the registry answers for what it decides.
    """
    codes: list[admin_pb2.HealthCode] = []
    if not has_quorum:
        voters = ", ".join(view.voters) or "not known"
        codes.append(
            admin_pb2.HealthCode(
                code="NO_QUORUM",
                severity=admin_pb2.HEALTH_CRITICAL,
                detail=f"the registry has no leader that can commit (voters: {voters}); no step is committed",
                remedy="bring back a majority of the voters; training goes on, and steps commit afterwards",
            )
        )
    for node in sorted(view.nodes, key=lambda n: n.node_id):
        codes.extend(_node_codes(node, answers))
    for record in newest_steps:
        codes.extend(_short_code(record, view, answers))
    return sorted(codes, key=lambda c: -c.severity)


def worst(codes: Iterable[admin_pb2.HealthCode]) -> admin_pb2.Health.ValueType:
    """The cluster's health: that of the worst code, OK when there is none."""
    return max((code.severity for code in codes), default=admin_pb2.HEALTH_OK)


def _node_codes(node: registry_pb2.NodeRecord, answers: Answers) -> Iterable[admin_pb2.HealthCode]:
    name = f"{node.node_id} (a registry voter)" if node.voter else node.node_id
    degraded = admin_pb2.HEALTH_DEGRADED
    if node.state == registry_pb2.NODE_STATE_DOWN:
        yield admin_pb2.HealthCode(
            code="NODE_DOWN",
            severity=degraded,
            detail=f"{name} is DOWN",
            remedy=f"start fastcheckd on {node.node_id} again, or replace the machine under the same node_id",
        )
        return
    if node.state == registry_pb2.NODE_STATE_SUSPECT:
        yield admin_pb2.HealthCode(
            code="NODE_SUSPECT",
            severity=degraded,
            detail=f"{name} has not been heard of lately",
            remedy=f"look at the load and the network of {node.node_id}; it is either UP again or DOWN soon",
        )
    stats = answers.stats.get(node.node_id)
    if stats is None:
        state = _STATE_WORDS.get(node.state, "in an unknown state")
        yield admin_pb2.HealthCode(
            code="DATA_UNREACHABLE",
            severity=degraded,
            detail=f"the data process of {name} at {node.data_address} did not answer, "
            f"while the registry holds it {state}",
            remedy=f"look at the fastcheckd log of {node.node_id} and at the network between the nodes",
        )
    used = stats.ram_used_bytes if stats else node.ram_used_bytes
    budget = stats.ram_budget_bytes if stats else node.ram_budget_bytes
    if budget and used > MEMORY_NEAR_FULL_SHARE * budget:
        yield admin_pb2.HealthCode(
            code="MEMORY_NEAR_FULL",
            severity=degraded,
            detail=f"{name} uses {used} of its {budget} bytes ({100 * used // budget} %)",
            remedy="raise ram_budget_bytes, lower keep_steps or max_in_flight, or add nodes",
        )


def _short_code(
    record: registry_pb2.StepRecord, view: registry_pb2.ClusterView, answers: Answers
) -> Iterable[admin_pb2.HealthCode]:
    short = short_shards(replica_reports(record, answers.replicas))
    if not short:
        return
    silent = set(unanswered(view, answers.replicas))
    # What a silent node holds is not known; a shard is given up only when nobody is left to ask.
    gone = [s for s in short if not s.holders and not s.owner_holds and not silent & {*s.placed, s.owner}]
    named = ", ".join(f"rank {s.rank} shard {s.shard}" for s in (gone or short)[:NAMED_MAX])
    count = len(gone or short)
    named += f" and {count - NAMED_MAX} more" if count > NAMED_MAX else ""
    what = f"step {record.step} of job {record.job}"
    if gone:
        yield admin_pb2.HealthCode(
            code="REPLICA_SHORT",
            severity=admin_pb2.HEALTH_CRITICAL,
            detail=f"no node holds {named} of {what} any more: the step cannot be loaded",
            remedy="bring back a node that held it with its RAM directory intact, or load an older step",
        )
        return
    yield admin_pb2.HealthCode(
        code="REPLICA_SHORT",
        severity=admin_pb2.HEALTH_DEGRADED,
        detail=f"{what} has fewer copies than were placed: {named}",
        remedy="bring missing nodes back; the next committed step is placed in full on the nodes that are UP",
    )
