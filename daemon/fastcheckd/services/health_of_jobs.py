"""Health codes about jobs: copies that are missing, saves that get nowhere. Pure.

Copies have two witnesses: what the nodes say they hold of each newest step, and what the leader, which does the
repairs, has counted over all steps. Only the first proves that bytes are gone.

Of saves the nodes through which ranks save tell: what they tried, since when nothing of it is committed, why the last
failure failed. For whom a step waits only the leader knows. A job whose trainers do not try to save is not judged: it
may be done, or think.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fastcheck_proto.v1 import admin_pb2, common_pb2, peer_pb2, registry_pb2

from ..restore.survey import complete_steps
from .admin_reports import Answers, replica_reports, short_shards, unanswered

#: Without a commit for so many of its save intervals, and for so long, a job gets nowhere: slower ones are just slow.
INTERVALS = 3
UNCOMMITTED_S_MIN = 10.0
#: Of a job whose rhythm is not known yet: its first state may be large and its first memory cold.
UNCOMMITTED_S_FIRST = 60.0
#: A trainer that has not tried for so long, and for so many of its intervals, has stopped.
TRYING_S = 60.0
FAILING_S = 600.0
#: One failure may pass; one after which nothing came is as bad as two.
FAILURES_MIN = 2
FAILED_S_MIN = 10.0
#: Jobs, ranks, shards and nodes that one detail names.
NAMED_MAX = 4
#: Jobs for whose late ranks the leader is asked.
ASKED_MAX = 8

_NO_ROOM = (
    common_pb2.ERROR_CODE_OVER_BUDGET,
    common_pb2.ERROR_CODE_STORE_FULL,
    common_pb2.ERROR_CODE_JOB_BUDGET,
)
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


def save_codes(view: registry_pb2.ClusterView, answers: Answers, now_ms: int) -> list[admin_pb2.HealthCode]:
    """Everything that is wrong with saves.

    Args:
        now_ms: the wall clock, to say how long ago something was.
    """
    waiting = stuck_jobs(answers)
    return [
        *(_not_committing(job, view, answers, now_ms) for job in waiting),
        *_failing(view, answers),
    ]


def stuck_jobs(answers: Answers) -> list[str]:
    """Jobs that save on and commit nothing, by name."""
    reports = _by_job(answers)
    return [job for job, saves in sorted(reports.items()) if _is_stuck([save for _, save in saves])]


def _by_job(answers: Answers) -> dict[str, list[tuple[str, peer_pb2.JobSaves]]]:
    """Job → (node, its report), by node."""
    found: dict[str, list[tuple[str, peer_pb2.JobSaves]]] = {}
    for node_id, stats in sorted(answers.stats.items()):
        for save in stats.saves:
            found.setdefault(save.job, []).append((node_id, save))
    return found


def _is_stuck(saves: Sequence[peer_pb2.JobSaves]) -> bool:
    # A commit that one node saw was everybody's: whoever waits for the shortest time tells of the job.
    waiting = [save for save in saves if save.HasField("uncommitted_ms") and _tries(save)]
    if not waiting:
        return False
    interval_s = max((s.interval_ms for s in waiting if s.HasField("interval_ms")), default=None)
    patience_s = (
        UNCOMMITTED_S_FIRST if interval_s is None else max(UNCOMMITTED_S_MIN, INTERVALS * interval_s / 1000)
    )
    return min(save.uncommitted_ms for save in waiting) > 1000 * patience_s


def _tries(save: peer_pb2.JobSaves, within_s: float = TRYING_S) -> bool:
    return save.tried_ms_ago <= max(1000 * within_s, INTERVALS * save.interval_ms)


def _not_committing(
    job: str, view: registry_pb2.ClusterView, answers: Answers, now_ms: int
) -> admin_pb2.HealthCode:
    known = next((each for each in view.jobs if each.job == job), registry_pb2.JobView())
    last = "it has no committed step"
    if known.kept_steps:
        last = f"its last commit is step {max(known.kept_steps)}"
        if known.committed_at_ms:
            last += f", {max(0, now_ms - known.committed_at_ms) / 1000:.0f} s ago"
    saves = _by_job(answers)[job]
    staged = max((save.staged_step for _, save in saves if save.HasField("staged_step")), default=None)
    came = "" if staged is None else f" (step {staged} is the newest)"
    late = answers.late.get(job, ())
    waits = f"; late: {_some([_rank(rank, view) for rank in late])}" if late else ""
    why = _some([f"on {node_id}: {save.stalled_because}" for node_id, save in saves if save.stalled_because])
    return admin_pb2.HealthCode(
        code="JOB_NOT_COMMITTING",
        severity=DEGRADED,
        detail=f"job {job} saves{came} and commits nothing: {last}{waits}" + (f"; {why}" if why else ""),
        remedy="look at the trainers and nodes of the late ranks: a step is committed when every rank has saved it; "
        f"'fastcheck checkpoints {job}' shows how far each step is",
    )


def _rank(late: registry_pb2.LateRank, view: registry_pb2.ClusterView) -> str:
    if not late.node_id:
        return f"rank {late.rank} (nobody has its place)"
    state = next((n.state for n in view.nodes if n.node_id == late.node_id), None)
    notes = [late.node_id]
    if state not in (None, registry_pb2.NODE_STATE_UP):
        notes.append(f"which is {registry_pb2.NodeState.Name(state).removeprefix('NODE_STATE_')}")
    if late.closed:
        notes.append("closed by its trainer")
    return f"rank {late.rank} ({', '.join(notes)})"


def _failing(view: registry_pb2.ClusterView, answers: Answers) -> Iterator[admin_pb2.HealthCode]:
    for job, saves in sorted(_by_job(answers).items()):
        failing = [
            (node_id, save)
            for node_id, save in saves
            if (save.failures >= FAILURES_MIN or (save.failures and save.failed_ms_ago > 1000 * FAILED_S_MIN))
            and _tries(save, FAILING_S)
        ]
        if not failing:
            continue
        node_id, worst = max(failing, key=lambda each: each[1].failures)
        nodes = _some([node for node, _ in failing])
        holding = finished_jobs(view, answers, job) if worst.last_failure.code in _NO_ROOM else []
        detail = (
            f"saves of job {job} fail on {nodes}: on {node_id} {worst.failures} in a row, the last one "
            f"{worst.failed_ms_ago / 1000:.0f} s ago: {worst.last_failure.message}"
        )
        remedy = f"as the reason says; the log of {node_id} has more"
        if holding:
            detail += "; jobs without a running trainer have " + _some(
                [f"{size} bytes of the nodes' memory: job {other}" for other, size in holding]
            )
            remedy = "delete what is not needed any more, such as: " + "; ".join(
                f"fastcheck delete {other} --all" for other, _ in holding[:NAMED_MAX]
            )
            remedy += "; or raise ram_budget_bytes"
        yield admin_pb2.HealthCode(code="SAVES_FAILING", severity=DEGRADED, detail=detail, remedy=remedy)


def finished_jobs(view: registry_pb2.ClusterView, answers: Answers, but: str) -> list[tuple[str, int]]:
    """Jobs no rank of which runs, with the memory that they have on all nodes, the largest first."""
    done = {job.job for job in view.jobs if job.HasField("running_ranks") and not job.running_ranks} - {but}
    sizes: dict[str, int] = {}
    for stats in answers.stats.values():
        for held in stats.jobs:
            if held.job in done and held.ram_used_bytes:
                sizes[held.job] = sizes.get(held.job, 0) + held.ram_used_bytes
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
