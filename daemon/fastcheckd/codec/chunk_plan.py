"""What the trainer says about a chunk's bytes, checked and in the codec's own terms. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from fastcheck_proto.conventions import LAYOUT_SCHEMA
from fastcheck_proto.v1 import layout_pb2 as pb

from ..chunks import CHUNK_LENGTH_MAX
from ..errors import InvalidRequestError
from .dtypes import BY_NAME, DType


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
    return tuple(_chunk(chunk, steps, precision) for chunk in layout.chunks)


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


def _chunk(
    chunk: pb.ChunkLayout, steps: Sequence[pb.OptimizerStep], precision: pb.Precision | None
) -> ChunkPlan:
    if not 0 < chunk.bytes <= CHUNK_LENGTH_MAX:
        _fail(f"a chunk of {chunk.bytes} bytes is not from 1 byte to 16 MiB")
    units: dict[int, list[pb.Run]] = {}
    end = 0
    for index, run in enumerate(chunk.runs):
        dtype = BY_NAME.get(run.dtype)
        if dtype is None:
            _fail(f"dtype {run.dtype[:40]!r} is not known")
        if run.offset < end or run.offset % dtype.bytes:
            _fail("runs overlap, are out of order or not aligned")
        end = run.offset + run.elements * dtype.bytes
        if end > chunk.bytes:
            _fail("a run is longer than its chunk")
        if run.optimizer_step > len(steps):
            _fail("a run names an optimizer step that is not there")
        units.setdefault(run.unit or -index - 1, []).append(run)
    return ChunkPlan(chunk.bytes, tuple(_unit(runs, steps) for runs in units.values()), precision)


def _unit(runs: list[pb.Run], steps: Sequence[pb.OptimizerStep]) -> Unit:
    if len({run.elements for run in runs}) != 1:
        _fail("the runs of a unit differ in length")
    number = runs[0].optimizer_step
    return Unit(
        tuple(Run(r.offset, r.elements, BY_NAME[r.dtype], r.role, r.row_elements) for r in runs),
        steps[number - 1] if number else None,
    )


def _fail(why: str) -> NoReturn:
    raise InvalidRequestError(f"malformed state layout: {why}; report this defect of the SDK")
