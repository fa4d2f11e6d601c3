"""The learning rate, from the numbers, where nobody saw the step. Pure.

After `scheduler.step()` the rate in a state dict is already the next step's. All elements of a group share
one rate, and each tells it up to its own rounding, which is that of the parameter: least squares over a sample,
weighted by that, gives it far more exactly than prediction needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastcheck_proto.v1 import layout_pb2 as pb

from . import adam, sgd
from .dtypes import DType
from .integers import signed

_SAMPLE = 4096
#: Chunks in which no rate explains a step before nobody looks for one any more.
_HOPELESS = 3


class Fits:
    """Rates found for the optimizer steps of one save, so that not every chunk looks for them. Any thread."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._failures: dict[int, int] = {}

    def known(self, step: pb.OptimizerStep) -> float | None:
        """A rate that explained another chunk of the step."""
        return self._rates.get(id(step))

    def worth_trying(self, step: pb.OptimizerStep) -> bool:
        """Whether fitting may still find something."""
        return self._failures.get(id(step), 0) < _HOPELESS

    def found(self, step: pb.OptimizerStep, rate: float) -> None:
        """A rate explains a chunk fully. The step object must live as long as this."""
        self._rates[id(step)] = rate
        self._failures.pop(id(step), None)

    def failed(self, step: pb.OptimizerStep) -> None:
        """No rate explains a chunk."""
        self._failures[id(step)] = self._failures.get(id(step), 0) + 1

    def told(self, step: pb.OptimizerStep) -> tuple[float | None, int]:
        """All that is known of a step: a rate, and in how many chunks none was found since."""
        return self._rates.get(id(step)), self._failures.get(id(step), 0)

    def learn(self, step: pb.OptimizerStep, rate: float | None, failures: int) -> None:
        """Take over what another process was `told`, or has found out since."""
        if rate is not None:
            self._rates[id(step)] = rate
        self._failures[id(step)] = failures


def fit_adam_lr(runs: adam.AdamRuns, step: pb.OptimizerStep, new: Any, base: Any) -> float | None:
    """The rate that explains w0 -> w1 best; None when the numbers do not tell."""
    w1, m1, v1 = (_sample(new, run) for run in (runs.w, runs.m, runs.v_max or runs.v))
    w0 = _sample(base, runs.w)
    if not (0 <= step.beta1 < 1 and 0 <= step.beta2 < 1 and step.step >= 1):
        return None
    with np.errstate(all="ignore"):
        denominator = np.sqrt(v1) / math.sqrt(1 - step.beta2**step.step) + step.eps
        per_rate = m1 / denominator / (1 - step.beta1**step.step)
        if step.kind == pb.OPTIMIZER_KIND_ADAMW:
            per_rate += step.weight_decay * w0
        return _least_squares(per_rate, w0 - w1, w0)


def fit_sgd_lr(runs: sgd.SgdRuns, step: pb.OptimizerStep, new: Any, base: Any) -> float | None:
    """The rate that explains w0 -> w1 best; None when the numbers do not tell."""
    unit = sgd.SgdConstants.of(step, lr=1.0)
    if unit is None:
        return None
    w1, b1 = (_sample(new, run) for run in (runs.w, runs.b))
    w0, b0 = (_sample(base, run) for run in (runs.w, runs.b))
    with np.errstate(all="ignore"):
        return _least_squares(unit.direct * b1 + unit.from_b0 * b0, w0 - w1, w0)


def _sample(chunk: Any, run: Any) -> Any:
    bits = signed(chunk, DType.FLOAT32, run.offset, run.elements)
    stride = max(1, len(bits) // _SAMPLE)
    return bits[::stride].view(np.float32).astype(np.float64)


def _least_squares(x: Any, y: Any, w: Any) -> float | None:
    known = np.isfinite(x) & np.isfinite(y)
    x, y, w = x[known], y[known], np.abs(w[known])
    if not len(x):
        return None
    # The rounding of y is in proportion to w. Elements near zero would be exact; do not trust them quite that far.
    rounding = w + 1e-3 * float(w.mean()) + 1e-30
    x, y = x / rounding, y / rounding
    # Not np.dot: BLAS would start threads of its own in the daemon.
    weight = float((x * x).sum())
    if not weight > 0:
        return None
    rate = float((x * y).sum()) / weight
    return rate if math.isfinite(rate) and rate > 0 else None
