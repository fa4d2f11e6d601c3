"""A data process' metrics: what it counted and measured, its memory, and how far each job has come here. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.metrics_core import Metric

from ..counters import NAMES
from ..save.job_progress import JobProgress
from .families import JOBS_MAX, OTHERS, counters, gauge

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """A data process at one moment."""

    counters: Mapping[str, int]
    durations: Sequence[Metric]
    ram_used_bytes: int
    #: Segments that go as soon as something else needs the room; not part of those used.
    ram_free_bytes: int
    ram_budget_bytes: int
    #: Since the replica that waits longest was checked; None: nothing is held.
    scrub_age_s: float | None
    scrub_period_s: float
    #: Replicas that are held: this node's own states' shards, and copies for others.
    replicas: Mapping[str, int]
    #: Puts that peers are making here.
    copies_arriving: int
    seats: int
    jobs: Sequence[JobProgress]
    #: What each job has of the memory, and the most that one may have; 0: no limit of its own.
    job_ram_bytes: Mapping[str, int]
    job_budget_bytes: int


def families(facts: DataFacts) -> list[Metric]:
    """Everything, for one scrape."""
    return [
        gauge("ram_used_bytes", "Bytes of the RAM store that are in use.", facts.ram_used_bytes),
        gauge("ram_free_bytes", "Bytes of its free segments, which go when needed.", facts.ram_free_bytes),
        gauge("ram_budget_bytes", "Most that the RAM store may take.", facts.ram_budget_bytes),
        gauge(
            "replicas_held",
            "Shards of which this node holds the bytes, by whether it is their owner.",
            {(kind,): count for kind, count in facts.replicas.items()},
            ("kind",),
        ),
        gauge(
            "scrub_age_seconds",
            "Since the replica that waits longest was checked; absent where nothing is held.",
            {} if facts.scrub_age_s is None else facts.scrub_age_s,
        ),
        gauge("scrub_period_seconds", "Within which every replica is to be checked.", facts.scrub_period_s),
        gauge("copies_arriving", "Copies that this node is making for others now.", facts.copies_arriving),
        gauge("sessions", "Places of ranks in jobs that were taken through this process.", facts.seats),
        *_job_families(bounded(facts.jobs)),
        gauge(
            "job_ram_used_bytes",
            "Bytes of the RAM store that are in use for a job: its states, copies and reverse deltas.",
            {(job,): size for job, size in bounded_sizes(facts.job_ram_bytes).items()},
            ("training_job",),
        ),
        gauge(
            "job_ram_budget_bytes",
            "Most that one job may have; absent where there is no such limit.",
            facts.job_budget_bytes or {},
        ),
        *counters(facts.counters, NAMES),
        *facts.durations,
    ]


def _job_families(jobs: Sequence[JobProgress]) -> list[Metric]:
    def by_job(name: str, text: str, value_of: str) -> Metric:
        found = {(job.job,): getattr(job, value_of) for job in jobs}
        return gauge(name, text, {k: v for k, v in found.items() if v is not None}, ("training_job",))

    return [
        by_job("job_saves_in_flight", "Sealed saves that are neither committed nor failed.", "in_flight"),
        by_job("job_staged_step", "Newest step that was sealed here.", "staged_step"),
        by_job("job_staged_age_seconds", "Since the newest seal.", "staged_age_s"),
        by_job("job_replicated_step", "Newest step whose copies all were acknowledged.", "replicated_step"),
        by_job("job_committed_step", "Newest committed step, as known here.", "committed_step"),
        by_job(
            "job_committed_age_seconds", "Since a step was last committed through here.", "committed_age_s"
        ),
        by_job("job_save_interval_seconds", "Shortest time between the last saves of a rank.", "interval_s"),
    ]


def bounded(jobs: Sequence[JobProgress]) -> list[JobProgress]:
    """At most `JOBS_MAX`, those that saved last, and one for all others that shows the worst of them."""
    recent = sorted(jobs, key=lambda job: job.staged_age_s)
    shown, rest = recent[:JOBS_MAX], recent[JOBS_MAX:]
    if rest:
        shown.append(
            JobProgress(
                job=OTHERS,
                in_flight=sum(job.in_flight for job in rest),
                staged_step=min(job.staged_step for job in rest),
                staged_age_s=max(job.staged_age_s for job in rest),
                replicated_step=_worst(min, [job.replicated_step for job in rest]),
                committed_step=_worst(min, [job.committed_step for job in rest]),
                committed_age_s=_worst(max, [job.committed_age_s for job in rest]),
                interval_s=_worst(max, [job.interval_s for job in rest]),
            )
        )
    return shown


def bounded_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """At most `JOBS_MAX`, those with the most, and one for all others together."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown, rest = dict(ordered[:JOBS_MAX]), ordered[JOBS_MAX:]
    return shown | ({OTHERS: sum(size for _, size in rest)} if rest else {})


def _worst(pick: Callable[..., T], values: Iterable[T | None]) -> T | None:
    return pick((value for value in values if value is not None), default=None)
