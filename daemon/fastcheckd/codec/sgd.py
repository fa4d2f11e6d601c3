"""SGD with momentum: w predicted from the base and from the momentum. Pure.

w1 = w0 - lr * b1 for a momentum buffer b1; with Nesterov's the gradient is recovered from b0 and b1 first. torch
multiplies and adds in one rounding, so this is done in double precision and rounded once at the end:
plain IEEE operations that give the same bits on every CPU.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcheck_proto.v1 import layout_pb2 as pb

from ..errors import CodecError
from .adam import apply_residual, check_runs, residual, settled
from .chunk_plan import Run, Unit
from .dtypes import DType
from .format import REVERSED, CodecId, Section
from .integers import Ints, signed
from .planes import PlaneMerger, PlaneSplitter
from .runs import add_difference, difference
from .scratch import BLOCK, SCRATCH

F32: TypeAlias = NDArray[np.float32]
_EXTRA = struct.Struct("<I4xddd")


@dataclass(frozen=True, slots=True)
class SgdConstants:
    """w1 = w0 - (direct * b1 + from_b0 * b0), all in double precision."""

    direct: float
    from_b0: float

    @classmethod
    def of(cls, step: pb.OptimizerStep, lr: float | None = None) -> SgdConstants | None:
        """None when the hyper-parameters make no sense."""
        rate = step.lr if lr is None else lr
        direct, from_b0 = rate, 0.0
        if step.nesterov:
            # The update is g + momentum * b1 with g = (b1 - momentum * b0) / (1 - dampening).
            keep = 1 - step.dampening
            if keep == 0:
                return None
            direct = rate * (1 / keep + step.momentum)
            from_b0 = -rate * step.momentum / keep
        if not all(math.isfinite(v) for v in (direct, from_b0)):
            return None
        return cls(direct, from_b0)


@dataclass(frozen=True, slots=True)
class SgdRuns:
    """The runs of an SGD unit, both float32."""

    w: Run
    b: Run

    @classmethod
    def of(cls, unit: Unit) -> SgdRuns | None:
        """None if the unit is no such thing."""
        role = {run.role: run for run in unit.runs if run.dtype == DType.FLOAT32}
        if unit.step is None or unit.step.kind != pb.OPTIMIZER_KIND_SGD:
            return None
        if pb.ROLE_PARAM not in role or pb.ROLE_MOMENTUM not in role:
            return None
        return cls(role[pb.ROLE_PARAM], role[pb.ROLE_MOMENTUM])


class _Block:
    def __init__(self, constants: SgdConstants, size: int) -> None:
        self._c = constants
        self._x = SCRATCH.array("sgd.x", size, np.float64)
        self._y = SCRATCH.array("sgd.y", size, np.float64)
        self._out: F32 = SCRATCH.array("sgd.out", size, np.float32)

    def _update(self, b0: F32, b1: F32) -> Any:
        np.multiply(b1, np.float64(self._c.direct), out=self._x, dtype=np.float64)
        if self._c.from_b0:
            np.multiply(b0, np.float64(self._c.from_b0), out=self._y, dtype=np.float64)
            np.add(self._x, self._y, out=self._x)
        return self._x

    def next_w(self, w0: F32, b0: F32, b1: F32) -> Ints:
        """w1 as predicted."""
        np.subtract(w0, self._update(b0, b1), out=self._x)
        self._out[...] = self._x
        return settled(self._out)

    def previous_w(self, w1: F32, b0: F32, b1: F32) -> Ints:
        """w0 as predicted."""
        np.add(w1, self._update(b0, b1), out=self._x)
        self._out[...] = self._x
        return settled(self._out)


def encode_sgd(runs: SgdRuns, constants: SgdConstants, new: Any, base: Any) -> Section:
    """Section of the whole unit."""
    n = runs.w.elements
    w1, b1, w0, b0 = (
        signed(chunk, DType.FLOAT32, run.offset, n) for chunk in (new, base) for run in (runs.w, runs.b)
    )
    w_planes = PlaneSplitter(SCRATCH.take(4 * n), n, 4)
    b_planes = PlaneSplitter(SCRATCH.take(4 * n), n, 4)
    for start in range(0, n, BLOCK):
        s = slice(start, min(start + BLOCK, n))
        values = SCRATCH.array("values", s.stop - start, np.int32)
        difference(DType.FLOAT32, b1[s], b0[s], values)
        b_planes.add(start, values)
        block = _Block(constants, s.stop - start)
        residual(w1[s], block.next_w(_f(w0[s]), _f(b0[s]), _f(b1[s])), values)
        w_planes.add(start, values)
    extra = _EXTRA.pack(runs.b.offset, constants.direct, constants.from_b0, 0.0)
    planes = w_planes.planes() + b_planes.planes()
    return Section(CodecId.SGD, DType.FLOAT32, runs.w.offset, n, 0, extra, planes)


def decode_sgd(section: Section, base: Any, out: Any) -> None:
    """Write both runs into the chunk `out`; `base` is the chunk that it starts from, older or newer."""
    (w_run, b_run), constants = parse_extra(section, len(out))
    n = section.elements
    w_out, b_out, w_in, b_in = (
        signed(chunk, DType.FLOAT32, run.offset, n) for chunk in (out, base) for run in (w_run, b_run)
    )
    w_planes = PlaneMerger(section.planes[:4], n, 4)
    b_planes = PlaneMerger(section.planes[4:], n, 4)
    back = section.flags & REVERSED
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        s = slice(start, stop)
        values = SCRATCH.array("values", stop - start, np.int32)
        b_planes.block(start, stop, values)
        add_difference(DType.FLOAT32, values, b_in[s], b_out[s], back)
        block = _Block(constants, stop - start)
        if back:
            predicted = block.previous_w(_f(w_in[s]), _f(b_out[s]), _f(b_in[s]))
        else:
            predicted = block.next_w(_f(w_in[s]), _f(b_in[s]), _f(b_out[s]))
        w_planes.block(start, stop, values)
        apply_residual(values, predicted, w_out[s])


def reverse_sgd(section: Section, base: Any, new: Any) -> Section:
    """The section that leads from `new` back to `base`."""
    (w_run, b_run), constants = parse_extra(section, len(new))
    if section.flags & REVERSED:
        return encode_sgd(SgdRuns(w_run, b_run), constants, base, new)
    n = section.elements
    w1, b1, w0, b0 = (
        signed(chunk, DType.FLOAT32, run.offset, n) for chunk in (new, base) for run in (w_run, b_run)
    )
    w_planes = PlaneSplitter(SCRATCH.take(4 * n), n, 4)
    for start in range(0, n, BLOCK):
        s = slice(start, min(start + BLOCK, n))
        values = SCRATCH.array("values", s.stop - start, np.int32)
        block = _Block(constants, s.stop - start)
        residual(w0[s], block.previous_w(_f(w1[s]), _f(b0[s]), _f(b1[s])), values)
        w_planes.add(start, values)
    planes = w_planes.planes() + section.planes[4:]
    return Section(
        CodecId.SGD, DType.FLOAT32, w_run.offset, n, section.flags ^ REVERSED, section.extra, planes
    )


def sample_cost(runs: SgdRuns, constants: SgdConstants, new: Any, base: Any, elements: int) -> float:
    """Mean bits of w's residual on a stretch from the middle."""
    n = runs.w.elements
    start = max(0, n // 2 - elements // 2)
    s = slice(start, min(n, start + elements))
    w1, b1, w0, b0 = (
        signed(chunk, DType.FLOAT32, run.offset, n)[s] for chunk in (new, base) for run in (runs.w, runs.b)
    )
    values = SCRATCH.array("values", s.stop - start, np.int32)
    residual(w1, _Block(constants, s.stop - start).next_w(_f(w0), _f(b0), _f(b1)), values)
    return float(np.log2(values.view(np.uint32) + np.float64(1)).mean())


def parse_extra(section: Section, chunk_bytes: int) -> tuple[tuple[Run, Run], SgdConstants]:
    """Runs (w, momentum) and constants.

    Raises:
        CodecError: they are not within the chunk, overlap, or the planes are not as many.
    """
    if len(section.extra) != _EXTRA.size or section.dtype != DType.FLOAT32:
        raise CodecError("an encoded chunk is malformed: an sgd section without its numbers")
    b, direct, from_b0, _ = _EXTRA.unpack(section.extra)
    check_runs(section, [section.offset, b], chunk_bytes)
    w_run, b_run = (
        Run(offset, section.elements, DType.FLOAT32, pb.ROLE_UNSPECIFIED) for offset in (section.offset, b)
    )
    return (w_run, b_run), SgdConstants(direct, from_b0)


def _f(bits: Ints) -> F32:
    return bits.view(np.float32)
