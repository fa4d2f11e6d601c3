"""Which process speaks for a rank: sessions, and the jobs that they belong to. Pure.

The first process of a job makes it its identity's (`owners`).
A session is never used twice, even when its job has been forgotten: `session_floor` is above all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from fastcheck_proto.conventions import RANK_MAX
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ..errors import DeniedError
from .model import DOWN, LOCAL, Job, Load, MalformedError, State, check_use, live, refusal

JOBS_MAX = 4096
#: Ranks of all jobs together, with or without a process: each is part of every snapshot, and no voter may take longer
#: to write that than its leadership lasts without a word. And of one owner's jobs, so that none can keep others out.
SEATS_MAX = 2 * RANK_MAX
SEATS_OF_OWNER_MAX = RANK_MAX
#: Former processes of a rank that are recognised when they come back late.
PAST_CLIENTS_MAX = 4


def open_rank(state: State, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
    """A process takes a rank's place: a new session, and the end of the one before.

    Only of the session that it `replaces`, if it says so: a command that comes late ends no younger session. A process
    that has lost the place does not get it back, unless it lost it to a deletion and nobody has had it since. One that
    `renews` its own session gets another one. One that `loads` after an earlier run voids what any rank of the job has
    begun by now (`commits.newest_load`): after a process of the same rank, or of any rank when they were fewer or more.
    """
    asked = command.open_rank
    job_name, rank, client = asked.job, asked.rank, asked.client_id
    if not live(state, asked.node):
        return refusal(
            pb.ERROR_CODE_INCARNATION_OVER,
            f"node {asked.node.node_id} in incarnation {asked.node.incarnation} is over: it has to register again",
        )
    identity = asked.identity or LOCAL
    job = state.jobs.get(job_name)
    if job is not None:
        try:
            check_use(identity, job.owner, job_name)
        except DeniedError as error:
            return refusal(pb.ERROR_CODE_DENIED, str(error))
    seat = None if job is None else job.ranks.get(rank)
    if seat is not None:
        renewed = asked.renews == seat.session
        if seat.client_id == client and seat.world_size == asked.world_size and not renewed:
            if seat.closed:
                seat.closed = False
                state.version += 1  # it goes on after all
            return _opened(seat.session, seat.session)
        if client in seat.past and not is_vacant(state, job_name, rank, client):
            return refusal(
                pb.ERROR_CODE_FENCED, f"another process took the place of rank {rank} of job {job_name}"
            )
    current = current_session(state, job_name, rank)
    if asked.HasField("replaces") and asked.replaces != current:
        return _opened(0, current)
    if seat is None:
        _make_seat(state, job_name, identity if job is None else job.owner)
    if job is None:
        job = _new_job(state, job_name, identity)
    session = job.next_session
    job.next_session += 1
    # Not at the first start of a job, where ranks that need not wait for each other would lose their first steps.
    follows = seat is not None or any(other.world_size != asked.world_size for other in job.ranks.values())
    past = [] if seat is None else [c for c in (*seat.past, seat.client_id) if c not in ("", client)]
    job.ranks[rank] = log_pb2.RankSeat(
        rank=rank,
        session=session,
        client_id=client,
        node=asked.node,
        world_size=asked.world_size,
        past=past[-PAST_CLIENTS_MAX:],
    )
    if asked.loads and follows:
        job.newest_load = Load(session, rank)
    if not job.steps:
        job.world_size = asked.world_size
    state.version += 1
    return _opened(session, session)


def _opened(session: int, current: int) -> log_pb2.RegistryResult:
    return log_pb2.RegistryResult(ok=True, session=session, current=current)


def current_session(state: State, job_name: str, rank: int) -> int:
    """The session that speaks for a rank; 0 if there is none."""
    job = state.jobs.get(job_name)
    seat = None if job is None else job.ranks.get(rank)
    return 0 if seat is None else seat.session


def is_vacant(state: State, job_name: str, rank: int, client: str) -> bool:
    """Whether nobody has had a rank's place since this client: a deletion has ended its session, or nothing has."""
    job = state.jobs.get(job_name)
    seat = None if job is None else job.ranks.get(rank)
    if seat is None:  # forgotten with its job, of which nothing is kept
        return True
    sitters = [each for each in (*seat.past, seat.client_id) if each]
    return sitters[-1:] == [client]


