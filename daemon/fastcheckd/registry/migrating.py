"""Snapshots of earlier schemas, brought up to the present one. Pure.

Only snapshots need it: the log's earlier commands lack `labels`, `reason` and `at_ms`, and mean what they
always meant without them.
"""

from __future__ import annotations

from .records import Json


def migrate(state: Json) -> Json:
    """The state in schema 3, or as it is if it is in a later one: beyond 3 a schema is agreed on by a command.

    Raises:
        KeyError, TypeError, AttributeError: it is no state of the schema that it claims to be.
    """
    if state["schema"] == 1:
        nodes = {
            node_id: node
            | {"labels": {}, "draining": node["state"] == "DRAINING", "reason": "", "since_ms": 0}
            for node_id, node in state["nodes"].items()
        }
        _add(state, {"schema": 2, "nodes": nodes, "history": [], "voters": None})
    if state["schema"] == 2:
        _add(state, {"schema": 3, "denied": []})
    return state


def _add(state: Json, more: Json) -> None:
    # `seen` last, as in a new state: order is part of it.
    seen = state.pop("seen")
    state |= more
    state["seen"] = seen
