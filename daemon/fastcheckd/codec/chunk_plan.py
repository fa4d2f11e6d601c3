"""What the trainer says about a chunk's bytes, checked and in the codec's own terms. Pure.

A training loop seals the same chunks every time, and checking ten thousand runs takes longer than copying them: what
was found of a chunk is kept by the chunk's very bytes. Its optimizer steps are new each time and are put in anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from fastcheck_proto.conventions import LAYOUT_SCHEMA
from fastcheck_proto.v1 import layout_pb2 as pb

from ..chunks import CHUNK_LENGTH_MAX
from ..errors import InvalidRequestError
from .dtypes import BY_NAME, DType

#: Runs and chunks that are kept for all ranks of a node together: some tens of MB.
#: A state with more of them is checked anew each time.
KNOWN_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive numbers of one dtype; offset in the chunk, in bytes."""

    offset: int
    elements: int
    dtype: DType
    role: pb.Role.ValueType
    row_elements: int = 0

    @property
    def stop(self) -> int:
        """First byte behind it."""
        return self.offset + self.elements * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """Runs about the same elements (one or more, by offset), and the optimizer step that made them, if known."""

    runs: tuple[Run, ...]
    step: pb.OptimizerStep | None = None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: its size, its units in order of their first run, and what may be lost."""

    bytes: int
    units: tuple[Unit, ...] = ()
    precision: pb.Precision | None = None


def opaque(size: int) -> ChunkPlan:
    """A chunk of bytes without meaning."""
    return ChunkPlan(size)


def parse_layout(layout: pb.StateLayout, state_bytes: int) -> tuple[ChunkPlan, ...]:
    """Check a layout against the size of its state; of an unknown schema, no plan at all (an empty tuple).

    Raises:
        InvalidRequestError: it does not describe a state of `state_bytes` bytes.
    """
    if layout.schema != LAYOUT_SCHEMA:
        return ()
    if sum(chunk.bytes for chunk in layout.chunks) != state_bytes:
        _fail(f"its chunks are not the state's {state_bytes} bytes together")
    precision = layout.precision if layout.HasField("precision") else None
    if precision is not None and not 0 <= precision.weights_bound <= 1:
        _fail("weights_bound is not from 0 to 1")
    steps = layout.optimizer_steps
    return tuple(_plan(_known.chunk(chunk), steps, precision) for chunk in layout.chunks)


def layout_of(plan: ChunkPlan) -> tuple[pb.StateLayout, list[pb.OptimizerStep]]:
    """The layout that `parse_layout` makes this plan of, and the plan's steps in the order of that layout."""
    layout = pb.StateLayout(schema=LAYOUT_SCHEMA)
    if plan.precision is not None:
        layout.precision.CopyFrom(plan.precision)
    chunk = layout.chunks.add(bytes=plan.bytes)
    numbers: dict[int, int] = {}
    steps = []
    numbered = [(run, number, unit) for number, unit in enumerate(plan.units, 1) for run in unit.runs]
    for run, number, unit in sorted(numbered, key=lambda entry: entry[0].offset):
        if unit.step is not None and id(unit.step) not in numbers:
            steps.append(unit.step)
            numbers[id(unit.step)] = len(steps)
        chunk.runs.add(
            offset=run.offset,
            elements=run.elements,
            dtype=run.dtype.torch_name,
            role=run.role,
            unit=number,
            optimizer_step=0 if unit.step is None else numbers[id(unit.step)],
            row_elements=run.row_elements,
        )
    layout.optimizer_steps.extend(steps)
    return layout, steps


class _Chunk(NamedTuple):
    """A checked chunk. Its units are runs and the number of their step; the largest such number is `steps`."""

    bytes: int
    units: tuple[tuple[tuple[Run, ...], int], ...]
    steps: int
    #: Its plan as long as nothing may be lost; None: it depends on the steps.
    plain: ChunkPlan | None


def _plan(chunk: _Chunk, steps: Sequence[pb.OptimizerStep], precision: pb.Precision | None) -> ChunkPlan:
    if chunk.steps > len(steps):
        _fail("a run names an optimizer step that is not there")
    if precision is None and chunk.plain is not None:
        return chunk.plain
    units = tuple(Unit(runs, steps[number - 1] if number else None) for runs, number in chunk.units)
    return ChunkPlan(chunk.bytes, units, precision)


def _check(chunk: pb.ChunkLayout) -> _Chunk:
    if not 0 < chunk.bytes <= CHUNK_LENGTH_MAX:
        _fail(f"a chunk of {chunk.bytes} bytes is not from 1 byte to 16 MiB")
    found: dict[int, list[pb.Run]] = {}
    end = steps = 0
    for index, run in enumerate(chunk.runs):
        dtype = BY_NAME.get(run.dtype)
        if dtype is None:
            _fail(f"dtype {run.dtype[:40]!r} is not known")
        if run.offset < end or run.offset % dtype.bytes:
            _fail("runs overlap, are out of order or not aligned")
        end = run.offset + run.elements * dtype.bytes
        if end > chunk.bytes:
            _fail("a run is longer than its chunk")
        steps = max(steps, run.optimizer_step)
        found.setdefault(run.unit or -index - 1, []).append(run)
    units = tuple(_unit(runs) for runs in found.values())
    plain = None if steps else ChunkPlan(chunk.bytes, tuple(Unit(runs) for runs, _ in units))
    return _Chunk(chunk.bytes, units, steps, plain)


def _unit(runs: list[pb.Run]) -> tuple[tuple[Run, ...], int]:
    if len({run.elements for run in runs}) != 1:
        _fail("the runs of a unit differ in length")
    checked = tuple(Run(r.offset, r.elements, BY_NAME[r.dtype], r.role, r.row_elements) for r in runs)
    return checked, runs[0].optimizer_step


class _Known:
    """Checked chunks by their serialised bytes, those used last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._size = 0

    def chunk(self, chunk: pb.ChunkLayout) -> _Chunk:
        """The chunk, checked now or when it was first seen; bad ones are never kept."""
        key = chunk.SerializeToString()
        with self._lock:
            known = self._chunks.get(key)
            if known is not None:
                self._chunks.move_to_end(key)
                return known
        found = _check(chunk)
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = found
                self._size += 1 + len(chunk.runs)
            while self._size > KNOWN_MAX:
                _, old = self._chunks.popitem(last=False)
                self._size -= 1 + sum(len(runs) for runs, _ in old.units)
        return found


_known = _Known()


def _fail(why: str) -> NoReturn:
    raise InvalidRequestError(f"malformed state layout: {why}; report this defect of the SDK")
