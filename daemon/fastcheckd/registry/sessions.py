"""Which process speaks for a rank: sessions, and the jobs that they belong to. Pure.

The first process of a job makes it its identity's (`owning.py`).
A session is never used twice, even when its job has been forgotten: `session_floor` is above all of them.
"""

from __future__ import annotations

from fastcheck_proto.conventions import RANK_MAX

from ..errors import DeniedError
from .commits import refusal
from .owning import IDENTITY_BYTES_MAX, LOCAL, check_use, owner_of
from .records import TOKEN_BYTES_MAX, Json, MalformedError, flag, integer, live, name, node_ref, text

JOBS_MAX = 4096
#: Former processes of a rank that are recognised when they come back late.
PAST_CLIENTS_MAX = 4
#: What the state must be agreed on before a process gets back what a deletion took: older voters would refuse it.
SCHEMA_REOPENED = 5
#: Likewise before a job that seems to run is spared when there are too many.
SCHEMA_SPARING = 5
SESSION_MAX = (1 << 63) - 1
#: What the state must be agreed on before a load is marked, and has a process' session followed by another one of it.
SCHEMA_LOADS = 5


def open_rank(state: Json, command: Json) -> Json:
    """A process takes a rank's place: a new session, and the end of the one before.

    Only of the session that it `replaces`, if it says so: a command that comes late ends no younger session. A process
    that has lost the place does not get it back, unless it lost it to a deletion and nobody has had it since. One that
    `renews` its own session gets another one. One that `loads` after an earlier run voids what any rank of the job has
    begun by now (`commits.newest_load`): after a process of the same rank, or of any rank when they were fewer or more.
    """
    job_name = name(command, "job")
    world_size = integer(command, "world_size", 1, RANK_MAX)
    rank = integer(command, "rank", 0, world_size - 1)
    client = text(command, "client", TOKEN_BYTES_MAX)
    node_id, incarnation = node_ref(command.get("node"), "the node")
    if not live(state, [node_id, incarnation]):
        return refusal(
            "FENCED", f"node {node_id} in incarnation {incarnation} is over: it has to register again"
        )
    identity = text(command, "identity", IDENTITY_BYTES_MAX) if "identity" in command else LOCAL
    loads = flag(command, "loads", default=False) and state["schema"] >= SCHEMA_LOADS
    renews = integer(command, "renews", 1, SESSION_MAX) if "renews" in command else None
    job = state["jobs"].get(job_name)
    if job is not None:
        try:
            check_use(identity, owner_of(job), job_name)
        except DeniedError as error:
            return refusal("DENIED", str(error))
    seat = None if job is None else job["ranks"].get(str(rank))
    replaces = integer(command, "replaces", 0, SESSION_MAX) if command.get("replaces") is not None else None
    if seat is not None:
        renewed = state["schema"] >= SCHEMA_LOADS and renews == seat["session"]
        if seat["client"] == client and seat["world_size"] == world_size and not renewed:
            if seat.pop("closed", False):
                state["version"] += 1  # it goes on after all
            return {"ok": True, "session": seat["session"], "current": seat["session"]}
        vacant = state["schema"] >= SCHEMA_REOPENED and is_vacant(state, job_name, rank, client)
        if client in seat["past"] and not vacant:
            return refusal(
                "FENCED",
                f"another process took the place of rank {rank} of job {job_name}",
            )
    current = current_session(state, job_name, rank)
    if replaces is not None and replaces != current:
        return {"ok": True, "session": 0, "current": current}
    if job is None:
        job = _new_job(state, job_name, identity)
    session = job["next_session"]
    job["next_session"] += 1
    # Not at the first start of a job, where ranks that need not wait for each other would lose their first steps.
    follows = seat is not None or any(other["world_size"] != world_size for other in job["ranks"].values())
    without = ("", client) if state["schema"] >= SCHEMA_REOPENED else (client,)
    past = [] if seat is None else [c for c in [*seat["past"], seat["client"]] if c not in without]
    job["ranks"][str(rank)] = {
        "session": session,
        "client": client,
        "node": [node_id, incarnation],
        "world_size": world_size,
        "past": past[-PAST_CLIENTS_MAX:],
    }
    if loads and follows:
        job["newest_load"] = [session, rank]
    if not job["steps"]:
        job["world_size"] = world_size
    state["version"] += 1
    return {"ok": True, "session": session, "current": session}


def current_session(state: Json, job_name: str, rank: int) -> int:
    """The session that speaks for a rank; 0 if there is none."""
    job = state["jobs"].get(job_name)
    seat = None if job is None else job["ranks"].get(str(rank))
    return 0 if seat is None else int(seat["session"])


def is_vacant(state: Json, job_name: str, rank: int, client: str) -> bool:
    """Whether nobody has had a rank's place since this client: a deletion has ended its session, or nothing has."""
    job = state["jobs"].get(job_name)
    seat = None if job is None else job["ranks"].get(str(rank))
    if seat is None:  # forgotten with its job, of which nothing is kept
        return True
    sitters = [each for each in [*seat["past"], seat["client"]] if each]
    return sitters[-1:] == [client]


def running_ranks(state: Json, job: Json) -> tuple[int, ...]:
    """Ranks whose process has not said that it is done, and whose node is not DOWN."""
    return tuple(
        int(rank)
        for rank, seat in job["ranks"].items()
        if not seat.get("closed", False)
        and state["nodes"].get(seat["node"][0], {}).get("state", "DOWN") != "DOWN"
    )


def _new_job(state: Json, job_name: str, owner: str) -> Json:
    jobs = state["jobs"]
    if len(jobs) >= JOBS_MAX:
        empty = [other for other, job in jobs.items() if not job["steps"]]
        if not empty:
            raise MalformedError(f"the cluster keeps steps of {JOBS_MAX} jobs already")
        forgotten = empty[0]
        if state["schema"] >= SCHEMA_SPARING:
            # One that has a trainer may be in its first step. Where all do, perhaps of processes that were killed, the
            # oldest goes: its next save takes the place again.
            forgotten = next((other for other in empty if not running_ranks(state, jobs[other])), forgotten)
        state["session_floor"] = max(state["session_floor"], jobs.pop(forgotten)["next_session"])
    job: Json = {
        "newest": -1,
        "world_size": 0,
        "next_session": state["session_floor"],
        "ranks": {},
        "steps": [],
        "recent": [],
    }
    if owner != LOCAL:
        # Absent otherwise, as in the state of voters that know no owners.
        job["owner"] = owner
    if state["session_floor"] > 1 and state["schema"] >= 4:
        # Of an earlier life of this job, which was forgotten because nothing of it was kept.
        job["void"] = state["session_floor"]
    jobs[job_name] = job
    return job
