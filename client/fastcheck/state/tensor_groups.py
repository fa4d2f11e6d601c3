"""Which tensors of a state belong together, and the role of each. A hint: a mistake costs bytes, never meaning.

A parameter is known by identity (optimizer objects), by name, or by its place in the order of a sibling's
tensors. Where the order leaves a choice, moments are grouped with one another and without a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fastcheck_proto.v1 import layout_pb2 as pb

from .collect import Collected
from .header import Path
from .layout import Extent, Group, Member
from .optimizer_steps import step_classes
from .optimizers import OptimizerSource, Parameter, ParameterGroup
from .sharding import local_of

ROLES: dict[str, pb.Role.ValueType] = {
    "exp_avg": pb.ROLE_EXP_AVG,
    "exp_avg_sq": pb.ROLE_EXP_AVG_SQ,
    "max_exp_avg_sq": pb.ROLE_MAX_EXP_AVG_SQ,
    "momentum_buffer": pb.ROLE_MOMENTUM,
}
_LOW = frozenset({"bfloat16", "float16"})
#: Elements whose rounding is looked at before a pair of master and copy is believed.
_SAMPLE = 64
#: In a plain dict, buffers of torch's own modules are known by their names alone.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

#: Slots of a container's tensors by key, in order, each once; buffers are left out.
Table = dict[Any, int]


def find_groups(found: Collected, sources: Sequence[OptimizerSource]) -> list[Group]:
    """Groups of slots for a layout; `optimizer_step` counts through the sources' step classes, from 1."""
    tables = _tables(found, sources)
    taken = {p.slot for s in sources for g in s.groups for p in g.parameters if p.slot is not None}
    for source in sources:
        if source.optimizer is None:
            taken |= _match_parameters(found, source, tables, taken)
    copies = _pair_copies(found, sources, tables, taken)
    used: set[int] = set()
    groups = []
    base = 1
    for source in sources:
        for group, classes in zip(source.groups, step_classes(source), strict=True):
            for parameter, number in zip(group.parameters, classes, strict=True):
                members = _members(found.extents, parameter, copies, used)
                used.update(member.slot for member in members)
                if members:
                    groups.append(Group(tuple(members), base + number))
            base += len(set(classes))
    return groups


def _members(
    extents: Sequence[Extent], parameter: Parameter, copies: dict[int, int], used: set[int]
) -> list[Member]:
    """The parameter's group: its copies and moments that have as many numbers as itself."""
    members: list[Member] = []
    if parameter.slot is not None and parameter.slot not in used:
        members.append(Member(parameter.slot, pb.ROLE_PARAM))
        copy = copies.get(parameter.slot)
        if copy is not None and copy not in used:
            members.append(Member(copy, pb.ROLE_LOW_PRECISION_PARAM))
    states = {
        name: slot
        for name, slot in parameter.state.items()
        if slot not in used and slot not in (m.slot for m in members)
    }
    elements = parameter.elements
    if parameter.slot is not None:
        elements = extents[parameter.slot].elements
    elif elements is None:
        elements = max((extents[slot].elements for slot in states.values()), default=0)
    master = next((n for n, s in states.items() if "master" in n and extents[s].dtype == "float32"), None)
    if members and master is not None and extents[members[0].slot].dtype in _LOW:
        members = [
            Member(states.pop(master), pb.ROLE_PARAM),
            Member(members[0].slot, pb.ROLE_LOW_PRECISION_PARAM),
        ]
    order = {name: rank for rank, name in enumerate(ROLES)}
    for name in sorted(states, key=lambda name: order.get(name, len(order))):
        members.append(Member(states[name], ROLES.get(name, pb.ROLE_UNSPECIFIED)))
    fitting: dict[int, Member] = {}
    for member in members:
        if extents[member.slot].elements == elements:
            fitting.setdefault(member.slot, member)
    # One complex number is two to the codec: all of a group are complex, or none is.
    first = next(iter(fitting), None)
    return [m for s, m in fitting.items() if first is None or _wide(extents[s]) == _wide(extents[first])]


def _wide(extent: Extent) -> int:
    return extent.numbers[1]


def _tables(found: Collected, sources: Iterable[OptimizerSource]) -> dict[Path, Table]:
    """Every container with tensors in it, optimizers' state left out."""
    inside = [source.path for source in sources]
    tables: dict[Path, Table] = {}
    for path, value in found.containers:
        if any(path[: len(above)] == above for above in inside):
            continue
        buffers: set[str] = set()
        owner = found.objects.get(path)
        if isinstance(owner, torch.nn.Module):
            buffers = {name for name, _ in owner.named_buffers(remove_duplicate=False)}
        table: Table = {}
        seen: set[int] = set()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            slot = found.by_id.get(id(item)) if isinstance(item, torch.Tensor) else None
            if slot is None or slot in seen or key in buffers:
                continue
            if isinstance(key, str) and key.rpartition(".")[2] in _BUFFERS:
                continue
            if local_of(item).dtype.is_floating_point or local_of(item).dtype.is_complex:
                seen.add(slot)
                table[key] = slot
        if table:
            tables[path] = table
    return tables


