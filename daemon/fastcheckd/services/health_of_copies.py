"""Health codes about the copies: too few, too close together, not being mended, not committed. Pure.

Two witnesses: what the nodes say they hold of each newest step, and what the leader, which does the repairs, has
counted over all steps. Only the first proves that bytes are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fastcheck_proto.v1 import admin_pb2, peer_pb2, registry_pb2

from ..restore.survey import complete_steps
from .admin_reports import Answers, replica_reports, short_shards, unanswered

#: Shards and jobs named in one detail; the rest is a number.
NAMED_MAX = 3

DEGRADED, CRITICAL = admin_pb2.HEALTH_DEGRADED, admin_pb2.HEALTH_CRITICAL


def copy_codes(view: registry_pb2.ClusterView, answers: Answers) -> list[admin_pb2.HealthCode]:
    """Everything that is wrong with the copies."""
    short = [code for record in answers.newest_steps for code in _short_code(record, view, answers)]
    return [
        *short,
        *_redundancy_codes(answers.redundancy, seen_short=bool(short)),
        *provisional_codes(view, answers.replicas),
    ]


def _short_code(
    record: registry_pb2.StepRecord, view: registry_pb2.ClusterView, answers: Answers
) -> Iterator[admin_pb2.HealthCode]:
    short = short_shards(replica_reports(record, answers.replicas))
    if not short:
        return
    silent = set(unanswered(view, answers.replicas))
    # What a silent node holds is not known; a shard is given up only when nobody is left to ask.
    gone = [s for s in short if not s.holders and not s.owner_holds and not silent & {*s.placed, s.owner}]
    named = _some([f"rank {s.rank} shard {s.shard}" for s in gone or short])
    what = f"step {record.step} of job {record.job}"
    if gone:
        yield admin_pb2.HealthCode(
            code="REPLICA_SHORT",
            severity=CRITICAL,
            detail=f"no node holds {named} of {what} any more: the step cannot be loaded",
            remedy="bring back a node that held it with its RAM directory intact, or load an older step",
        )
        return
    yield admin_pb2.HealthCode(
        code="REPLICA_SHORT",
        severity=DEGRADED,
        detail=f"{what} has fewer copies than were placed: {named}; {_repairs(answers.redundancy)}",
        remedy="wait for the repair, or bring missing nodes back",
    )


def _redundancy_codes(
    redundancy: registry_pb2.GetRedundancyResponse | None, *, seen_short: bool
) -> Iterator[admin_pb2.HealthCode]:
    if redundancy is None:
        return
    short, lost = redundancy.short_shards, redundancy.lost_shards
    if (short or lost) and not seen_short:
        detail = f"{short} committed shards ({redundancy.short_bytes} bytes) have fewer than "
        detail += f"{redundancy.wanted_copies} live copies"
        detail += f", {lost} have none" if lost else ""
        yield admin_pb2.HealthCode(
            code="REPLICA_SHORT",
            severity=DEGRADED,
            detail=f"{detail}; {_repairs(redundancy)}",
            remedy="wait for the repair, or bring missing nodes back",
        )
    if redundancy.repair_failures and (short or lost):
        yield admin_pb2.HealthCode(
            code="REPAIR_FAILING",
            severity=DEGRADED,
            detail=f"{redundancy.repair_failures} repairs have failed, the last one: {redundancy.last_failure}",
            remedy="look at the log of the node that it names; add nodes or memory if there is no room",
        )
    if redundancy.domains_short_shards:
        yield admin_pb2.HealthCode(
            code="DOMAIN_SHORT",
            severity=DEGRADED,
            detail=f"{redundancy.domains_short_shards} committed shards have copies in one failure domain: "
            "losing that domain may lose them",
            remedy="bring back or add nodes in other failure domains; see 'fastcheck plan'",
        )


def _repairs(redundancy: registry_pb2.GetRedundancyResponse | None) -> str:
    if redundancy is None:
        return "whether repairs run is not known"
    if redundancy.repairing:
        return f"{redundancy.repairing} copies are being made"
    return "no copy is being made now"


def provisional_codes(
    view: registry_pb2.ClusterView, held: Mapping[str, Sequence[peer_pb2.Replica]]
) -> list[admin_pb2.HealthCode]:
    """For `Status`: one code per job with provisional steps newer than its newest committed one."""
    newest = {known.job: max(known.kept_steps, default=-1) for known in view.jobs}
    codes = []
    for job in sorted({replica.key.job for replicas in held.values() for replica in replicas}):
        found = [s for s in complete_steps(job, held) if s.provisional and s.step > newest.get(job, -1)]
        if not found:
            continue
        numbers = ", ".join(str(step.step) for step in reversed(found))
        codes.append(
            admin_pb2.HealthCode(
                code="PROVISIONAL",
                severity=DEGRADED,
                detail=f"steps of job {job} are replicated and nobody has committed them: {numbers}",
                remedy="bring back a majority of the voters; the nodes that saved them then commit the newest",
            )
        )
    return codes


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
