"""DCP's save plans, as the coordinator changes them: related tensors on one rank, a whole plan for every rank.

**Families.** DCP hands a tensor that several ranks hold alike (plain data parallelism) to the rank that has least to
write, tensor by tensor. The codec predicts a parameter from its moments, and can do so only where they are together. So
the coordinator deals such tensors out again: by families (a parameter and what its optimizer keeps of it), the largest
first, each to the holder that has least. The same state is dealt out in the same way at every step, so each rank finds
its previous save as the base.

**Whole plans.** With `enable_plan_caching=True` torch's planners send an empty plan with `usable=False` where a plan is
the same as at the last save. The rank then takes its last one from a cache of the planner's class. That cache has plans
as this package sent them, with items moved between ranks, while the coordinator compares plans from before the move. To
move only what has changed, and leave the rest to the caches, would lose items. So the coordinator keeps the plans as
the planner made them, and every rank is sent a whole one at every save.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ..errors import InvalidArgumentError

#: Optimizers' state dicts keep what belongs to a parameter below this key; flattened ones begin their keys with it.
_STATE = "state"


class SavableTensors(NamedTuple):
    """The whole tensors that a rank could save; sent in `SavePlan.storage_data`."""

    fqns: tuple[str, ...]


def savable_tensors(plan: SavePlan) -> SavableTensors:
    """The whole tensors of a rank's own plan, before the planner removes duplicates."""
    return SavableTensors(tuple(item.index.fqn for item in plan.items if item.type == WriteItemType.TENSOR))


def group_families(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks with each family on one of them.

    Unchanged if every family is on one rank already (`dedup_save_to_lowest_rank=True`, sharded states), or if a planner
    dropped the `storage_data` of the ranks.
    """
    holders = _holders(plans)
    found: dict[tuple[Hashable, frozenset[int]], dict[MetadataIndex, tuple[int, WriteItem]]] = {}
    loads = [0] * len(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            could = (
                holders.get(item.index.fqn, frozenset()) if item.type == WriteItemType.TENSOR else frozenset()
            )
            if len(could) > 1:
                key = _family(item.index.fqn, plan.planner_data), could
                found.setdefault(key, {})[item.index] = rank, item
            else:
                loads[rank] += _bytes(item)
    if all(len({rank for rank, _ in family.values()}) == 1 for family in found.values()):
        return list(plans)
    sizes = {key: sum(_bytes(item) for _, item in family.values()) for key, family in found.items()}
    given: list[list[WriteItem]] = [[] for _ in plans]
    # Sorting is stable: families of equal size keep the order of the first rank.
    for key in sorted(found, key=sizes.__getitem__, reverse=True):
        to = min(sorted(key[1]), key=loads.__getitem__)
        loads[to] += sizes[key]
        given[to] += [item for _, item in found[key].values()]
    moved = {index for family in found.values() for index in family}
    return [
        dataclasses.replace(
            plan, items=[item for item in plan.items if item.index not in moved] + given[rank]
        )
        for rank, plan in enumerate(plans)
    ]


def _holders(plans: Sequence[SavePlan]) -> dict[str, frozenset[int]]:
    """Name → ranks that could save it. Empty if some rank's `SavableTensors` are missing."""
    ranks: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        if not isinstance(plan.storage_data, SavableTensors):
            return {}
        for fqn in plan.storage_data.fqns:
            ranks.setdefault(fqn, []).append(rank)
    return {fqn: frozenset(those) for fqn, those in ranks.items()}


def _family(fqn: str, mapping: Any) -> Hashable:
    """Alike for a parameter `(..., name)` and its optimizer's `(..., "state", name, slot)`; else the tensor's own.

    Or `(..., "state.name.slot")`, of `flatten_optimizer_state_dict=True`; names may have dots, slots have none.
    """
    path = mapping.get(fqn) if isinstance(mapping, Mapping) else None
    if not path:
        return fqn
    if len(path) >= 3 and path[-3] == _STATE:
        # By number in optimizers' own state dicts: then the moments are together, the parameter may be elsewhere.
        return path[-2] if isinstance(path[-2], str) else tuple(path[:-1])
    if not isinstance(path[-1], str):
        return fqn
    state, _, rest = path[-1].partition(".")
    name = rest.rpartition(".")[0]
    return name if state == _STATE and name else path[-1]


def _bytes(item: WriteItem) -> int:
    """Size of an item; objects are small and count as 0."""
    return item.tensor_storage_size() or 0


#: Jobs of this process whose last plans are kept.
_JOBS_MAX = 16
_LACKING_SHOWN_MAX = 3
_lock = threading.Lock()
#: Job → its last plans as the planner made them, by rank; the job that was saved last comes last.
_last: OrderedDict[str, list[SavePlan]] = OrderedDict()


def complete_plans(job: str, plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Replace the plans marked "unchanged" by those of the last save. The coordinator calls this at every save.

    torch's cache does not tell jobs apart: the first save of a job may be marked "unchanged" because another job's
    plans were the same. A wrong guess is refused before anything is committed, since its plans then lack an item
    (`check_complete`).

    Raises:
        InvalidArgumentError: this process has not seen a plan that is to be used again.
    """
    with _lock:
        last = _last.get(job) or next(reversed(_last.values()), [])
        unchanged = [rank for rank, plan in enumerate(plans) if not getattr(plan, "usable", True)]
        if unchanged and len(last) != len(plans):
            raise InvalidArgumentError(
                f"the save planner says that the plan of rank {unchanged[0]} is that of its last save, which was none "
                "to FastCheck by this process: torch keeps plans by the planner's class, for all storages together. "
                "Make the planner without enable_plan_caching, or give FastCheck's a class of its own"
            )
        found = [last[rank] if rank in unchanged else plan for rank, plan in enumerate(plans)]
        _last[job] = found
        _last.move_to_end(job)
        while len(_last) > _JOBS_MAX:
            _last.popitem(last=False)
    return found


def check_complete(metadata: Metadata, written: Iterable[MetadataIndex]) -> None:
    """Refuse a step that lacks an item of its metadata.

    Raises:
        InvalidArgumentError: an item is missing; the message names it.
    """
    there: dict[str, set[tuple[int, ...] | None]] = {}
    for index in written:
        offset = None if index.offset is None else tuple(index.offset)
        there.setdefault(index.fqn, set()).add(offset)
    missing: list[str] = []
    for fqn, known in metadata.state_dict_metadata.items():
        boxes = there.get(fqn, set())
        if not isinstance(known, TensorStorageMetadata):
            missing += [] if boxes else [repr(fqn)]
        elif None not in boxes:  # a planner that names no offsets has whole tensors
            absent = [chunk for chunk in known.chunks if tuple(chunk.offsets) not in boxes]
            missing += [f"{fqn!r} at {tuple(chunk.offsets)}" for chunk in absent]
    if missing:
        shown = ", ".join(missing[:_LACKING_SHOWN_MAX])
        more = f" and {len(missing) - _LACKING_SHOWN_MAX} more" if len(missing) > _LACKING_SHOWN_MAX else ""
        raise InvalidArgumentError(
            f"what the save planner had the ranks write lacks {shown}{more}, which its metadata names: the plans must "
            "have every item of create_global_plan's metadata. If the planner caches plans, make it without "
            "enable_plan_caching"
        )
