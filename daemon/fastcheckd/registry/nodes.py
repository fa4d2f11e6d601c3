"""Who is in the cluster and in which state; what became of each, remembered for people. Pure.

A node that is not DOWN is DRAINING exactly if its `draining` is set. Of a DOWN node `draining` is what its
next life begins with: a drain outlasts crashes and restarts, until the node leaves in good order or it is undone.
"""

from __future__ import annotations

from typing import Any

from .commits import refusal
from .records import (
    REASON_BYTES_MAX,
    TOKEN_BYTES_MAX,
    VOTERS_MAX,
    Json,
    MalformedError,
    at_ms,
    flag,
    name,
    node_fields,
    node_ref,
    text,
    voter_record,
)

NODES_MAX = 4096
#: Transitions that are remembered.
HISTORY_MAX = 512
#: The reason of a DOWN that a node asked for itself. Then a drain of it is over.
LEFT = "left"
FORGOTTEN = "forgotten"


def register(state: Json, command: Json) -> Json:
    """A node's new life; the same life_id again is the same life, unless that life is over."""
    fields = node_fields(command.get("node"))
    life_id = text(command, "life_id", TOKEN_BYTES_MAX)
    when = at_ms(command)
    node_id = fields.pop("node_id")
    nodes = state["nodes"]
    known = nodes.get(node_id)
    if known is not None and known["life_id"] == life_id and known["state"] != "DOWN":
        return {"ok": True, "incarnation": known["incarnation"], "epoch": state["epoch"]}
    if known is None and len(nodes) >= NODES_MAX:
        down = [(node["incarnation"], other) for other, node in nodes.items() if node["state"] == "DOWN"]
        if not down:
            raise MalformedError(f"the cluster has {NODES_MAX} nodes already, none of them DOWN")
        _remove(state, min(down)[1], f"forgotten to make room for {node_id}", when)
    incarnation = state["next_incarnation"]
    state["next_incarnation"] += 1
    draining = known is not None and known["draining"]
    before = "" if known is None else known["state"]
    node: Json = {"incarnation": incarnation, "state": "DRAINING" if draining else "UP", "life_id": life_id}
    node |= fields | {"draining": draining, "reason": "", "since_ms": when or 0}
    nodes[node_id] = node
    reason = {"": "registered", "DOWN": "came back"}.get(before, "started anew")
    _changed(state, node_id, before, reason + (", still draining" if draining else ""), when)
    return {"ok": True, "incarnation": incarnation, "epoch": state["epoch"]}


def set_state(state: Json, command: Json) -> Json:
    """UP, DRAINING or DOWN, if the node is still in the incarnation that the judgement was about."""
    node_id, incarnation = node_ref(command.get("node"), "the node")
    wanted = command.get("state")
    if wanted not in ("UP", "DRAINING", "DOWN"):
        raise MalformedError("a node's state can be set to UP, DRAINING or DOWN")
    reason = text({"reason": ""} | command, "reason", REASON_BYTES_MAX, empty=True)
    when = at_ms(command)
    node = state["nodes"].get(node_id)
    if node is None or node["incarnation"] != incarnation:
        return refusal("FENCED", f"node {node_id} is not in incarnation {incarnation} any more")
    if node["state"] != wanted and node["state"] == "DOWN":
        return refusal("FENCED", f"node {node_id} is DOWN: only registering again brings it back")
    if wanted != "DOWN":
        node["draining"] = wanted == "DRAINING"
    elif reason == LEFT:
        node["draining"] = False
    _move(state, node_id, wanted, reason, when)
    return {"ok": True, "epoch": state["epoch"]}


def set_draining(state: Json, command: Json) -> Json:
    """A node gets nothing new and its copies are made elsewhere, in this life and those after; or not any more."""
    node_id = name(command, "node_id")
    if "draining" not in command:
        raise MalformedError("draining must be true or false")
    draining = flag(command, "draining", default=False)
    when = at_ms(command)
    node = state["nodes"].get(node_id)
    if node is None:
        return refusal("NOT_FOUND", f"the registry knows no node {node_id}; see 'fastcheck nodes'")
    node["draining"] = draining
    if node["state"] != "DOWN":
        wanted, reason = ("DRAINING", "drained") if draining else ("UP", "drain undone")
        _move(state, node_id, wanted, reason, when)
    return {"ok": True, "epoch": state["epoch"]}


def forget(state: Json, command: Json) -> Json:
    """Takes a DOWN node off the list. One that is gone by this very command already is no mistake."""
    node_id = name(command, "node_id")
    when = at_ms(command)
    node = state["nodes"].get(node_id)
    if node is None:
        last = next((entry for entry in reversed(state["history"]) if entry[2] == node_id), None)
        if last is not None and not last[5]:
            return {"ok": True, "epoch": state["epoch"]}
        return refusal("NOT_FOUND", f"the registry knows no node {node_id}; see 'fastcheck nodes'")
    if node["state"] != "DOWN":
        return refusal(
            "UNSAFE",
            f"node {node_id} is {node['state']}: only a node that is DOWN can be forgotten; stop its daemon first",
        )
    _remove(state, node_id, FORGOTTEN, when)
    return {"ok": True, "epoch": state["epoch"]}


def set_voters(state: Json, command: Json) -> Json:
    """Names the voters that everyone goes by from now on; the engine has changed them already."""
    at_ms(command)
    given = command.get("voters")
    if not isinstance(given, list) or not 1 <= len(given) <= VOTERS_MAX:
        raise MalformedError(f"the voters must be a list of 1 to {VOTERS_MAX}")
    voters = [voter_record(value) for value in given]
    for column, what in enumerate(("nodes", "registry addresses", "raft addresses")):
        if len({voter[column] for voter in voters}) != len(voters):
            raise MalformedError(f"the voters must have different {what}")
    if state["voters"] != voters:
        state["voters"] = voters
        state["version"] += 1
    return {"ok": True}


def _move(state: Json, node_id: str, wanted: str, reason: str, when: int | None) -> None:
    node = state["nodes"][node_id]
    before = node["state"]
    if before != wanted:
        node["state"], node["since_ms"] = wanted, when or 0
        _changed(state, node_id, before, reason, when)


def _changed(state: Json, node_id: str, before: str, reason: str, when: int | None) -> None:
    """Note that a node is in another state or life than before."""
    node = state["nodes"][node_id]
    node["reason"] = "" if when is None else reason
    _remember(state, [node_id, node["incarnation"], before, node["state"], reason], when)


def _remove(state: Json, node_id: str, reason: str, when: int | None) -> None:
    node = state["nodes"].pop(node_id)
    _remember(state, [node_id, node["incarnation"], node["state"], "", reason], when)


def _remember(state: Json, transition: list[Any], when: int | None) -> None:
    """The membership has changed: a new epoch, and a line of history."""
    state["epoch"] += 1
    state["version"] += 1
    if when is not None:
        # A command of a version that knew no history leaves none: voters that read it from the log come to
        # the same state as those that got its outcome in a snapshot of that version.
        state["history"].append([when, state["epoch"], *transition])
        del state["history"][:-HISTORY_MAX]