def _match_parameters(
    found: Collected, source: OptimizerSource, tables: dict[Path, Table], taken: set[int]
) -> set[int]:
    """Give the parameters of a state dict their slots: by name, else by order and shape."""
    siblings = [path for path in tables if path[:-1] == source.path[:-1]]
    paths = siblings + [path for path in tables if path not in siblings]
    if source.named:
        # Not always all of them: with DCP a rank may save a part of what its optimizer has.
        parameters = [p for group in source.groups for p in group.parameters]
        table = max(
            (tables[path] for path in paths), key=lambda t: sum(p.key in t for p in parameters), default={}
        )
        for parameter in parameters:
            slot = table.get(parameter.key)
            if slot is not None and slot not in taken:
                parameter.slot = slot
        return _slots(source)
    # Of two siblings alike, the one with the moments' own dtype is what the optimizer updates.
    best: tuple[int, int, list[tuple[Parameter, int]]] = 0, 0, []
    for path in siblings:
        pairs: list[tuple[Parameter, int]] = []
        free = [slot for slot in tables[path].values() if slot not in taken]
        for group in source.groups:
            matched = in_order(_shapes(found, group), [found.extents[slot].shape for slot in free])
            if matched is not None:
                slots = [free[index] for index in matched]
                pairs += zip(group.parameters, slots, strict=True)
                free = [slot for slot in free if slot not in slots]
        alike = sum(
            found.extents[slot].dtype == found.extents[moment].dtype
            for parameter, slot in pairs
            for moment in list(parameter.state.values())[:1]
        )
        best = max(best, (len(pairs), alike, pairs), key=lambda b: b[:2])
    for parameter, slot in best[2]:
        parameter.slot = slot
    return _slots(source)


def _slots(source: OptimizerSource) -> set[int]:
    return {p.slot for group in source.groups for p in group.parameters if p.slot is not None}


def _shapes(found: Collected, group: ParameterGroup) -> list[tuple[int, ...] | None]:
    """The shape of each parameter as its moments show it; None where there are none."""
    return [
        max((found.extents[s].shape for s in p.state.values()), key=_count, default=None)
        for p in group.parameters
    ]


def _count(shape: tuple[int, ...]) -> int:
    return Extent("uint8", shape, True).elements


def in_order(wanted: Sequence[tuple[int, ...] | None], have: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Indexes into `have` of the wanted shapes, in order; None unless there is exactly one way.

    A shape of None matches any.
    """
    first = _earliest(wanted, have)
    last = _earliest(wanted[::-1], have[::-1])
    if first is None or last is None or first != [len(have) - 1 - i for i in reversed(last)]:
        return None
    return first


def _earliest(wanted: Sequence[tuple[int, ...] | None], have: Sequence[tuple[int, ...]]) -> list[int] | None:
    chosen = []
    start = 0
    for shape in wanted:
        while start < len(have) and shape is not None and have[start] != shape:
            start += 1
        if start == len(have):
            return None
        chosen.append(start)
        start += 1
    return chosen


def _pair_copies(
    found: Collected, sources: Sequence[OptimizerSource], tables: dict[Path, Table], taken: set[int]
) -> dict[int, int]:
    """bf16 or fp16 copies of fp32 masters: by order and shape, and where it costs no wait also by value."""
    pairs: dict[int, int] = {}
    for table in tables.values():
        low = [s for s in table.values() if found.extents[s].dtype in _LOW and s not in taken]
        for group in (group for source in sources for group in source.groups):
            masters = [
                p.slot
                for p in group.parameters
                if p.slot is not None and found.extents[p.slot].dtype == "float32" and p.slot not in pairs
            ]
            if not low or not masters:
                continue
            matched = in_order(
                [found.extents[s].shape for s in masters], [found.extents[s].shape for s in low]
            )
            for master, index in zip(masters, matched or (), strict=False):
                if _may_be_rounded(found.tensors[master], found.tensors[low[index]]):
                    pairs[master] = low[index]
            low = [s for s in low if s not in pairs.values()]
    return pairs


def _may_be_rounded(master: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a sample of the copy is the rounded master; on other devices than the CPU nobody looks."""
    if master.device.type != "cpu" or copy.device.type != "cpu":
        return True
    if not master.numel():
        return False
    # Rows are views even of tensors that are not contiguous.
    while master.dim() > 1:
        master, copy = master[0], copy[0]
    master, copy = master.reshape(-1)[:_SAMPLE], copy.reshape(-1)[:_SAMPLE]
    return torch.equal(master.to(copy.dtype), copy)
