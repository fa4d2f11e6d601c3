"""Committed steps that somebody does not want any more, and ranks whose trainers are done. Pure.

Without the newest step a job goes back to an older one, or to nothing. Then all of its sessions end in the same
command, so that nothing that they made and that is not kept can be committed later: `void` is above all of them. By it
nodes tell what they may drop, also one that was DOWN meanwhile, and whoever saves the same step number anew is
a newer session. Deletion of an older step ends nothing; retention would have taken it later.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX

from .commits import find_step, refusal
from .records import Json, flag, integer, name
from .sessions import PAST_CLIENTS_MAX, current_session, running_ranks

#: Ranks and nodes that a refusal names.
NAMED_MAX = 8


@dataclass(frozen=True)
class Deletion:
    """What would come of it."""

    deleted: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    #: The job's sessions end.
    ends_sessions: bool = False
    #: Ranks that seem to have a trainer.
    running: tuple[int, ...] = ()
    #: Why it is not done without an explicit word; empty: it is.
    objection: str = ""


def plan_deletion(state: Json, job_name: str, step: int | None) -> Deletion:
    """What deleting a step, or (None) all of a job, would do now."""
    job = state["jobs"].get(job_name)
    if job is None:
        return Deletion()
    steps = [kept["step"] for kept in job["steps"]]
    running = running_ranks(state, job)
    if step is not None and find_step(job, step) is None:
        return Deletion(kept=tuple(steps), running=running)
    deleted = tuple(steps) if step is None else (step,)
    kept = tuple(each for each in steps if each not in deleted)
    # What is under way and was never committed goes with all of a job.
    ends = bool(steps) or job.get("void", 0) < job["next_session"] if step is None else step == steps[-1]
    objection = ""
    if ends and running:
        ranks = ", ".join(map(str, running[:NAMED_MAX])) + (", ..." if len(running) > NAMED_MAX else "")
        nodes = dict.fromkeys(str(job["ranks"][str(rank)]["node"][0]) for rank in running[:NAMED_MAX])
        what = f"step {step} is what" if step is not None else "it is what"
        objection = (
            f"job {job_name} seems to be running (rank {ranks} on {', '.join(nodes)}), and {what} it would be restored "
            "from: end its trainers with Checkpointer.close(), or say that it is to go even if they run; "
            "what they have under way is refused then"
        )
    return Deletion(deleted, kept, ends, running, objection)


def delete(state: Json, command: Json) -> Json:
    """Keep a step, or all of a job, no more. What is not kept anyway is no error: the command may come twice.

    Raises:
        MalformedError: nothing has changed.
    """
    job_name = name(command, "job")
    step = None if command.get("step") is None else integer(command, "step", 0, STEP_MAX)
    if_running = flag(command, "even_if_running", default=False)
    plan = plan_deletion(state, job_name, step)
    if plan.objection and not if_running:
        return refusal("UNSAFE", plan.objection)
    if plan.deleted or plan.ends_sessions:
        job = state["jobs"][job_name]
        job["steps"] = [kept for kept in job["steps"] if kept["step"] not in plan.deleted]
        if plan.ends_sessions:
            _go_back(job)
        state["version"] += 1
    return {
        "ok": True,
        "deleted": list(plan.deleted),
        "kept": list(plan.kept),
        "ends_sessions": plan.ends_sessions,
    }


def close_rank(state: Json, command: Json) -> Json:
    """The process of a session is done. Nothing is fenced: its saves under way may still be committed.

    Raises:
        MalformedError: nothing has changed.
    """
    job_name = name(command, "job")
    rank = integer(command, "rank", 0, RANK_MAX - 1)
    session = integer(command, "session", 0, STEP_MAX)
    if session and current_session(state, job_name, rank) == session:
        seat = state["jobs"][job_name]["ranks"][str(rank)]
        if not seat.get("closed", False):
            seat["closed"] = True
            state["version"] += 1
    return {"ok": True}


def _go_back(job: Json) -> None:
    """Make the newest step that is left the job's newest, and end all sessions: their seats are nobody's."""
    newest = job["steps"][-1]["step"] if job["steps"] else -1
    for seat in job["ranks"].values():
        seat["past"] = [*seat["past"], *([seat["client"]] if seat["client"] else [])][-PAST_CLIENTS_MAX:]
        seat["client"] = ""
        seat["session"] = job["next_session"]
        seat["closed"] = True
        job["next_session"] += 1
    job["void"] = job["next_session"]
    job.pop("superseded", None)  # of sessions that are over
    job["newest"] = newest
    job["recent"] = [entry for entry in job["recent"] if entry[0] <= newest]
    if newest >= 0 and not job["recent"]:
        # `standing` asks when the newest was committed; by now all who could ask about it are over.
        job["recent"] = [[newest, job["next_session"]]]
