"""How far each job has come at this node, for whoever watches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fastcheck_proto.v1 import trainer_pb2 as tpb

from .save import PROGRESS, Save


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """One job whose ranks save through this node; a step is the newest that any of them has brought so far."""

    job: str
    #: Saves that are sealed and neither committed nor failed.
    in_flight: int
    staged_step: int
    #: Seconds since the newest seal.
    staged_age_s: float
    #: None: none yet, as far as this process knows.
    replicated_step: int | None
    committed_step: int | None
    #: Seconds since a step was committed through this process; None: none was, since it started.
    committed_age_s: float | None
    #: Shortest time between the last seals of the rank that saves least often; None: no rank has saved twice.
    interval_s: float | None


def job_progress(
    saves: Mapping[tuple[str, int], Iterable[Save]],
    *,
    newest: Callable[[str], int],
    committed_at: Mapping[str, float],
    interval_s: Callable[[tuple[str, int]], float | None],
    now: float,
) -> list[JobProgress]:
    """All jobs with a save that is remembered; each is sealed.

    Args:
        saves: of each (job, rank), those under way and the last that have ended.
        newest: a job's newest committed step, -1 for none.
        committed_at: when the last step of each job was committed.
        interval_s: how often a rank saves.
        now: by the same clock as `Save.sealed_at` and `committed_at`.
    """
    by_job: dict[str, list[Save]] = {}
    intervals: dict[str, list[float]] = {}
    for rank, known in saves.items():
        by_job.setdefault(rank[0], []).extend(known)
        if (interval := interval_s(rank)) is not None:
            intervals.setdefault(rank[0], []).append(interval)
    return [
        JobProgress(
            job=job,
            in_flight=sum(not save.done for save in known),
            staged_step=max(save.key.step for save in known),
            staged_age_s=now - max(save.sealed_at for save in known),
            replicated_step=_at_least(newest(job), [save.key.step for save in known if _replicated(save)]),
            committed_step=_at_least(newest(job), ()),
            committed_age_s=now - committed_at[job] if job in committed_at else None,
            interval_s=max(intervals.get(job, ()), default=None),
        )
        for job, known in sorted(by_job.items())
        if known
    ]


def _replicated(save: Save) -> bool:
    replicated = PROGRESS[save.state] >= PROGRESS[tpb.SAVE_STATE_REPLICATED]
    return replicated and save.state != tpb.SAVE_STATE_FAILED


def _at_least(committed: int, steps: Iterable[int]) -> int | None:
    newest = max((committed, *steps))
    return None if newest < 0 else newest
