"""The nested state dict behind DCP's flat names, for the layout's sake alone: which tensors belong together. Pure.

A hint: whatever is wrong here costs bytes, never meaning (`state/roles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nested(
    flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], tensors: Mapping[str, Any]
) -> dict[Any, Any]:
    """The tree that was flattened to `flat`; what this rank saves is taken from `tensors`, the very objects."""
    root: dict[Any, Any] = {}
    for fqn, path in paths.items():
        if fqn not in flat and fqn not in tensors:
            continue
        at = root
        for key in path[:-1]:
            below = at.setdefault(key, {})
            if not isinstance(below, dict):
                break
            at = below
        else:
            at[path[-1]] = tensors.get(fqn, flat.get(fqn))
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Lists where keys count from 0; indexes of an optimizer's state are numbers again, as in `params`."""
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(item) for key, item in value.items()}
    if made and list(made) == list(range(len(made))):
        return list(made.values())
    state = made.get("state")
    if "param_groups" in made and isinstance(state, dict) and all(map(_is_index, state)):
        made["state"] = {int(key): item for key, item in state.items()}
    return made


def _is_index(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
