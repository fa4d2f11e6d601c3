"""What a rank's saved state says about itself: which items it has, and how the state dict was flattened. Pure.

JSON in the state's header, beside one tensor per item in the same order. Reading it trusts nothing and runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ..errors import CorruptError, UnsupportedStateError

SCHEMA = 1
#: torch's own limit on dimensions.
_DIMS_MAX = 64
_SIZE_MAX = 2**62

Kind = Literal["tensor", "shard", "bytes"]
_KINDS = ("tensor", "shard", "bytes")
Ints = tuple[int, ...]
#: A name in the flat state dict → keys and list indexes that it was made of.
Mapping = dict[str, tuple[str | int, ...]]


class Item(NamedTuple):
    """One of DCP's write items: a whole tensor, a box of one, or an object as bytes (then all but `fqn` is empty)."""

    fqn: str
    kind: Kind
    #: Of the box in the whole tensor, per dimension, in elements.
    offsets: Ints = ()
    sizes: Ints = ()
    #: Of the whole tensor.
    size: Ints = ()
    #: torch's name without "torch."; what the plan says, which the bytes may differ from.
    dtype: str = ""
    requires_grad: bool = False


class Description(NamedTuple):
    """Items in the order of the tensors, and the planner's data."""

    items: tuple[Item, ...]
    planner_data: Any = None


def write_description(items: Sequence[Item], planner_data: object) -> str:
    """The description as text.

    Raises:
        UnsupportedStateError: the planner's data is neither a flattening nor plain JSON.
    """
    flattening = _is_mapping(planner_data)
    made: dict[str, Any] = {"schema": SCHEMA, "items": items}
    made["mapping" if flattening else "planner_data"] = planner_data
    try:
        text = json.dumps(made, separators=(",", ":"), allow_nan=False)
        good = flattening or json.loads(text)["planner_data"] == planner_data
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise UnsupportedStateError(
            f"the save planner's planner_data (a {type(planner_data).__qualname__}) cannot be saved: it must be "
            "None, a dict from names to tuples of str and int as DefaultSavePlanner makes it, or dicts with str keys, "
            "lists, str, int, float, bool and None; nothing is pickled"
        )
    return text


def read_description(text: object) -> Description:
    """The description that a header holds.

    Raises:
        CorruptError: it is none, of another version, or contradicts itself.
    """
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("items"), list):
        raise _corrupt("it is no description")
    if found.get("schema") != SCHEMA:
        raise CorruptError(
            f"the checkpoint's DCP description has format version {found.get('schema')!r:.40}, this SDK reads "
            f"{SCHEMA}: load it with the FastCheck version that saved it"
        )
    items = tuple(_item(raw) for raw in found["items"])
    if "mapping" not in found:
        return Description(items, found.get("planner_data"))
    mapping = found["mapping"]
    if not isinstance(mapping, dict) or not all(isinstance(path, list) for path in mapping.values()):
        raise _corrupt("its mapping is none")
    planner_data = {fqn: tuple(path) for fqn, path in mapping.items()}
    if not _is_mapping(planner_data):
        raise _corrupt("its mapping is none")
    return Description(items, planner_data)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(
        type(fqn) is str and type(path) is tuple and path and all(type(key) in (str, int) for key in path)
        for fqn, path in value.items()
    )


def _item(raw: object) -> Item:
    if not isinstance(raw, list) or len(raw) != len(Item._fields):
        raise _corrupt("an item is none")
    fqn, kind, offsets, sizes, size, dtype, requires_grad = raw
    named = isinstance(fqn, str) and isinstance(dtype, str) and isinstance(requires_grad, bool)
    if not named or kind not in _KINDS or not all(map(_are_sizes, (offsets, sizes, size))):
        raise _corrupt("an item has fields of wrong types")
    item = Item(fqn, kind, tuple(offsets), tuple(sizes), tuple(size), dtype, requires_grad)
    if not len(item.offsets) == len(item.sizes) == len(item.size):
        raise _corrupt(f"{fqn!r:.200} has as many offsets as sizes nowhere")
    if any(o + n > whole for o, n, whole in zip(item.offsets, item.sizes, item.size, strict=True)):
        raise _corrupt(f"{fqn!r:.200} has a box outside of its tensor")
    return item


def _are_sizes(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _DIMS_MAX
        and all(type(n) is int and 0 <= n <= _SIZE_MAX for n in value)
    )


def _corrupt(why: str) -> CorruptError:
    return CorruptError(f"the checkpoint's DCP description is damaged: {why}; ask for another step")
