"""DCP's `Metadata` of a step, made from what each rank's state says about itself, and where each item lies.

As `create_default_global_save_plan` would have made it: ranks in order, each one's items in order. What several ranks
saved alike (without collectives nobody sorts that out) is there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

from ..errors import CorruptError, LoadFailedError
from ..state.dtypes import BY_NAME
from ..state.header import entries
from .description import Description, Ints, Item, read_description


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
        """Where an item that the metadata names lies; raises CorruptError if it names another."""
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
        raise CorruptError(f"rank {rank} says that it saved {len(description.items)} items, and saved others")
    found = [Stored(rank, header.tensors[value.tensor]) for value in values]
    for item, stored in zip(description.items, found, strict=True):
        record = stored.record
        fits = (
            record.dtype == "uint8" and len(record.shape) == 1
            if item.kind == "bytes"
            else tuple(record.shape) == item.sizes
        )
        if not fits:
            raise CorruptError(f"rank {rank} saved something else as {item.fqn!r:.200} than it says")
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
        dtype = BY_NAME.get(item.dtype)
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
    """As DefaultSavePlanner merges it: of a name that several ranks have, the first one's."""
    if not planner_data or not all(isinstance(data, dict) for data in planner_data):
        return next((data for data in planner_data if data is not None), None)
    merged: dict[str, Any] = {}
    for data in reversed(planner_data):
        merged.update(data)
    return merged
