"""The replicated state machine: `apply(state, entry) -> result`. Pure and total.

Every voter applies the same entries in the same order and must come to the same state: nothing here or in
the modules that it calls reads a clock, draws a random number, or raises. Entries, results and snapshots are messages
(registry_log.proto); `model` is the state in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb

from . import model
from .commands import TOKEN_BYTES_MAX, check, check_text
from .commits import commit
from .deletion import close_rank, delete, supersede
from .holders import mark, rehold
from .model import Bound, Job, Load, MalformedError, State, done, refusal
from .nodes import forget, register, set_draining, set_state, set_voters
from .sessions import open_rank

M = TypeVar("M", bound=Message)
Command = log_pb2.RegistryCommand
Result = log_pb2.RegistryResult

#: Largest entry: a commit of about 20,000 ranks. Stays below the engine's batch size, whose code for larger ones cuts
#: them wrongly at some sizes.
COMMAND_BYTES_MAX = 8 << 20
#: Proposers whose results are remembered, and results of each: more than one has in flight at once.
SEEN_CLIENTS_MAX = 64
SEEN_RESULTS_MAX = 64


def apply(state: State, entry: bytes) -> Result:
    """Change `state` by one command and say what came of it. Never raises; a refusal changes nothing.

    A command with a proposer is applied once, however often it is in the log: a repetition gets the first result.
    """
    try:
        if len(entry) > COMMAND_BYTES_MAX:
            raise MalformedError(f"a command has at most {COMMAND_BYTES_MAX} bytes")
        return _apply_once(state, Command.FromString(entry))
    except (MalformedError, DecodeError) as error:
        return refusal(pb.ERROR_CODE_INVALID, str(error))
    except Exception as error:  # noqa: BLE001  a voter that raises here repeats the entry for ever
        return refusal(pb.ERROR_CODE_INTERNAL, f"defect in the registry's state machine: {error!r}")


def _apply_once(state: State, command: Command) -> Result:
    if not command.proposer or command.HasField("noop"):
        return _handle(state, command)
    check_text("proposer", command.proposer, TOKEN_BYTES_MAX)
    results = state.seen.get(command.proposer, {})
    if (known := results.get(command.seq)) is not None:
        return known
    if len(results) == SEEN_RESULTS_MAX and command.seq < min(results):
        raise MalformedError("the command is too old: its result is forgotten")
    result = _handle(state, command)
    results[command.seq] = result
    if len(results) > SEEN_RESULTS_MAX:
        del results[min(results)]
    state.seen.pop(command.proposer, None)
    state.seen[command.proposer] = results
    if len(state.seen) > SEEN_CLIENTS_MAX:
        del state.seen[next(iter(state.seen))]
    return result


def _handle(state: State, command: Command) -> Result:
    try:
        check(command)
        return _HANDLERS[str(command.WhichOneof("kind"))](state, command)
    except MalformedError as error:
        return refusal(pb.ERROR_CODE_INVALID, str(error))


def _noop(_state: State, _command: Command) -> Result:
    return done()


def _upgrade(state: State, command: Command) -> Result:
    """All voters know this schema: from here on its commands count."""
    if not 1 <= command.upgrade <= model.SCHEMA:
        raise MalformedError(f"this version knows the schemas 1 to {model.SCHEMA}, not {command.upgrade}")
    state.schema = max(state.schema, command.upgrade)
    return Result(ok=True, schema=state.schema)


_HANDLERS: dict[str, Callable[[State, Command], Result]] = {
    "register": register,
    "set_state": set_state,
    "set_draining": set_draining,
    "forget": forget,
    "set_voters": set_voters,
    "open_rank": open_rank,
    "commit": commit,
    "rehold": rehold,
    "mark": mark,
    "supersede": supersede,
    "delete": delete,
    "close_rank": close_rank,
    "upgrade": _upgrade,
    "noop": _noop,
}


def snapshot(state: State) -> log_pb2.RegistrySnapshot:
    """The state as one message."""
    made = log_pb2.RegistrySnapshot(
        schema=state.schema,
        epoch=state.epoch,
        version=state.version,
        holders_version=state.holders_version,
        next_incarnation=state.next_incarnation,
        session_floor=state.session_floor,
        nodes=state.nodes.values(),
        history=state.history,
        voters=state.voters,
    )
    for job in state.jobs.values():
        made.jobs.add(
            job=job.name,
            owner=job.owner,
            newest=None if job.newest < 0 else job.newest,
            world_size=job.world_size,
            next_session=job.next_session,
            ranks=job.ranks.values(),
            steps=job.steps,
            recent=[log_pb2.RecentCommit(step=step, next_session=session) for step, session in job.recent],
            void_below_session=job.void,
            superseded=[
                rpb.SupersededSteps(below_step=bound.below_step, below_session=bound.below_session)
                for bound in job.superseded
            ],
            newest_load=job.newest_load.session,
            newest_load_rank=job.newest_load.rank,
        )
    for proposer, results in state.seen.items():
        made.seen.add(
            proposer=proposer,
            results=[log_pb2.NumberedResult(seq=seq, result=result) for seq, result in results.items()],
        )
    return made


def restore(snapshot: log_pb2.RegistrySnapshot) -> State:
    """Inverse of `snapshot`. Copies: a part that is kept would keep all of the snapshot in memory.

    Raises:
        ValueError: it has a schema that this version does not know.
    """
    if snapshot.schema not in range(model.SCHEMA_OLDEST, model.SCHEMA + 1):
        raise ValueError(
            f"registry snapshot has schema {snapshot.schema}, this version reads "
            f"{model.SCHEMA_OLDEST} to {model.SCHEMA}"
        )
    state = State(
        schema=snapshot.schema,
        epoch=snapshot.epoch,
        version=snapshot.version,
        holders_version=snapshot.holders_version,
        next_incarnation=snapshot.next_incarnation,
        session_floor=snapshot.session_floor,
        nodes={node.node_id: _copy(node) for node in snapshot.nodes},
        history=list(map(_copy, snapshot.history)),
        voters=list(map(_copy, snapshot.voters)),
        seen={
            each.proposer: {numbered.seq: _copy(numbered.result) for numbered in each.results}
            for each in snapshot.seen
        },
    )
    for job in snapshot.jobs:
        state.jobs[job.job] = Job(
            name=job.job,
            next_session=job.next_session,
            owner=job.owner,
            newest=job.newest if job.HasField("newest") else -1,
            world_size=job.world_size,
            ranks={seat.rank: _copy(seat) for seat in job.ranks},
            steps=list(map(_copy, job.steps)),
            recent=[(each.step, each.next_session) for each in job.recent],
            void=job.void_below_session,
            superseded=[Bound(each.below_step, each.below_session) for each in job.superseded],
            newest_load=Load(job.newest_load, job.newest_load_rank),
        )
    return state


def _copy(message: M) -> M:
    made = type(message)()
    made.CopyFrom(message)
    return made
