"""DCP's metadata of a step: each rank's description of its state, and the `Metadata` and index made from these. Pure.

**Description.** JSON in the state's header, beside one tensor per item in the same order: the items, and how the state
dict was flattened. Reading it trusts nothing and runs nothing.

**Index.** `Metadata` as `create_default_global_save_plan` would have made it: ranks in order, each one's items in
order. An item that several ranks saved alike (without collectives nobody removes the others) is there once.

**Nesting.** The nested state dict behind DCP's flat names, for the layout alone: which tensors belong together. A hint:
a mistake costs bytes, never meaning (`state/tensor_groups.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fastcheck_proto.v1 import state_pb2 as pb

from ..errors import CorruptError, LoadFailedError, UnsupportedStateError
from ..state.header import entries
from ..state.tensors import DTYPES

SCHEMA = 1
#: torch's own limit on dimensions.
_DIMS_MAX = 64
_SIZE_MAX = 2**62

Kind = Literal["tensor", "shard", "bytes"]
_KINDS = ("tensor", "shard", "bytes")
Ints = tuple[int, ...]


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
    """Format a description.

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
    """Parse the description in a header.

    Raises:
        CorruptError: it is malformed, of another version, or contradicts itself.
    """
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("items"), list):
        raise _corrupt("it is not a description")
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
        raise _corrupt("its mapping is malformed")
    planner_data = {fqn: tuple(path) for fqn, path in mapping.items()}
    if not _is_mapping(planner_data):
        raise _corrupt("its mapping is malformed")
    return Description(items, planner_data)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(
        type(fqn) is str and type(path) is tuple and path and all(type(key) in (str, int) for key in path)
        for fqn, path in value.items()
    )


def _item(raw: object) -> Item:
    if not isinstance(raw, list) or len(raw) != len(Item._fields):
        raise _corrupt("an item is malformed")
    fqn, kind, offsets, sizes, size, dtype, requires_grad = raw
    named = isinstance(fqn, str) and isinstance(dtype, str) and isinstance(requires_grad, bool)
    if not named or kind not in _KINDS or not all(map(_are_sizes, (offsets, sizes, size))):
        raise _corrupt("an item has fields of wrong types")
    item = Item(fqn, kind, tuple(offsets), tuple(sizes), tuple(size), dtype, requires_grad)
    if not len(item.offsets) == len(item.sizes) == len(item.size):
        raise _corrupt(f"{fqn!r:.200} has different numbers of offsets and sizes")
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


class Stored(NamedTuple):
    """An item in a rank's state."""

    rank: int
    record: pb.TensorRecord


@dataclass
class StepIndex:
    """All items of a step."""

    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    #: By name and, for tensors, offsets of the box.
    stored: dict[tuple[str, Ints | None], Stored] = field(default_factory=dict)

    def find(self, index: MetadataIndex) -> Stored:
        """The place of an item; raises CorruptError if the metadata does not name it."""
        found = self.stored.get((index.fqn, None if index.offset is None else tuple(index.offset)))
        if found is None:
            raise CorruptError(
                f"the load planner asks for a part of {index.fqn!r} at {index.offset}, which was not saved as such"
            )
        return found


def index_of(headers: Mapping[int, pb.StateHeader], what: str) -> StepIndex:
    """The index of a step from its ranks' headers; `what` names it in errors.

    Raises:
        LoadFailedError: it was not saved by DCP.
        CorruptError: a header contradicts itself or another one.
    """
    made = StepIndex()
    planner_data: list[Any] = []
    for rank, header in sorted(headers.items()):
        root = entries(header.root.dict)
        if "dcp" not in root or "tensors" not in root:
            raise LoadFailedError(
                f"{what} was not saved by torch.distributed.checkpoint: load it with "
                "fastcheck.Checkpointer, as it was saved"
            )
        description = read_description(root["dcp"].string_value)
        for item, stored in zip(description.items, _stored(rank, header, root, description), strict=True):
            _add(made, item, stored)
        planner_data.append(description.planner_data)
    made.metadata.planner_data = _merged(planner_data)
    return made


def _stored(
    rank: int, header: pb.StateHeader, root: Mapping[Any, pb.StateValue], description: Description
) -> list[Stored]:
    values = [entry.value for entry in root["tensors"].dict.entries]
    if len(values) != len(description.items) or any(v.WhichOneof("kind") != "tensor" for v in values):
        raise CorruptError(f"rank {rank} describes {len(description.items)} items, but saved others")
    found = [Stored(rank, header.tensors[value.tensor]) for value in values]
    for item, stored in zip(description.items, found, strict=True):
        record = stored.record
        fits = (
            record.dtype == "uint8" and len(record.shape) == 1
            if item.kind == "bytes"
            else tuple(record.shape) == item.sizes
        )
        if not fits:
            raise CorruptError(
                f"rank {rank} saved {item.fqn!r:.200} with another shape or dtype than it describes"
            )
    return found


def _add(made: StepIndex, item: Item, stored: Stored) -> None:
    known = made.metadata.state_dict_metadata.get(item.fqn)
    if item.kind == "bytes":
        if known is not None and not isinstance(known, BytesStorageMetadata):
            raise _differs(item)
        made.metadata.state_dict_metadata[item.fqn] = BytesStorageMetadata()
        made.stored.setdefault((item.fqn, None), stored)
        return
    if known is None:
        dtype = DTYPES.get(item.dtype)
        if dtype is None:
            raise CorruptError(
                f"{item.fqn!r:.200} has dtype {item.dtype!r:.40}, which this torch ({torch.__version__}) does not have"
            )
        properties = TensorProperties(dtype=dtype, requires_grad=item.requires_grad)
        known = TensorStorageMetadata(properties, torch.Size(item.size), [])
        made.metadata.state_dict_metadata[item.fqn] = known
    if not isinstance(known, TensorStorageMetadata) or tuple(known.size) != item.size:
        raise _differs(item)
    key = item.fqn, item.offsets
    other = made.stored.get(key)
    if other is None or not other.record.bytes:  # an empty box may begin where another one does
        made.stored[key] = stored
    elif stored.record.bytes:
        if other.record.shape != stored.record.shape:
            raise _differs(item)
        return
    known.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))


def _differs(item: Item) -> CorruptError:
    return CorruptError(f"ranks saved {item.fqn!r:.200} with different kinds or sizes")


def _merged(planner_data: list[Any]) -> Any:
    """Merged as DefaultSavePlanner does: for a name that several ranks have, the first rank's entry counts."""
    if not planner_data or not all(isinstance(data, dict) for data in planner_data):
        return next((data for data in planner_data if data is not None), None)
    merged: dict[str, Any] = {}
    for data in reversed(planner_data):
        merged.update(data)
    return merged


def nested(
    flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], tensors: Mapping[str, Any]
) -> dict[Any, Any]:
    """The tree that was flattened to `flat`, with the very tensors of `tensors`, which this rank saves."""
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
