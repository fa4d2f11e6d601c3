"""Translates the admin service's messages into the JSON that people and programs get. Pure.

Digests are hex, times ISO-8601 in UTC (durations and `since_ms` are numbers), states are words.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from fastcheck_proto.v1 import admin_pb2, common_pb2, node_pb2, peer_pb2, registry_pb2, trainer_pb2

Json = dict[str, Any]


def status(reply: admin_pb2.StatusResponse) -> Json:
    """Health, codes, leader, redundancy."""
    return {
        "health": _health(reply.health),
        "codes": [
            {"code": c.code, "severity": _health(c.severity), "detail": c.detail, "do": c.remedy}
            for c in reply.codes
        ],
        "epoch": reply.epoch,
        "leader": reply.leader or None,
        "nodes_up": reply.nodes_up,
        "nodes_total": reply.nodes_total,
        "cluster_id": reply.cluster_id,
        "voters": list(reply.voters),
        "redundancy": _redundancy(reply.redundancy) if reply.HasField("redundancy") else None,
        "survival": [{"losses": s.losses, "probability": s.probability} for s in reply.survival],
    }


def _redundancy(found: registry_pb2.GetRedundancyResponse) -> Json:
    return {
        "wanted_copies": found.wanted_copies,
        "short_shards": found.short_shards,
        "short_bytes": found.short_bytes,
        "lost_shards": found.lost_shards,
        "domains_short_shards": found.domains_short_shards,
        "repairing": found.repairing,
        "repaired": found.repaired,
        "repair_failures": found.repair_failures,
        "last_failure": found.last_failure or None,
    }


def node(report: admin_pb2.NodeReport) -> Json:
    """One member."""
    record = report.record
    return {
        "node_id": record.node_id,
        "state": node_state(record.state),
        "incarnation": record.incarnation,
        "address": record.agent_address,
        "lane_address": record.lane_address,
        "lane": _lane(report.lane) if report.HasField("lane") else None,
        "voter": record.voter,
        "ram_used_bytes": record.ram_used_bytes,
        "ram_budget_bytes": record.ram_budget_bytes,
        "reason": record.reason,
        "since_ms": record.since_ms or None,
        "heard_ms_ago": record.heard_ms_ago if record.HasField("heard_ms_ago") else None,
        "data": _word(registry_pb2.DataHealth.Name(record.data), "DATA_HEALTH_"),
        "labels": dict(sorted(record.labels.items())),
        "reachable": report.reachable,
        "counters": dict(sorted(report.counters.items())),
    }


def _lane(found: peer_pb2.LaneReport) -> Json:
    """The address of a node's bulk lane, and its present pacing."""
    return {
        "interface": found.interface or None,
        "speed_mbit_per_s": found.speed_mbit_per_s or None,
        "faster_interface": found.faster_interface or None,
        "tls": found.tls,
        "pacing": {
            "bytes_per_s": found.pacing.bytes_per_s or None,
            "reason": found.pacing.reason,
            "foreign_bytes_per_s": found.pacing.foreign_bytes_per_s,
            "capacity_bytes_per_s": found.pacing.capacity_bytes_per_s or None,
        },
    }


def transition(change: registry_pb2.Transition) -> Json:
    """A node's change of state; None: it was not known before, or forgotten."""
    before, after = getattr(change, "from"), change.to
    return {
        "at": iso_utc(change.at_ms),
        "epoch": change.epoch,
        "node_id": change.node.node_id,
        "incarnation": change.node.incarnation,
        "from": node_state(before) if before else None,
        "to": node_state(after) if after else None,
        "reason": change.reason,
    }


def verdict(found: registry_pb2.SafeToStopResponse) -> Json:
    """Whether a node may be stopped."""
    return {
        "safe": found.safe,
        "survivable": found.survivable,
        "reasons": list(found.reasons),
        "short_shards": found.short_shards,
        "lost_shards": found.lost_shards,
        "jobs": list(found.jobs),
    }


def verified(reply: admin_pb2.VerifyResponse) -> Json:
    """The findings of a check of replicas."""
    return {
        "checked": reply.checked,
        "checked_bytes": reply.checked_bytes,
        "bad": [
            {
                "node_id": finding.node_id,
                "job": finding.key.job,
                "step": finding.key.step,
                "rank": finding.key.rank,
                "shard": finding.key.shard,
            }
            for finding in reply.bad
        ],
        "unreachable": list(reply.unreachable),
    }


def voter(record: node_pb2.VoterRecord) -> Json:
    """A voter's addresses."""
    return {
        "node_id": record.node_id,
        "registry_address": record.registry_address,
        "raft_address": record.raft_address,
    }


def voter_report(report: admin_pb2.VoterReport) -> Json:
    """A voter's health."""
    return {
        "node_id": report.record.node_id,
        "state": node_state(report.state) if report.state else None,
        "leader": report.leader,
        "address": report.agent_address or None,
        "answers": report.answers,
        "version": report.version if report.answers else None,
    }


