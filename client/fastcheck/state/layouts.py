"""Layouts that are kept from one save to the next: a training loop saves the same structure every time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastcheck_proto.conventions import LAYOUT_BYTES_MAX
from fastcheck_proto.v1 import layout_pb2 as pb

from .collect import Collected, Structure, collect
from .layout import Arrangement, Extent, Group, arrange
from .paths import Path
from .retrace import retrace
from .roles import find_groups
from .sources import Source, read_sources
from .steps import StepRecorder, optimizer_steps, step_classes

logger = logging.getLogger("fastcheck")

#: A state before and after an optimizer's first step, and a few that take turns.
KEPT_MAX = 4


class Layouts:
    """Layouts of one trainer's states by their structure, and the hooks on its optimizers.

    Args:
        precision: What the trainer allows to be lost; None: nothing.
    """

    def __init__(self, precision: pb.Precision | None = None) -> None:
        self.precision = precision
        self._known: OrderedDict[Hashable, Arrangement] = OrderedDict()
        self._last: Collected | None = None
        self._recorder = StepRecorder()
        self._complained = False

    def collect(self, state: object) -> Collected:
        """Walk a state, along the last one as far as it is like it. What the walk finds is good until the next one.

        Raises:
            UnsupportedStateError: something in it cannot be saved; the message names its path.
        """
        last, self._last = self._last, None
        found = retrace(last, state) if last is not None else None
        return collect(state) if found is None else found

    def keep(self, found: Collected) -> None:
        """The state is laid out: the next one may be like it. Nothing of the caller's is kept alive."""
        found.forget_tensors()
        self._last = found

    def arrange(
        self, found: Collected, without: Collection[int] = (), like: dict[Any, Any] | None = None
    ) -> Arrangement:
        """The state's arrangement, with its optimizers' latest steps and without the header's chunks.

        It belongs to this object and is good until the next call for the same slots. Slots in `without` are left out.
        `like`: the same tensors in dicts and lists that show what belongs together, where the state itself does not.
        """
        try:
            if like is not None:
                found = replace(found, containers=list(containers_of(like)), objects={})
            return self._arrange(found, read_sources(found), frozenset(without))
        except Exception:
            # Roles are a hint: not understanding a state must not keep it from being saved.
            if not self._complained:
                logger.exception("defect in FastCheck: saving goes on, but with larger transfers")
                self._complained = True
            return self._arrange(found, [], frozenset(without))

    def _arrange(self, found: Collected, sources: list[Source], without: frozenset[int]) -> Arrangement:
        key = (_structure(found, sources), without)
        known = self._known.get(key)
        if known is None:
            known = arrange(*_left(found.extents, find_groups(found, sources), without))
            if self.precision is not None:
                known.layout.precision.CopyFrom(self.precision)
            if known.layout.ByteSize() > LAYOUT_BYTES_MAX:
                for chunk in known.layout.chunks:
                    chunk.ClearField("runs")
            self._known[key] = known
            while len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        del known.layout.chunks[known.chunks :]
        del known.layout.optimizer_steps[:]
        for source in sources:
            known.layout.optimizer_steps.extend(optimizer_steps(source, self._recorder))
        return known

    def watch(self, state: object) -> None:
        """Put hooks on the optimizers in a state that will be saved later, so that its first save knows its step."""
        todo, seen = [state], set[int]()
        while todo:
            item = todo.pop()
            if isinstance(item, torch.optim.Optimizer):
                self._recorder.watch(item)
            elif isinstance(item, dict | list | tuple) and id(item) not in seen:
                seen.add(id(item))
                todo.extend(item.values() if isinstance(item, dict) else item)

    def close(self) -> None:
        """Take the hooks off and forget everything."""
        self._recorder.close()
        self._known.clear()
        self._last = None


def containers_of(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All dicts and lists of a tree by their paths, as `Collected.containers` has them."""
    if isinstance(tree, dict | list):
        yield path, tree
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from containers_of(item, (*path, key))


def _left(
    extents: Sequence[Extent], groups: Sequence[Group], without: frozenset[int]
) -> tuple[Sequence[Extent], Sequence[Group]]:
    """What is to be laid out without some slots: nothing has bytes there, and no group has such a member."""
    if not without:
        return extents, groups
    kept = [Extent(e.dtype, (0,), True) if slot in without else e for slot, e in enumerate(extents)]
    return kept, [g for g in groups if not any(member.slot in without for member in g.members)]


def _structure(found: Collected, sources: list[Source]) -> Hashable:
    """Equal for states that are laid out alike."""
    if found.structure is None:
        found.structure = Structure((tuple(found.names), tuple(found.record_slots), tuple(found.extents)))
    return (
        found.structure,
        tuple(
            (
                source.path,
                source.optimizer is None,
                tuple(tuple((p.key, p.slot, p.elements) for p in g.parameters) for g in source.groups),
                tuple(tuple(classes) for classes in step_classes(source)),
            )
            for source in sources
        ),
    )
