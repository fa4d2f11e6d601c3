"""The command by which a rank's owner rules out steps that were never committed. Pure.

A step is committed when every rank of it is safe, so any rank can give it up for all of them. Once the registry has
ruled out all steps below some number, owners and holders may drop what they have of them. Without that no byte of a
reported step could go before a newer step is committed: the report may still become part of a commit.

A job has a few bounds, `superseded: [[below_step, below_session], ...]` (`commits.is_superseded`). Sessions that are
opened later may use the same numbers again: a job that restarts from its newest committed step does. The key
is missing while there is no bound.
"""

from __future__ import annotations

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX

from .commits import check_session
from .records import Json, integer, name, node_ref

#: Beyond, the two oldest become one that rules out what either does.
BOUNDS_MAX = 8


def supersede(state: Json, command: Json) -> Json:
    """Rule out the steps below `below_step` that are not committed. The command may come twice.

    Raises:
        MalformedError: nothing has changed.
    """
    job_name = name(command, "job")
    rank = integer(command, "rank", 0, RANK_MAX - 1)
    session = integer(command, "session", 0, STEP_MAX)
    below_step = integer(command, "below_step", 0, STEP_MAX)
    owner = node_ref(command.get("owner"), "the owner")
    if fenced := check_session(state, job_name, rank, session, owner):
        return fenced
    job = state["jobs"][job_name]
    before = job.get("superseded", [])
    bounds = with_bound(job, below_step)
    if bounds:
        job["superseded"] = bounds
    else:
        job.pop("superseded", None)
    if bounds != before:
        state["version"] += 1
    return {"ok": True, "kept": [kept["step"] for kept in job["steps"]]}


def with_bound(job: Json, below_step: int) -> list[list[int]]:
    """The job's bounds with one more, without those that say nothing: for its steps and sessions as they are."""
    newest, sessions = job["newest"], job["next_session"]
    oldest_session = min((seat["session"] for seat in job["ranks"].values()), default=sessions)
    bounds = [
        [step, session]
        for step, session in [*job.get("superseded", []), [below_step, sessions]]
        if step > newest + 1 and session > oldest_session
    ]
    # One of a later session covers those of earlier ones that rule out no more steps.
    kept: list[list[int]] = []
    for bound in sorted(bounds, key=lambda b: (b[1], b[0]), reverse=True):
        if not kept or bound[0] > kept[0][0]:
            kept.insert(0, bound)
    if len(kept) > BOUNDS_MAX:
        oldest, next_oldest, *others = kept
        kept = [[oldest[0], next_oldest[1]], *others]
    return kept