def last_commit(job: registry_pb2.JobView, now_s: float) -> Json:
    """Time and age of a job's newest commit; None where unknown."""
    at_ms = job.committed_at_ms
    return {
        "last_commit_at": iso_utc(at_ms),
        "last_commit_age_s": round(max(0.0, now_s - at_ms / 1000), 1) if at_ms else None,
    }


def step(summary: registry_pb2.StepSummary) -> Json:
    """A step that can be loaded or is under way."""
    return {
        "step": summary.step,
        "state": _word(registry_pb2.StepState.Name(summary.state), "STEP_STATE_").lower(),
        "ranks": summary.ranks,
        "world_size": summary.world_size,
        "bytes": summary.bytes,
        "copies": summary.copies,
        "lossy": summary.lossy,
        "replicated": summary.replicated,
    }


def inspected(reply: admin_pb2.InspectResponse) -> Json:
    """Everything about one committed step."""
    record = reply.record
    memory = {found.rank: found for found in reply.memory}
    return {
        "job": record.job,
        "step": record.step,
        "state": "committed",
        "world_size": record.world_size,
        "copies": record.copies,
        "bytes": sum(rank.state_bytes for rank in record.ranks),
        "lossy": any(rank.lossy for rank in record.ranks),
        "replicated": any(rank.HasField("shared") for rank in record.ranks),
        "ranks": [
            {
                "rank": rank.rank,
                "owner": rank.owner.node_id,
                "incarnation": rank.owner.incarnation,
                "session": rank.session,
                "bytes": rank.state_bytes,
                "shards": len(rank.shards),
                "lossy": rank.lossy,
                "codecs": codecs(use for r in reply.replicas if r.rank == rank.rank for use in r.codecs),
                "memory": _memory(memory.get(rank.rank)),
            }
            for rank in sorted(record.ranks, key=lambda r: r.rank)
        ],
        "replicas": [replica(report) for report in reply.replicas],
        "unreachable": list(reply.unreachable),
    }


def _memory(found: peer_pb2.RankMemory | None) -> Json | None:
    """The memory contract of a rank; None: it has none now, or its node did not answer."""
    if found is None:
        return None
    kind = _word(trainer_pb2.MemoryContract.Name(found.contract), "MEMORY_CONTRACT_").lower()
    return {"contract": kind, "segments": found.segments, "bytes": found.bytes}


def replica(report: admin_pb2.ReplicaReport) -> Json:
    """One shard and its holders."""
    return {
        "step": report.step,
        "rank": report.rank,
        "shard": report.shard,
        "owner": report.owner,
        "holders": list(report.holders),
        "placed": list(report.placed),
        "owner_holds": report.owner_holds,
        "bytes": report.bytes,
        "digest": report.digest.hex(),
        "verified_at": iso_utc(report.verified_at_ms),
        "stored_bytes": report.stored_bytes,
        "lossy": report.lossy,
        "codecs": codecs(report.codecs),
    }


def codecs(uses: Iterable[common_pb2.CodecUse]) -> Json:
    """Codec → raw and encoded bytes, over all copies, as they were sent."""
    found: Json = {}
    for use in sorted(uses, key=lambda u: u.codec):
        sums = found.setdefault(use.codec, {"raw_bytes": 0, "encoded_bytes": 0})
        sums["raw_bytes"] += use.raw_bytes
        sums["encoded_bytes"] += use.encoded_bytes
    return found


def node_state(state: registry_pb2.NodeState.ValueType) -> str:
    """`UP`, `SUSPECT`, `DRAINING`, `DOWN`."""
    return _word(registry_pb2.NodeState.Name(state), "NODE_STATE_")


def iso_utc(unix_ms: int) -> str | None:
    """A moment; None for 0."""
    if not unix_ms:
        return None
    moment = datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _health(value: admin_pb2.Health.ValueType) -> str:
    return _word(admin_pb2.Health.Name(value), "HEALTH_")


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def deletion(reply: admin_pb2.DeleteResponse) -> Json:
    """The steps deleted, or to be deleted. `stored_bytes` is their memory on the nodes that answered."""
    outcome = reply.outcome
    return {
        "deleted_steps": list(outcome.deleted_steps),
        "kept_steps": list(outcome.kept_steps),
        "ends_sessions": outcome.ends_sessions,
        "running_ranks": list(outcome.running_ranks),
        "refusal": outcome.refusal or None,
        "stored_bytes": sum(node.stored_bytes for node in reply.nodes),
        "nodes": [
            {"node_id": node.node_id, "replicas": node.replicas, "stored_bytes": node.stored_bytes}
            for node in reply.nodes
        ],
        "unreachable": list(reply.unreachable),
    }
