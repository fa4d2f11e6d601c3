"""Which process speaks for a rank: sessions, and the jobs that they belong to. Pure.

The first process of a job makes it its identity's (`owning.py`).
A session is never used twice, even when its job has been forgotten: `session_floor` is above all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from fastcheck_proto.conventions import RANK_MAX

from ..errors import DeniedError
from .commits import refusal
from .owners import IDENTITY_BYTES_MAX, LOCAL, check_use, owner_of
from .records import TOKEN_BYTES_MAX, Json, MalformedError, flag, integer, live, name, node_ref, text

JOBS_MAX = 4096
#: Ranks of all jobs together, with or without a process: each is part of every snapshot, and no voter may take longer
#: to write that than its leadership lasts without a word. And of one owner's jobs, so that none can keep others out.
SEATS_MAX = 2 * RANK_MAX
SEATS_OF_OWNER_MAX = RANK_MAX
#: Former processes of a rank that are recognised when they come back late.
PAST_CLIENTS_MAX = 4
SESSION_MAX = (1 << 63) - 1


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
            "INCARNATION_OVER",
            f"node {node_id} in incarnation {incarnation} is over: it has to register again",
        )
    identity = text(command, "identity", IDENTITY_BYTES_MAX) if "identity" in command else LOCAL
    loads = flag(command, "loads", default=False)
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
        renewed = renews == seat["session"]
        if seat["client"] == client and seat["world_size"] == world_size and not renewed:
            if seat.pop("closed", False):
                state["version"] += 1  # it goes on after all
            return {"ok": True, "session": seat["session"], "current": seat["session"]}
        if client in seat["past"] and not is_vacant(state, job_name, rank, client):
            return refusal(
                "FENCED",
                f"another process took the place of rank {rank} of job {job_name}",
            )
    current = current_session(state, job_name, rank)
    if replaces is not None and replaces != current:
        return {"ok": True, "session": 0, "current": current}
    if seat is None:
        _make_seat(state, job_name, identity if job is None else owner_of(job))
    if job is None:
        job = _new_job(state, job_name, identity)
    session = job["next_session"]
    job["next_session"] += 1
    # Not at the first start of a job, where ranks that need not wait for each other would lose their first steps.
    follows = seat is not None or any(other["world_size"] != world_size for other in job["ranks"].values())
    past = [] if seat is None else [c for c in [*seat["past"], seat["client"]] if c not in ("", client)]
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


def nodes_there(state: Json) -> set[str]:
    """The nodes that are not DOWN."""
    return {node_id for node_id, node in state["nodes"].items() if node["state"] != "DOWN"}


def is_running(seat: Json, there: Collection[str]) -> bool:
    """Whether a rank's process has not said that it is done, and its node is `there`."""
    return seat["node"][0] in there and not seat.get("closed", False)


def running_ranks(state: Json, job: Json) -> tuple[int, ...]:
    """A job's ranks that are running."""
    there = nodes_there(state)
    return tuple(int(rank) for rank, seat in job["ranks"].items() if is_running(seat, there))


def count_seats(state: Json) -> int:
    """Ranks of all jobs that the registry knows."""
    return sum(len(job["ranks"]) for job in state["jobs"].values())


def _make_seat(state: Json, job_name: str, owner: str) -> None:
    """See to it that there may be one more rank: jobs without steps are forgotten for it.

    Raises:
        MalformedError: there are too many of jobs with steps.
    """
    jobs = state["jobs"]
    while True:
        seats: Counter[str] = Counter()
        for job in jobs.values():
            seats[owner_of(job)] += len(job["ranks"])
        if seats[owner] < SEATS_OF_OWNER_MAX and seats.total() < SEATS_MAX:
            return
        found = [each for each in _without_steps(state) if each != job_name]
        if seats[owner] >= SEATS_OF_OWNER_MAX:
            most, whose = SEATS_OF_OWNER_MAX, f"jobs of {owner}"
            found = [each for each in found if owner_of(jobs[each]) == owner]
        else:
            most, whose = SEATS_MAX, "all jobs"
        if not found:
            raise MalformedError(
                f"the registry keeps {most} ranks of {whose} already: delete jobs that are over, or use fewer ranks"
            )
        _forget(state, _to_forget(state, found, weight=lambda job: len(job["ranks"])))


def _make_room(state: Json) -> None:
    """See to it that there may be one more job.

    Raises:
        MalformedError: all have steps.
    """
    if len(state["jobs"]) < JOBS_MAX:
        return
    empty = _without_steps(state)
    if not empty:
        raise MalformedError(f"the cluster keeps steps of {JOBS_MAX} jobs already")
    _forget(state, _to_forget(state, empty, weight=lambda _: 1))


def _without_steps(state: Json) -> list[str]:
    return [each for each, job in state["jobs"].items() if not job["steps"]]


def _to_forget(state: Json, found: list[str], weight: Callable[[Json], int]) -> str:
    """Which of these jobs without steps matters least.

    One that has a trainer may be in its first step. Where all do, perhaps of processes that were killed, the oldest
    goes of whoever has most: nobody has others' jobs forgotten by opening more and more. Its next save takes the place
    again.
    """
    jobs, there = state["jobs"], nodes_there(state)
    for each in found:
        if not any(is_running(seat, there) for seat in jobs[each]["ranks"].values()):
            return each
    weights: Counter[str] = Counter()
    for each in found:
        weights[owner_of(jobs[each])] += weight(jobs[each])
    whose = weights.most_common(1)[0][0]
    return next(each for each in found if owner_of(jobs[each]) == whose)


def _forget(state: Json, job_name: str) -> None:
    state["session_floor"] = max(state["session_floor"], state["jobs"].pop(job_name)["next_session"])


def _new_job(state: Json, job_name: str, owner: str) -> Json:
    jobs = state["jobs"]
    _make_room(state)
    job: Json = {
        "newest": -1,
        "world_size": 0,
        "next_session": state["session_floor"],
        "ranks": {},
        "steps": [],
        "recent": [],
    }
    if owner != LOCAL:
        job["owner"] = owner
    if state["session_floor"] > 1:
        # Of an earlier life of this job, which was forgotten because nothing of it was kept.
        job["void"] = state["session_floor"]
    jobs[job_name] = job
    return job