def nodes_there(state: State) -> set[str]:
    """The nodes that are not DOWN."""
    return {node_id for node_id, node in state.nodes.items() if node.state != DOWN}


def is_running(seat: log_pb2.RankSeat, there: Collection[str]) -> bool:
    """Whether a rank's process has not said that it is done, and its node is `there`."""
    return seat.node.node_id in there and not seat.closed


def running_ranks(state: State, job: Job) -> tuple[int, ...]:
    """A job's ranks that are running."""
    there = nodes_there(state)
    return tuple(rank for rank, seat in job.ranks.items() if is_running(seat, there))


def count_seats(state: State) -> int:
    """Ranks of all jobs that the registry knows."""
    return sum(len(job.ranks) for job in state.jobs.values())


def _make_seat(state: State, job_name: str, owner: str) -> None:
    """See to it that there may be one more rank: jobs without steps are forgotten for it.

    Raises:
        MalformedError: there are too many of jobs with steps.
    """
    jobs = state.jobs
    while True:
        seats: Counter[str] = Counter()
        for job in jobs.values():
            seats[job.owner] += len(job.ranks)
        if seats[owner] < SEATS_OF_OWNER_MAX and seats.total() < SEATS_MAX:
            return
        found = [each for each in _without_steps(state) if each != job_name]
        if seats[owner] >= SEATS_OF_OWNER_MAX:
            most, whose = SEATS_OF_OWNER_MAX, f"jobs of {owner}"
            found = [each for each in found if jobs[each].owner == owner]
        else:
            most, whose = SEATS_MAX, "all jobs"
        if not found:
            raise MalformedError(
                f"the registry keeps {most} ranks of {whose} already: delete jobs that are over, or use fewer ranks"
            )
        _forget(state, _to_forget(state, found, weight=lambda job: len(job.ranks)))


def _make_room(state: State) -> None:
    """See to it that there may be one more job.

    Raises:
        MalformedError: all have steps.
    """
    if len(state.jobs) < JOBS_MAX:
        return
    empty = _without_steps(state)
    if not empty:
        raise MalformedError(f"the cluster keeps steps of {JOBS_MAX} jobs already")
    _forget(state, _to_forget(state, empty, weight=lambda _: 1))


def _without_steps(state: State) -> list[str]:
    return [each for each, job in state.jobs.items() if not job.steps]


def _to_forget(state: State, found: list[str], weight: Callable[[Job], int]) -> str:
    """Which of these jobs without steps matters least.

    One that has a trainer may be in its first step. Where all do, perhaps of processes that were killed, the oldest
    goes of whoever has most: nobody has others' jobs forgotten by opening more and more. Its next save takes the place
    again.
    """
    jobs, there = state.jobs, nodes_there(state)
    for each in found:
        if not any(is_running(seat, there) for seat in jobs[each].ranks.values()):
            return each
    weights: Counter[str] = Counter()
    for each in found:
        weights[jobs[each].owner] += weight(jobs[each])
    whose = weights.most_common(1)[0][0]
    return next(each for each in found if jobs[each].owner == whose)


def _forget(state: State, job_name: str) -> None:
    state.session_floor = max(state.session_floor, state.jobs.pop(job_name).next_session)


def _new_job(state: State, job_name: str, owner: str) -> Job:
    _make_room(state)
    job = Job(job_name, next_session=state.session_floor, owner=owner)
    if state.session_floor > 1:
        # Of an earlier life of this job, which was forgotten because nothing of it was kept.
        job.void = state.session_floor
    state.jobs[job_name] = job
    return job
