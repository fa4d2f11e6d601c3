"""Steps that somebody does not want any more, and ranks whose trainers are done. Pure.

*Deleted* are committed steps. Without the newest one a job goes back to an older one, or to nothing. Then all of its
sessions end in the same command, so that nothing that they made and that is not kept can be committed later: `void` is
above all of them. By it nodes tell what they may drop, also one that was DOWN meanwhile, and whoever saves the same
step number anew is a newer session. Deletion of an older step ends nothing; retention would have taken it later.

*Superseded* are steps that were never committed. A step is committed when every rank of it is safe, so any rank can
give it up for all of them. Once the registry has ruled out all steps below some number, owners and holders may drop
what they have of them. Without that no byte of a reported step could go before a newer step is committed: the report
may still become part of a commit. Sessions that are opened later may use the same numbers again: a job that restarts
from its newest committed step does.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from .commits import check_session
from .model import Bound, Job, State, done, refusal
from .sessions import PAST_CLIENTS_MAX, current_session, running_ranks

#: Ranks and nodes that a refusal names.
NAMED_MAX = 8
#: Bounds of superseded steps that a job has. Beyond, the two oldest become one that rules out what either does.
BOUNDS_MAX = 8


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


def plan_deletion(state: State, job_name: str, step: int | None) -> Deletion:
    """What deleting a step, or (None) all of a job, would do now."""
    job = state.jobs.get(job_name)
    if job is None:
        return Deletion()
    steps = job.kept
    running = running_ranks(state, job)
    if step is not None and step not in steps:
        return Deletion(kept=tuple(steps), running=running)
    deleted = tuple(steps) if step is None else (step,)
    kept = tuple(each for each in steps if each not in deleted)
    # What is under way and was never committed goes with all of a job.
    ends = bool(steps) or job.void < job.next_session if step is None else step == steps[-1]
    objection = ""
    if ends and running:
        ranks = ", ".join(map(str, running[:NAMED_MAX])) + (", ..." if len(running) > NAMED_MAX else "")
        nodes = dict.fromkeys(job.ranks[rank].node.node_id for rank in running[:NAMED_MAX])
        what = f"step {step} is what" if step is not None else "it is what"
        objection = (
            f"job {job_name} seems to be running (rank {ranks} on {', '.join(nodes)}), and {what} it would be restored "
            "from: end its trainers with Checkpointer.close(), or say that it is to go even if they run; "
            "what they have under way is refused then"
        )
    return Deletion(deleted, kept, ends, running, objection)


def delete(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Keep a step, or all of a job, no more. What is not kept anyway is no error: the command may come twice."""
    asked = command.delete
    plan = plan_deletion(state, asked.job, asked.step if asked.HasField("step") else None)
    if plan.objection and not asked.even_if_running:
        return refusal(pb.ERROR_CODE_UNSAFE, plan.objection)
    if plan.deleted or plan.ends_sessions:
        job = state.jobs[asked.job]
        job.steps = [kept for kept in job.steps if kept.step not in plan.deleted]
        if plan.ends_sessions:
            _go_back(job)
        state.version += 1
    return log_pb2.RegistryResult(
        ok=True, deleted=plan.deleted, kept=plan.kept, ends_sessions=plan.ends_sessions
    )


def close_rank(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """The process of a session is done. Nothing is fenced: its saves under way may still be committed."""
    asked = command.close_rank
    if asked.session and current_session(state, asked.job, asked.rank) == asked.session:
        seat = state.jobs[asked.job].ranks[asked.rank]
        if not seat.closed:
            seat.closed = True
            state.version += 1
    return done()


def _go_back(job: Job) -> None:
    """Make the newest step that is left the job's newest, and end all sessions: their seats are nobody's."""
    newest = job.steps[-1].step if job.steps else -1
    for seat in job.ranks.values():
        if seat.client_id:
            seat.past.append(seat.client_id)
            del seat.past[:-PAST_CLIENTS_MAX]
        seat.client_id = ""
        seat.session = job.next_session
        seat.closed = True
        job.next_session += 1
    job.void = job.next_session
    job.superseded = []  # of sessions that are over
    job.newest = newest
    job.recent = [entry for entry in job.recent if entry[0] <= newest]
    if newest >= 0 and not job.recent:
        # `standing` asks when the newest was committed; by now all who could ask about it are over.
        job.recent = [(newest, job.next_session)]


def supersede(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Rule out the steps below `below_step` that are not committed. The command may come twice."""
    asked = command.supersede
    if fenced := check_session(state, asked.job, asked.rank, asked.session, asked.owner):
        return fenced
    job = state.jobs[asked.job]
    bounds = with_bound(job, asked.below_step)
    if bounds != job.superseded:
        job.superseded = bounds
        state.version += 1
    return log_pb2.RegistryResult(ok=True, kept=job.kept)


def with_bound(job: Job, below_step: int) -> list[Bound]:
    """The job's bounds with one more, without those that say nothing: for its steps and sessions as they are."""
    oldest_session = min((seat.session for seat in job.ranks.values()), default=job.next_session)
    bounds = [
        bound
        for bound in [*job.superseded, Bound(below_step, job.next_session)]
        if bound.below_step > job.newest + 1 and bound.below_session > oldest_session
    ]
    # One of a later session covers those of earlier ones that rule out no more steps.
    kept: list[Bound] = []
    for bound in sorted(bounds, key=lambda b: (b.below_session, b.below_step), reverse=True):
        if not kept or bound.below_step > kept[0].below_step:
            kept.insert(0, bound)
    if len(kept) > BOUNDS_MAX:
        oldest, next_oldest, *others = kept
        kept = [Bound(oldest.below_step, next_oldest.below_session), *others]
    return kept
