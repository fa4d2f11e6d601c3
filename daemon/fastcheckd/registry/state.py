"""The replicated state machine: `apply(state, command) -> result`. Pure and total.

Every voter runs the same commands in the same order and must come to the same state: nothing here or in
the modules that it calls reads a clock, draws a random number, or raises. State, commands and results are JSON
(dicts, lists, strings, whole numbers); dict order is part of the state and survives a snapshot.

    {"schema", "epoch", "version", "holders_version", "next_incarnation", "session_floor",
     "nodes": {node_id: {"incarnation", "state", "life_id", "agent_address", "data_address", "lane_address",
                         "voter", "ram_budget_bytes", "labels", "draining", "reason", "since_ms"}},
     "jobs":  {job: {"newest", "world_size", "next_session", "ranks": {rank: seat}, "steps", "recent", "owner"?,
                    "void"?, "superseded"?, "newest_load"?}},
     "history": [[at_ms, epoch, node_id, incarnation, from or "", to or "", reason], ...],
     "voters": [[node_id, registry_address, raft_address], ...] or null,
     "seen":  {client_id: [[seq, result], ...]}}

`epoch` counts changes of the membership, `version` all changes that a view shows, `holders_version` those of who holds
what is committed. Incarnations and
sessions are never used twice, even when the node or job they belonged to has been forgotten. `voters` is null
while they are still those of the config. What commands look like is written in `commands`.

A job's `owner` is missing where it is `local`; its `void`, `superseded` and `newest_load` and a seat's `closed` are
missing where they do not apply. A kept step's `at_ms` is the leader's wall clock at its commit.

`schema` is what all voters have been seen to know, and rises by a command: a state with the commands of a version
that some voter does not run would become another one there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastcheck_proto.conventions import STEP_MAX

from .commits import commit, refusal
from .deletion import close_rank, delete
from .holders import mark, rehold
from .nodes import forget, register, set_draining, set_state, set_voters
from .records import TOKEN_BYTES_MAX, Json, MalformedError, integer, text
from .sessions import open_rank
from .superseded import supersede

#: The newest that this version knows, and the oldest, which a new cluster begins with: voters of the version before
#: know that one.
SCHEMA = 7
SCHEMA_OLDEST = 7

#: Proposers whose results are remembered, and results of each: more than one has in flight at once.
SEEN_CLIENTS_MAX = 64
SEEN_RESULTS_MAX = 64


def new_state() -> Json:
    """The state before the first command."""
    return {
        "schema": SCHEMA_OLDEST,
        "epoch": 0,
        "version": 0,
        "holders_version": 0,
        "next_incarnation": 1,
        "session_floor": 1,
        "nodes": {},
        "jobs": {},
        "history": [],
        "voters": None,
        "seen": {},
    }


def snapshot(state: Json) -> bytes:
    """The state as bytes."""
    return json.dumps(state, separators=(",", ":")).encode()


def restore(data: bytes) -> Json:
    """The state from bytes.

    Raises:
        ValueError: not a snapshot, or of a schema that this version does not know.
    """
    try:
        state: Json = json.loads(data)
        schema, keys = state["schema"], set(state)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not a registry snapshot") from None
    if schema not in range(SCHEMA_OLDEST, SCHEMA + 1):
        raise ValueError(
            f"registry snapshot has schema {schema}, this version reads {SCHEMA_OLDEST} to {SCHEMA}"
        )
    if keys != set(new_state()):
        raise ValueError("not a registry snapshot")
    return state


def apply(state: Json, command: Any) -> Json:
    """Change `state` by one command and say what came of it. Never raises; a refusal changes nothing.

    A command with `client_id` and `seq` is applied once, however often it is in the log: a repetition
    gets the first result.
    """
    try:
        return _apply_once(state, command)
    except MalformedError as error:
        return refusal("INVALID", str(error))
    except Exception as error:  # noqa: BLE001  a voter that raises here repeats the entry for ever
        return refusal("INTERNAL", f"defect in the registry's state machine: {error!r}")


def _apply_once(state: Json, command: Any) -> Json:
    if not isinstance(command, dict):
        raise MalformedError("a command must be an object")
    handler = _HANDLERS.get(str(command.get("type")))
    if handler is None:
        raise MalformedError(f"unknown command {str(command.get('type'))[:40]!r}")
    if "client_id" not in command or command["type"] == "noop":
        return handler(state, command)
    # A proposer's own identity; `open_rank` carries the trainer's as "client".
    client_id = text(command, "client_id", TOKEN_BYTES_MAX)
    seq = integer(command, "seq", 0, STEP_MAX)
    results = state["seen"].get(client_id, [])
    for known, result in results:
        if known == seq:
            return dict(result)
    if len(results) == SEEN_RESULTS_MAX and seq < min(known for known, _ in results):
        raise MalformedError("the command is too old: its result is forgotten")
    result = _handle(handler, state, command)
    results.append([seq, result])
    results.sort(key=lambda entry: int(entry[0]))
    del results[:-SEEN_RESULTS_MAX]
    state["seen"].pop(client_id, None)
    state["seen"][client_id] = results
    for oldest in list(state["seen"])[:-SEEN_CLIENTS_MAX]:
        del state["seen"][oldest]
    return dict(result)


def _handle(handler: Callable[[Json, Json], Json], state: Json, command: Json) -> Json:
    try:
        return handler(state, command)
    except MalformedError as error:
        return refusal("INVALID", str(error))


def _noop(_state: Json, _command: Json) -> Json:
    """Changes nothing; that it was committed proves that whoever proposed it leads."""
    return {"ok": True}


def _upgrade(state: Json, command: Json) -> Json:
    """All voters know this schema: from here on its commands count."""
    wanted = integer(command, "schema", 1, SCHEMA)
    state["schema"] = max(state["schema"], wanted)
    return {"ok": True, "schema": state["schema"]}


_HANDLERS: dict[str, Callable[[Json, Json], Json]] = {
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
