"""The rules of commit: whether a rank's record may be part of a step, and what a step does to a job. Pure.

The leader asks the same questions early, when a report arrives, to answer at once; what counts is
the answer that the state machine gives when the command is applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from . import shared_state
from .model import AnyRef, Job, Load, Ref, State, done, live, refusal

#: Committed steps whose number is remembered after their record is gone, so that a late repetition
#: of a report still gets the right answer.
RECENT_MAX = 64


class Standing(Enum):
    """What became of a rank's step."""

    OPEN = "open"
    COMMITTED = "committed"
    #: A newer step was committed while the session was at work, or some rank has given the step up.
    SUPERSEDED = "superseded"
    #: A newer step had been committed before the session began.
    NOT_NEWER = "not newer"


def same_bytes(one: rpb.RankRecord, other: rpb.RankRecord) -> bool:
    """Whether two records of a rank are of the same save: same session, same shards, same digests.

    Holders and the owner's incarnation may differ: repairs change them in what is committed, while an owner
    goes on repeating the report that it once made.
    """
    return _saved(one) == _saved(other)


def _saved(record: rpb.RankRecord) -> list[object]:
    shards = [(shard.offset, shard.bytes, shard.digest) for shard in record.shards]
    return [record.rank, record.session, record.state_bytes, shards]


def copies_of(ranks: Iterable[rpb.RankRecord]) -> int:
    """Copies on other nodes than the owner that every shard of a step has."""
    return min(len(shard.holders) for record in ranks for shard in record.shards)


def is_superseded(job: Job, step: int, session: int) -> bool:
    """Whether a rank has given up the step of a session that was there then: see `deletion.supersede`."""
    return any(step < bound.below_step and session < bound.below_session for bound in job.superseded)


def standing(
    job: Job | None, step: int, rank: int, session: int, record: rpb.RankRecord | None = None
) -> Standing:
    """Whether a rank's step is still open; `record` proves for a kept step that it is the same one."""
    if job is None:
        return Standing.OPEN
    if step > job.newest:
        return Standing.SUPERSEDED if is_superseded(job, step, session) else Standing.OPEN
    if (kept := job.find_step(step)) is not None:
        mine = kept.ranks[rank] if rank < len(kept.ranks) else None
        if mine is not None and mine.session == session and (record is None or same_bytes(mine, record)):
            return Standing.COMMITTED
    else:
        for recent, sessions in job.recent:
            # Sessions below `sessions` existed at the commit. One of them that is current now was current
            # then, and a commit takes every rank's current session: so this one's record went into it.
            if recent == step and session < sessions and _is_current(job, rank, session):
                return Standing.COMMITTED
    newest_sessions = job.recent[-1][1]
    return Standing.SUPERSEDED if session < newest_sessions else Standing.NOT_NEWER


def _is_current(job: Job, rank: int, session: int) -> bool:
    seat = job.ranks.get(rank)
    # The seats that a deletion has emptied have sessions of nobody.
    return seat is not None and seat.session == session and bool(seat.client_id)


def check_session(
    state: State, job_name: str, rank: int, session: int, owner: AnyRef
) -> log_pb2.RegistryResult | None:
    """Refusal when the caller speaks for a session or a node's life that is over."""
    job = state.jobs.get(job_name)
    if job is None or not _is_current(job, rank, session):
        return refusal(
            pb.ERROR_CODE_FENCED,
            f"session {session} of rank {rank} of job {job_name} is over: another process took its place, its "
            "own loaded again, or the job's newest step was deleted",
            ranks=(rank,),
        )
    if not live(state, owner):
        return refusal(
            pb.ERROR_CODE_INCARNATION_OVER,
            f"node {owner.node_id} in incarnation {owner.incarnation} is over: it has to register again",
            ranks=(rank,),
        )
    return None


def lost_holders(state: State, record: rpb.RankRecord) -> list[Ref]:
    """Holders in a rank's record whose life is over."""
    holders = (holder for shard in record.shards for holder in shard.holders)
    return list(dict.fromkeys(Ref.of(holder) for holder in holders if not live(state, holder)))


