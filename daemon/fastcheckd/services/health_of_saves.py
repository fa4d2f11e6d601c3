"""Health codes about jobs that save and get nowhere: refused, failing, never committed. Pure.

Witnesses are the nodes through which ranks save: what they tried, since when nothing of it is committed, why the last
failure failed. For whom a step waits only the leader knows. A job whose trainers do not try to save is not judged: it
may be done, or think.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastcheck_proto.v1 import admin_pb2, common_pb2, peer_pb2, registry_pb2

from .admin_reports import Answers

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
#: Jobs, ranks and nodes that one detail names.
NAMED_MAX = 4
#: Jobs for whose late ranks the leader is asked.
ASKED_MAX = 8

_NO_ROOM = (
    common_pb2.ERROR_CODE_OVER_BUDGET,
    common_pb2.ERROR_CODE_STORE_FULL,
    common_pb2.ERROR_CODE_JOB_BUDGET,
)
DEGRADED = admin_pb2.HEALTH_DEGRADED


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
