"""The rules of commit: whether a rank's record may be part of a step, and what a step does to a job. Pure.

The leader asks the same questions early, when a report arrives, to answer at once; what counts is
the answer that the state machine gives when the command is applied.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX

from . import shared_state
from .records import HOLDERS_MAX, Json, MalformedError, at_ms, integer, live, name, rank_record

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


def refusal(code: str, message: str, **more: Any) -> Json:
    """A result that says no."""
    return {"ok": False, "code": code, "message": message, **more}


def find_step(job: Json, step: int) -> Json | None:
    """The record of a kept step."""
    return next((kept for kept in job["steps"] if kept["step"] == step), None)


def same_bytes(one: Json, other: Json) -> bool:
    """Whether two records of a rank are of the same save: same session, same shards, same digests.

    Holders and the owner's incarnation may differ: repairs change them in what is committed, while an owner
    goes on repeating the report that it once made.
    """
    return _saved(one) == _saved(other)


def _saved(record: Json) -> list[Any]:
    shards = [[shard["offset"], shard["bytes"], shard["digest"]] for shard in record["shards"]]
    return [record["rank"], record["session"], record["state_bytes"], shards]


def copies_of(ranks: list[Json]) -> int:
    """Copies on other nodes than the owner that every shard of a step has."""
    return min(len(shard["holders"]) for record in ranks for shard in record["shards"])


def is_superseded(job: Json, step: int, session: int) -> bool:
    """Whether a rank has given up the step of a session that was there then: see `superseded`."""
    return any(step < below[0] and session < below[1] for below in job.get("superseded", ()))


def standing(job: Json | None, step: int, rank: int, session: int, record: Json | None = None) -> Standing:
    """Whether a rank's step is still open; `record` proves for a kept step that it is the same one."""
    if job is None:
        return Standing.OPEN
    if step > job["newest"]:
        return Standing.SUPERSEDED if is_superseded(job, step, session) else Standing.OPEN
    if (kept := find_step(job, step)) is not None:
        mine = next((r for r in kept["ranks"] if r["rank"] == rank), None)
        if mine is not None and mine["session"] == session and (record is None or same_bytes(mine, record)):
            return Standing.COMMITTED
    else:
        for recent, sessions in job["recent"]:
            # Sessions below `sessions` existed at the commit. One of them that is current now was current
            # then, and a commit takes every rank's current session: so this one's record went into it.
            if recent == step and session < sessions and _is_current(job, rank, session):
                return Standing.COMMITTED
    newest_sessions = job["recent"][-1][1]
    return Standing.SUPERSEDED if session < newest_sessions else Standing.NOT_NEWER


def _is_current(job: Json, rank: int, session: int) -> bool:
    seat = job["ranks"].get(str(rank))
    # The seats that a deletion has emptied have sessions of nobody.
    return seat is not None and seat["session"] == session and bool(seat["client"])


def check_session(state: Json, job_name: str, rank: int, session: int, owner: list[Any]) -> Json | None:
    """Refusal when the caller speaks for a session or a node's life that is over."""
    job = state["jobs"].get(job_name)
    if job is None or not _is_current(job, rank, session):
        return refusal(
            "FENCED",
            f"session {session} of rank {rank} of job {job_name} is over: another process took its place, its "
            "own loaded again, or the job's newest step was deleted",
            ranks=[rank],
        )
    if not live(state, owner):
        return refusal(
            "INCARNATION_OVER",
            f"node {owner[0]} in incarnation {owner[1]} is over: it has to register again",
            ranks=[rank],
        )
    return None


def lost_holders(state: Json, record: Json) -> list[list[Any]]:
    """Holders in a rank's record whose life is over."""
    lost = []
    for shard in record["shards"]:
        for holder in shard["holders"]:
            if not live(state, holder) and holder not in lost:
                lost.append(holder)
    return lost


def check_rank(
    state: Json, job_name: str, step: int, world_size: int, tolerate: int, record: Json
) -> Json | None:
    """Refusal when a (well-formed) rank's record may not be part of a step's commit now."""
    rank = record["rank"]
    if fenced := check_session(state, job_name, rank, record["session"], record["owner"]):
        return fenced
    if is_superseded(state["jobs"][job_name], step, record["session"]):
        return refusal(
            "SUPERSEDED", f"step {step} of job {job_name} was given up for a newer one", ranks=[rank]
        )
    seat = state["jobs"][job_name]["ranks"][str(rank)]
    if seat["world_size"] != world_size:
        return refusal(
            "WORLD_SIZE",
            f"rank {rank} of job {job_name} opened its session with world size {seat['world_size']}, "
            f"not {world_size}: all ranks of a job must agree",
            ranks=[rank],
        )
    for index, shard in enumerate(record["shards"]):
        holders = [holder[0] for holder in shard["holders"]]
        if len(set(holders)) != len(holders) or record["owner"][0] in holders or len(holders) < tolerate:
            return refusal(
                "INVALID",
                f"shard {index} of rank {rank} needs {tolerate} holders, all different and none its owner, "
                f"not {holders}",
                ranks=[rank],
            )
    if lost := lost_holders(state, record):
        names = ", ".join(holder[0] for holder in lost)
        return refusal(
            "HOLDER_LOST", f"lost as a holder: {names}; place those shards again", lost=lost, ranks=[rank]
        )
    return None


