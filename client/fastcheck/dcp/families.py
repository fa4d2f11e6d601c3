"""A parameter and what its optimizer keeps of it go to one rank, where several ranks could save them. Pure.

DCP hands a tensor that several ranks hold alike (plain data parallelism) to the one that has least to write: tensor by
tensor. The codec predicts a parameter from its moments and can do so only where they are together. So the coordinator
deals such tensors out once more: by families, the largest first, each to the holder that has least. The same state is
dealt out in the same way at every step, so each rank finds what it saved before as its base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

#: Optimizers' state dicts keep what belongs to a parameter below this key; flattened ones begin their keys with it.
_STATE = "state"


class Held(NamedTuple):
    """The whole tensors that a rank could save; travels in `SavePlan.storage_data`."""

    fqns: tuple[str, ...]


def held(plan: SavePlan) -> Held:
    """What a rank's own plan has, before others' is left out."""
    return Held(tuple(item.index.fqn for item in plan.items if item.type == WriteItemType.TENSOR))


def together(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks with each family on one of them.

    As they are if every family is on one rank already (`dedup_save_to_lowest_rank=True`, sharded states), or if a
    planner did not keep what the ranks said of themselves.
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
    # Sorting keeps the order of those alike: that in which the first rank has them.
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
    """Name → ranks that could save it. Of nothing, if some rank's word is missing."""
    ranks: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        if not isinstance(plan.storage_data, Held):
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
    """Objects are small, and nobody knows."""
    return item.tensor_storage_size() or 0
