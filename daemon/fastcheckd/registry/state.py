"""The replicated state machine: `apply(state, command) -> result`. Pure and total.

Every voter runs the same commands in the same order and must come to the same state: nothing here
reads a clock, draws a random number, or raises. State, commands and results are JSON (dicts, lists,
strings, whole numbers); dict order is part of the state and survives a snapshot.

    {"schema", "epoch", "version", "next_incarnation", "session_floor",
     "nodes": {node_id: {"incarnation", "state", "life_id", "agent_address", ...}},
     "jobs":  {job: {"newest", "world_size", "next_session", "ranks": {rank: seat}, "steps", "recent"}},
     "seen":  {client_id: [[seq, result], ...]}}

`epoch` counts changes of the membership, `version` all changes that a view shows. Incarnations and
sessions are never used twice, even when the node or job they belonged to has been forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastcheck_proto.conventions import RANK_MAX, STEP_MAX

from .commits import commit, refusal
from .records import TOKEN_BYTES_MAX, Json, MalformedError, integer, name, node_fields, node_ref, text

SCHEMA = 1

NODES_MAX = 4096
JOBS_MAX = 4096
#: Proposers whose results are remembered, and results of each: more than one has in flight at once.
SEEN_CLIENTS_MAX = 64
SEEN_RESULTS_MAX = 64
#: Former processes of a rank that are recognised when they come back late.
PAST_CLIENTS_MAX = 4


def new_state() -> Json:
    """The state before the first command."""
    return {
        "schema": SCHEMA,
        "epoch": 0,
        "version": 0,
        "next_incarnation": 1,
        "session_floor": 1,
        "nodes": {},
        "jobs": {},
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
    state = json.loads(data)
    if not isinstance(state, dict) or set(state) != set(new_state()):
        raise ValueError("not a registry snapshot")
    if state["schema"] != SCHEMA:
        raise ValueError(f"registry snapshot has schema {state['schema']}, this version reads {SCHEMA}")
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


def _register(state: Json, command: Json) -> Json:
    """A node's new life; the same life_id again is the same life, unless that life is over."""
    fields = node_fields(command.get("node"))
    life_id = text(command, "life_id", TOKEN_BYTES_MAX)
    node_id = fields.pop("node_id")
    nodes = state["nodes"]
    known = nodes.get(node_id)
    if known is not None and known["life_id"] == life_id and known["state"] != "DOWN":
        return {"ok": True, "incarnation": known["incarnation"], "epoch": state["epoch"]}
    if known is None and len(nodes) >= NODES_MAX:
        down = [(node["incarnation"], other) for other, node in nodes.items() if node["state"] == "DOWN"]
        if not down:
            raise MalformedError(f"the cluster has {NODES_MAX} nodes already, none of them DOWN")
        del nodes[min(down)[1]]
    incarnation = state["next_incarnation"]
    state["next_incarnation"] += 1
    nodes[node_id] = {"incarnation": incarnation, "state": "UP", "life_id": life_id, **fields}
    _membership_changed(state)
    return {"ok": True, "incarnation": incarnation, "epoch": state["epoch"]}


def _set_state(state: Json, command: Json) -> Json:
    """UP, DRAINING or DOWN, if the node is still in the incarnation that the judgement was about."""
    node_id, incarnation = node_ref(command.get("node"), "the node")
    wanted = command.get("state")
    if wanted not in ("UP", "DRAINING", "DOWN"):
        raise MalformedError("a node's state can be set to UP, DRAINING or DOWN")
    node = state["nodes"].get(node_id)
    if node is None or node["incarnation"] != incarnation:
        return refusal("FENCED", f"node {node_id} is not in incarnation {incarnation} any more")
    if node["state"] != wanted:
        if node["state"] == "DOWN":
            return refusal("FENCED", f"node {node_id} is DOWN: only registering again brings it back")
        node["state"] = wanted
        _membership_changed(state)
    return {"ok": True, "epoch": state["epoch"]}


def _membership_changed(state: Json) -> None:
    state["epoch"] += 1
    state["version"] += 1


def _open_rank(state: Json, command: Json) -> Json:
    """A process takes a rank's place: a new session, and the end of the one before."""
    job_name = name(command, "job")
    world_size = integer(command, "world_size", 1, RANK_MAX)
    rank = integer(command, "rank", 0, world_size - 1)
    client = text(command, "client", TOKEN_BYTES_MAX)
    node_id, incarnation = node_ref(command.get("node"), "the node")
    node = state["nodes"].get(node_id)
    if node is None or node["incarnation"] != incarnation or node["state"] == "DOWN":
        return refusal(
            "FENCED", f"node {node_id} in incarnation {incarnation} is over: it has to register again"
        )
    job = state["jobs"].get(job_name)
    seat = None if job is None else job["ranks"].get(str(rank))
    if seat is not None:
        if seat["client"] == client and seat["world_size"] == world_size:
            return {"ok": True, "session": seat["session"]}
        if client in seat["past"]:
            return refusal("FENCED", f"another process took the place of rank {rank} of job {job_name}")
    if job is None:
        job = _new_job(state, job_name)
    session = job["next_session"]
    job["next_session"] += 1
    past = [] if seat is None else [c for c in [*seat["past"], seat["client"]] if c != client]
    job["ranks"][str(rank)] = {
        "session": session,
        "client": client,
        "node": [node_id, incarnation],
        "world_size": world_size,
        "past": past[-PAST_CLIENTS_MAX:],
    }
    if not job["steps"]:
        job["world_size"] = world_size
    state["version"] += 1
    return {"ok": True, "session": session}


def _new_job(state: Json, job_name: str) -> Json:
    jobs = state["jobs"]
    if len(jobs) >= JOBS_MAX:
        empty = next((other for other, job in jobs.items() if not job["steps"]), None)
        if empty is None:
            raise MalformedError(f"the cluster keeps steps of {JOBS_MAX} jobs already")
        state["session_floor"] = max(state["session_floor"], jobs.pop(empty)["next_session"])
    job: Json = {
        "newest": -1,
        "world_size": 0,
        "next_session": state["session_floor"],
        "ranks": {},
        "steps": [],
        "recent": [],
    }
    jobs[job_name] = job
    return job


def _noop(_state: Json, _command: Json) -> Json:
    """Changes nothing; that it was committed proves that whoever proposed it leads."""
    return {"ok": True}


_HANDLERS: dict[str, Callable[[Json, Json], Json]] = {
    "register": _register,
    "set_state": _set_state,
    "open_rank": _open_rank,
    "commit": commit,
    "noop": _noop,
}
