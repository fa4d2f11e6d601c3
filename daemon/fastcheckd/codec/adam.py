"""Adam and AdamW: v and w predicted from the base and from m. Pure.

From m0 and m1 follows the gradient, from it v1, from m1 and v1 follows w1: one step ties the three together,
so only m travels as a difference, v and w as what the prediction missed by, in units of the last place.
The update rule is that of Kingma & Ba (2015) with the decoupled decay of Loshchilov & Hutter (2019), in the
order in which torch's kernels compute it, so that most residuals are zero; any other order costs bytes,
never correctness. Single-precision add, multiply, divide, square root, one rounding each: the same bits on
every CPU.

The other way round, from (w1 m1 v1) to (w0 m0 v0), m's body is the same and w and v get residuals of their own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcheck_proto.v1 import layout_pb2 as pb

from ..errors import CodecError
from .chunk_plan import Run, Unit
from .dtypes import DType
from .format import REVERSED, CodecId, Section
from .integers import Ints, signed, unzigzag, zigzag
from .planes import PlaneMerger, PlaneSplitter
from .runs import add_difference, difference
from .scratch import BLOCK, SCRATCH

F32: TypeAlias = NDArray[np.float32]

_NO_RUN = 0xFFFFFFFF
_NAN = 0x7FC00000
#: Offsets of m, v, max v (or _NO_RUN), then `Constants`.
_EXTRA = struct.Struct("<III4x7f")


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """The step's hyper-parameters as the arithmetic needs them, each already rounded to single precision."""

    #: 1 / (1 - beta1): from a difference of m to the gradient.
    gradient_scale: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    #: lr / (1 - beta1**step)
    step_size: np.float32
    #: sqrt(1 - beta2**step)
    correction2: np.float32
    eps: np.float32
    #: 1 - lr * weight_decay (AdamW), 1 (Adam, whose decay is part of the gradient).
    decay: np.float32

    @classmethod
    def of(cls, step: pb.OptimizerStep, lr: float | None = None) -> AdamConstants | None:
        """From an optimizer's step, with another `lr` if given; None when they make no sense."""
        rate = step.lr if lr is None else lr
        count = step.step
        if not (0 <= step.beta1 < 1 and 0 <= step.beta2 < 1 and count >= 1 and step.eps >= 0):
            return None
        decay = 1 - rate * step.weight_decay if step.kind == pb.OPTIMIZER_KIND_ADAMW else 1.0
        values = (
            1 / (1 - step.beta1),
            step.beta2,
            1 - step.beta2,
            rate / (1 - step.beta1**count),
            math.sqrt(1 - step.beta2**count),
            step.eps,
            decay,
        )
        if not all(math.isfinite(v) and abs(v) < 1e30 for v in values) or decay == 0 or step.beta2 == 0:
            return None
        return cls(*map(np.float32, values))

    def values(self) -> tuple[np.float32, ...]:
        """In the order of the format."""
        return (
            self.gradient_scale, self.beta2, self.one_minus_beta2, self.step_size, self.correction2, self.eps,
            self.decay,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdamRuns:
    """The runs of an Adam unit, all float32; `v_max` with amsgrad only."""

    w: Run
    m: Run
    v: Run
    v_max: Run | None

    @classmethod
    def of(cls, unit: Unit) -> AdamRuns | None:
        """None if the unit is no such thing."""
        role = {run.role: run for run in unit.runs if run.dtype == DType.FLOAT32}
        step = unit.step
        if step is None or step.kind not in (pb.OPTIMIZER_KIND_ADAM, pb.OPTIMIZER_KIND_ADAMW):
            return None
        try:
            w, m, v = role[pb.ROLE_PARAM], role[pb.ROLE_EXP_AVG], role[pb.ROLE_EXP_AVG_SQ]
        except KeyError:
            return None
        v_max = role.get(pb.ROLE_MAX_EXP_AVG_SQ) if step.amsgrad else None
        return None if step.amsgrad and v_max is None else cls(w, m, v, v_max)

    def all(self) -> tuple[Run, ...]:
        """w m v, and max v if there is one."""
        return (self.w, self.m, self.v) + ((self.v_max,) if self.v_max else ())


class _Block:
    """The arithmetic on one block, in scratch; `x`, `y` are destroyed by the next call."""

    def __init__(self, constants: AdamConstants, size: int) -> None:
        self._c = constants
        self._x: F32 = SCRATCH.array("adam.x", size, np.float32)
        self._y: F32 = SCRATCH.array("adam.y", size, np.float32)

    def gradient_term(self, m0: F32, m1: F32) -> F32:
        """(1 - beta2) * g * g, from the moments."""
        x, y, c = self._x, self._y, self._c
        np.subtract(m1, m0, out=x)
        np.multiply(x, c.gradient_scale, out=x)
        np.add(x, m0, out=x)
        np.multiply(x, c.one_minus_beta2, out=y)
        np.multiply(y, x, out=y)
        return y

    def next_v(self, m0: F32, m1: F32, v0: F32) -> Ints:
        """v1 as predicted."""
        term = self.gradient_term(m0, m1)
        np.multiply(v0, self._c.beta2, out=self._x)
        np.add(self._x, term, out=self._x)
        return settled(self._x)

    def previous_v(self, m0: F32, m1: F32, v1: F32) -> Ints:
        """v0 as predicted."""
        term = self.gradient_term(m0, m1)
        np.subtract(v1, term, out=self._x)
        np.divide(self._x, self._c.beta2, out=self._x)
        return settled(self._x)

    def update(self, m1: F32, v1: F32) -> F32:
        """step_size * m1 / (sqrt(v1) / correction2 + eps)"""
        x, y, c = self._x, self._y, self._c
        np.sqrt(v1, out=x)
        np.divide(x, c.correction2, out=x)
        np.add(x, c.eps, out=x)
        np.multiply(m1, c.step_size, out=y)
        np.divide(y, x, out=y)
        return y

    def next_w(self, w0: F32, m1: F32, v1: F32) -> Ints:
        """w1 as predicted."""
        update = self.update(m1, v1)
        np.multiply(w0, self._c.decay, out=self._x)
        np.subtract(self._x, update, out=self._x)
        return settled(self._x)

    def previous_w(self, w1: F32, m1: F32, v1: F32) -> Ints:
        """w0 as predicted."""
        update = self.update(m1, v1)
        np.add(w1, update, out=self._x)
        np.divide(self._x, self._c.decay, out=self._x)
        return settled(self._x)


def settled(predicted: F32) -> Ints:
    """Bits of a prediction, in place, with one NaN for all.

    Which NaN an operation makes of others depends on the CPU, its vector width, even on where an array lies.
    """
    bits = predicted.view(np.int32)
    if np.isnan(predicted.max()):
        bits[np.isnan(predicted)] = _NAN
    return bits


def next_v_max(v_max0: Ints, v1: Ints) -> Ints:
    """The larger, by bits: they are ordered as second moments are, which have no sign, and a NaN wins."""
    return np.maximum(v_max0, v1)


def residual(truth: Ints, predicted: Ints, out: Ints) -> None:
    """Units in the last place between truth and prediction, zigzag."""
    mask = SCRATCH.array("mask", len(truth), np.int32)
    np.subtract(truth, predicted, out=out)
    zigzag(out, mask)


def apply_residual(values: Ints, predicted: Ints, out: Ints) -> None:
    """Inverse of `residual`; destroys `values`."""
    mask = SCRATCH.array("mask", len(values), np.int32)
    unzigzag(values, mask)
    np.add(values, predicted, out=out)


def encode_adam(runs: AdamRuns, constants: AdamConstants, new: Any, base: Any) -> Section:
    """Section of the whole unit."""
    n = runs.w.elements
    i1 = [signed(new, DType.FLOAT32, run.offset, n) for run in runs.all()]
    i0 = [signed(base, DType.FLOAT32, run.offset, n) for run in runs.all()]
    splitters = [PlaneSplitter(SCRATCH.take(4 * n), n, 4) for _ in i1]
    for start, stop in _blocks(n):
        block = _Block(constants, stop - start)
        a1 = [i[start:stop] for i in i1]
        a0 = [i[start:stop] for i in i0]
        f1, f0 = [_f(a) for a in a1], [_f(a) for a in a0]
        values = SCRATCH.array("values", stop - start, np.int32)
        difference(DType.FLOAT32, a1[1], a0[1], values)
        splitters[1].add(start, values)
        residual(a1[2], block.next_v(f0[1], f1[1], f0[2]), values)
        splitters[2].add(start, values)
        if runs.v_max:
            residual(a1[3], next_v_max(a0[3], a1[2]), values)
            splitters[3].add(start, values)
        residual(a1[0], block.next_w(f0[0], f1[1], f1[-1]), values)
        splitters[0].add(start, values)
    return _section(runs, constants, 0, splitters)


def decode_adam(section: Section, base: Any, out: Any) -> None:
    """Write all runs of the unit into the chunk `out`; `base` is the chunk that it starts from, older or newer."""
    runs, constants = parse_extra(section, len(out))
    n = section.elements
    i1 = [signed(out, DType.FLOAT32, run.offset, n) for run in runs]
    i0 = [signed(base, DType.FLOAT32, run.offset, n) for run in runs]
    mergers = [PlaneMerger(section.planes[4 * i : 4 * i + 4], n, 4) for i in range(len(runs))]
    step: Callable[..., None] = _back if section.flags & REVERSED else _forth
    for start, stop in _blocks(n):
        values = SCRATCH.array("values", stop - start, np.int32)

        def take(index: int, start: int = start, stop: int = stop, values: Ints = values) -> Ints:
            mergers[index].block(start, stop, values)
            return values

        step(_Block(constants, stop - start), take, [i[start:stop] for i in i0], [i[start:stop] for i in i1])


def _forth(block: _Block, take: Callable[[int], Ints], a0: list[Ints], a1: list[Ints]) -> None:
    f0, f1 = [_f(a) for a in a0], [_f(a) for a in a1]
    add_difference(DType.FLOAT32, take(1), a0[1], a1[1], 0)
    apply_residual(take(2), block.next_v(f0[1], f1[1], f0[2]), a1[2])
    if len(a0) == 4:
        apply_residual(take(3), next_v_max(a0[3], a1[2]), a1[3])
    apply_residual(take(0), block.next_w(f0[0], f1[1], f1[-1]), a1[0])


def _back(block: _Block, take: Callable[[int], Ints], a1: list[Ints], a0: list[Ints]) -> None:
    """From the newer (a1) to the older (a0)."""
    f0, f1 = [_f(a) for a in a0], [_f(a) for a in a1]
    add_difference(DType.FLOAT32, take(1), a1[1], a0[1], REVERSED)
    apply_residual(take(2), block.previous_v(f0[1], f1[1], f1[2]), a0[2])
    if len(a0) == 4:
        apply_residual(take(3), a1[3], a0[3])
    apply_residual(take(0), block.previous_w(f1[0], f1[1], f1[-1]), a0[0])


def reverse_adam(section: Section, base: Any, new: Any) -> Section:
    """The section that leads from `new` back to `base`: m's body as it is, own residuals for the others."""
    runs, constants = parse_extra(section, len(new))
    if section.flags & REVERSED:
        w, m, v, *v_max = runs
        return encode_adam(AdamRuns(w, m, v, v_max[0] if v_max else None), constants, base, new)
    n = section.elements
    i1 = [signed(new, DType.FLOAT32, run.offset, n) for run in runs]
    i0 = [signed(base, DType.FLOAT32, run.offset, n) for run in runs]
    splitters = [PlaneSplitter(SCRATCH.take(4 * n), n, 4) for _ in range(len(runs) - 1)]
    for start, stop in _blocks(n):
        block = _Block(constants, stop - start)
        a1, a0 = [i[start:stop] for i in i1], [i[start:stop] for i in i0]
        f1, f0 = [_f(a) for a in a1], [_f(a) for a in a0]
        values = SCRATCH.array("values", stop - start, np.int32)
        residual(a0[2], block.previous_v(f0[1], f1[1], f1[2]), values)
        splitters[1].add(start, values)
        if len(runs) == 4:
            residual(a0[3], a1[3], values)
            splitters[2].add(start, values)
        residual(a0[0], block.previous_w(f1[0], f1[1], f1[-1]), values)
        splitters[0].add(start, values)
    others = [splitter.planes() for splitter in splitters]
    planes = others[0] + section.planes[4:8] + sum(others[1:], ())
    return Section(
        CodecId.ADAM, DType.FLOAT32, section.offset, n, section.flags ^ REVERSED, section.extra, planes
    )


def sample_cost(
    runs: AdamRuns, constants: AdamConstants, new: Any, base: Any, elements: int
) -> tuple[float, float]:
    """Mean bits of the residuals of v and of w on a stretch from the middle."""
    start = max(0, runs.w.elements // 2 - elements // 2)
    stop = min(runs.w.elements, start + elements)
    a1 = [signed(new, DType.FLOAT32, r.offset, r.elements)[start:stop] for r in runs.all()]
    a0 = [signed(base, DType.FLOAT32, r.offset, r.elements)[start:stop] for r in runs.all()]
    f1, f0 = [_f(a) for a in a1], [_f(a) for a in a0]
    block = _Block(constants, stop - start)
    values = SCRATCH.array("values", stop - start, np.int32)
    residual(a1[2], block.next_v(f0[1], f1[1], f0[2]), values)
    v_bits = _mean_bits(values)
    residual(a1[0], block.next_w(f0[0], f1[1], f1[-1]), values)
    return v_bits, _mean_bits(values)


def _mean_bits(values: Ints) -> float:
    return float(np.log2(values.view(np.uint32) + np.float64(1)).mean())


def parse_extra(section: Section, chunk_bytes: int) -> tuple[list[Run], AdamConstants]:
    """Runs (w m v, max v) and constants.

    Raises:
        CodecError: they are not within the chunk, overlap, or the planes are not as many.
    """
    if len(section.extra) != _EXTRA.size or section.dtype != DType.FLOAT32:
        raise CodecError("an encoded chunk is malformed: an adam section without its numbers")
    m, v, v_max, *values = _EXTRA.unpack(section.extra)
    offsets = [section.offset, m, v] + ([v_max] if v_max != _NO_RUN else [])
    check_runs(section, offsets, chunk_bytes)
    runs = [Run(offset, section.elements, DType.FLOAT32, pb.ROLE_UNSPECIFIED) for offset in offsets]
    return runs, AdamConstants(*map(np.float32, values))


def check_runs(section: Section, offsets: list[int], chunk_bytes: int) -> None:
    """Raises CodecError unless the float32 runs at `offsets` lie in the chunk, apart, with four planes each."""
    size = 4 * section.elements
    ordered = sorted(offsets)
    apart = all(a + size <= b for a, b in zip(ordered, [*ordered[1:], chunk_bytes], strict=True))
    if not apart or any(offset % 4 for offset in offsets) or len(section.planes) != 4 * len(offsets):
        raise CodecError("an encoded chunk is malformed: the runs of a unit do not fit")


def _section(runs: AdamRuns, constants: AdamConstants, flags: int, splitters: list[PlaneSplitter]) -> Section:
    v_max = runs.v_max.offset if runs.v_max else _NO_RUN
    extra = _EXTRA.pack(runs.m.offset, runs.v.offset, v_max, *constants.values())
    planes = sum((splitter.planes() for splitter in splitters), ())
    return Section(CodecId.ADAM, DType.FLOAT32, runs.w.offset, runs.w.elements, flags, extra, planes)


def _blocks(elements: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, elements)) for start in range(0, elements, BLOCK)]


def _f(bits: Ints) -> F32:
    return bits.view(np.float32)