def newest_load(job: Json) -> tuple[int, int]:
    """The newest session that was opened to load after an earlier run, and its rank; session 0 if there is none.

    A step needs every rank. Once that session is open no save that was begun before it can be committed any more: of
    this rank since its earlier process is over, of others since theirs may be over as well and load that step next.
    """
    session, rank = job.get("newest_load", (0, 0))
    return int(session), int(rank)


def begun_too_early(state: Json, job_name: str, step: int, record: Json) -> Json | None:
    """Refusal when a rank began its save before the newest load of the job.

    The leader asks it of reports, before it proposes anything; records in commands do not tell.
    """
    job, begun_after = state["jobs"].get(job_name), record.get("begun_after")
    if job is None or begun_after is None:
        return None
    session, rank = newest_load(job)
    if begun_after > session:
        return None
    return refusal(
        "SUPERSEDED",
        f"step {step} of job {job_name} was begun by rank {record['rank']} before rank {rank} loaded, which voids what "
        "was not committed by then",
        ranks=[record["rank"]],
    )


def commit(state: Json, command: Json) -> Json:
    """Apply a commit command: one step, all ranks, or a refusal and no change.

    Raises:
        MalformedError: nothing has changed.
    """
    job_name = name(command, "job")
    step = integer(command, "step", 0, STEP_MAX)
    world_size = integer(command, "world_size", 1, RANK_MAX)
    tolerate = integer(command, "tolerate", 1, HOLDERS_MAX)
    keep_steps = integer(command, "keep_steps", 1, 1000)
    integer(command, "epoch", 0, state["epoch"])
    when = at_ms(command)
    if not isinstance(command.get("ranks"), list) or len(command["ranks"]) != world_size:
        raise MalformedError(f"a commit must have the records of exactly {world_size} ranks")
    ranks = sorted((rank_record(value) for value in command["ranks"]), key=lambda r: int(r["rank"]))
    if [record["rank"] for record in ranks] != list(range(world_size)):
        raise MalformedError(f"the ranks of a commit must be 0 to {world_size - 1}, each once")

    job = state["jobs"].get(job_name)
    if job is not None and step <= job["newest"]:
        kept = find_step(job, step)
        if (
            kept is not None
            and len(kept["ranks"]) == len(ranks)
            and all(map(same_bytes, kept["ranks"], ranks))
        ):
            return {"ok": True, "step": step}
        return refusal("NOT_NEWER", f"step {step} of job {job_name} is not newer than {job['newest']}")
    refusals = [
        r for record in ranks if (r := check_rank(state, job_name, step, world_size, tolerate, record))
    ]
    if refusals:
        return _merge(refusals)
    if differ := shared_state.parts_differ(ranks):
        return refusal("REPLICAS_DISAGREE", f"step {step} of job {job_name}: {differ[0]}")

    assert job is not None, "a current session implies its job"
    kept = {"step": step, "world_size": world_size, "copies": copies_of(ranks), "ranks": ranks}
    if when is not None:
        kept["at_ms"] = when
    job["steps"].append(kept)
    del job["steps"][:-keep_steps]
    job["recent"].append([step, job["next_session"]])
    del job["recent"][:-RECENT_MAX]
    job["newest"] = step
    job["world_size"] = world_size
    state["version"] += 1
    return {"ok": True, "step": step}


def _merge(refusals: list[Json]) -> Json:
    """One answer for many refused ranks: of the gravest kind, with all ranks and holders of that kind."""
    order = ["FENCED", "INCARNATION_OVER", "SUPERSEDED", "HOLDER_LOST", "WORLD_SIZE", "INVALID"]
    first = min(refusals, key=lambda r: order.index(r["code"]))
    same = [r for r in refusals if r["code"] == first["code"]]
    lost: list[list[Any]] = []
    for one in same:
        lost += [holder for holder in one.get("lost", []) if holder not in lost]
    merged = first | {"ranks": [rank for one in same for rank in one["ranks"]]}
    return merged | {"lost": lost} if lost else merged