def check_rank(
    state: State, job_name: str, step: int, world_size: int, tolerate: int, record: rpb.RankRecord
) -> log_pb2.RegistryResult | None:
    """Refusal when a (well-formed) rank's record may not be part of a step's commit now."""
    rank = record.rank
    if fenced := check_session(state, job_name, rank, record.session, record.owner):
        return fenced
    if is_superseded(state.jobs[job_name], step, record.session):
        return refusal(
            pb.ERROR_CODE_SUPERSEDED, f"step {step} of job {job_name} was given up for a newer one", (rank,)
        )
    seat = state.jobs[job_name].ranks[rank]
    if seat.world_size != world_size:
        return refusal(
            pb.ERROR_CODE_WORLD_SIZE,
            f"rank {rank} of job {job_name} opened its session with world size {seat.world_size}, "
            f"not {world_size}: all ranks of a job must agree",
            (rank,),
        )
    for index, shard in enumerate(record.shards):
        holders = [holder.node_id for holder in shard.holders]
        if len(set(holders)) != len(holders) or record.owner.node_id in holders or len(holders) < tolerate:
            return refusal(
                pb.ERROR_CODE_INVALID,
                f"shard {index} of rank {rank} needs {tolerate} holders, all different and none its owner, "
                f"not {holders}",
                (rank,),
            )
    if lost := lost_holders(state, record):
        names = ", ".join(ref.node_id for ref in lost)
        no = refusal(
            pb.ERROR_CODE_HOLDER_LOST, f"lost as a holder: {names}; place those shards again", (rank,)
        )
        no.lost.extend(ref.message() for ref in lost)
        return no
    return None


def newest_load(state: State, job_name: str) -> Load:
    """The newest session of a job that was opened to load after an earlier run.

    A step needs every rank. Once that session is open no save that was begun before it can be committed any more: of
    this rank since its earlier process is over, of others since theirs may be over as well and load that step next.
    """
    return state.jobs[job_name].newest_load if job_name in state.jobs else Load()


def begun_too_early(
    state: State, job_name: str, step: int, record: rpb.RankRecord
) -> log_pb2.RegistryResult | None:
    """Refusal when a rank began its save before the newest load of the job.

    The leader asks it of reports, before it proposes anything; records in commands do not tell.
    """
    if not record.HasField("begun_after"):
        return None
    session, rank = newest_load(state, job_name)
    if record.begun_after > session or job_name not in state.jobs:
        return None
    return refusal(
        pb.ERROR_CODE_SUPERSEDED,
        f"step {step} of job {job_name} was begun by rank {record.rank} before rank {rank} loaded, which voids what "
        "was not committed by then",
        (record.rank,),
    )


def commit(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """Apply a commit command: one step, all ranks, or a refusal and no change."""
    kept = command.commit.record
    job = state.jobs.get(kept.job)
    if job is not None and kept.step <= job.newest:
        known = job.find_step(kept.step)
        same = known is not None and len(known.ranks) == len(kept.ranks)
        if same and known is not None and all(map(same_bytes, known.ranks, kept.ranks)):
            return done()
        return refusal(
            pb.ERROR_CODE_NOT_NEWER, f"step {kept.step} of job {kept.job} is not newer than {job.newest}"
        )
    refusals = [
        no
        for record in kept.ranks
        if (no := check_rank(state, kept.job, kept.step, kept.world_size, command.commit.tolerate, record))
    ]
    if refusals:
        return _merge(refusals)
    if differ := shared_state.parts_differ(kept.ranks):
        return refusal(pb.ERROR_CODE_REPLICAS_DISAGREE, f"step {kept.step} of job {kept.job}: {differ[0]}")

    assert job is not None, "a current session implies its job"
    for record in kept.ranks:
        record.ClearField("begun_after")
    kept.copies = copies_of(kept.ranks)
    kept.committed_at_ms = command.at_ms
    job.steps.append(kept)
    del job.steps[: -command.commit.keep_steps]
    job.recent.append((kept.step, job.next_session))
    del job.recent[:-RECENT_MAX]
    job.newest = kept.step
    job.world_size = kept.world_size
    state.version += 1
    return done()


#: The gravest first.
_GRAVITY = (
    pb.ERROR_CODE_FENCED,
    pb.ERROR_CODE_INCARNATION_OVER,
    pb.ERROR_CODE_SUPERSEDED,
    pb.ERROR_CODE_HOLDER_LOST,
    pb.ERROR_CODE_WORLD_SIZE,
    pb.ERROR_CODE_INVALID,
)


def _merge(refusals: Sequence[log_pb2.RegistryResult]) -> log_pb2.RegistryResult:
    """One answer for many refused ranks: of the gravest kind, with all ranks and holders of that kind."""
    first = min(refusals, key=lambda no: _GRAVITY.index(no.code))
    same = [no for no in refusals if no.code == first.code]
    merged = refusal(first.code, first.message, tuple(rank for no in same for rank in no.ranks))
    lost = dict.fromkeys(Ref.of(holder) for no in same for holder in no.lost)
    merged.lost.extend(ref.message() for ref in lost)
    return merged
