"""A small state that is trained step by step, with a plan of what its bytes are: something for every codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastcheck_proto.v1 import layout_pb2 as layout
from fastcheckd.codec.chunk_plan import ChunkPlan, Run, Unit, opaque
from fastcheckd.codec.dtypes import DType

N = 8192
ROWS, WIDTH = 512, 64
NOISE_BYTES = 70_001

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


@dataclass
class TrainedState:
    """AdamW, SGD, an embedding of which few rows change, bytes that never do, and a tail of noise."""

    seed: int = 1
    step: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        normal = self.random.standard_normal
        for name in ("w", "s", "b"):
            self.arrays[name] = (normal(N) * 0.05).astype(np.float32)
        for name in ("m", "v", "momentum"):
            self.arrays[name] = np.zeros(N, np.float32)
        self.arrays["rows"] = normal((ROWS, WIDTH)).astype(np.float32)
        self.static = self.random.bytes(NOISE_BYTES)
        for _ in range(5):
            self.train()

    def train(self) -> None:
        """One step of everything."""
        self.step += 1
        a, f = self.arrays, np.float32
        g = (self.random.standard_normal(N) * 0.01).astype(f)
        a["m"] = f(0.9) * a["m"] + f(0.1) * g
        a["v"] = f(0.999) * a["v"] + f(0.001) * g * g
        denominator = np.sqrt(a["v"]) / f((1 - 0.999**self.step) ** 0.5) + f(1e-8)
        a["w"] = a["w"] * f(1 - 1e-3 * 0.01) - f(1e-3 / (1 - 0.9**self.step)) * (a["m"] / denominator)
        a["momentum"] = f(0.9) * a["momentum"] + g
        a["s"] = a["s"] - f(0.1) * a["momentum"]
        a["b"] = a["b"] + g
        for row in self.random.integers(0, ROWS, 5):
            a["rows"][row] += f(0.01)
        self.noise = self.random.bytes(NOISE_BYTES)

    @property
    def plans(self) -> list[ChunkPlan]:
        adam = layout.OptimizerStep(
            kind=layout.OPTIMIZER_KIND_ADAMW, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01,
            step=self.step, observed=True,
        )  # fmt: skip
        sgd = layout.OptimizerStep(
            kind=layout.OPTIMIZER_KIND_SGD, lr=0.1, momentum=0.9, step=self.step, observed=True
        )
        w = Run(0, N, F32, layout.ROLE_PARAM)
        m = Run(4 * N, N, F32, layout.ROLE_EXP_AVG)
        v = Run(8 * N, N, F32, layout.ROLE_EXP_AVG_SQ)
        momentum = Run(4 * N, N, F32, layout.ROLE_MOMENTUM)
        low = Run(4 * N, N, BF16, layout.ROLE_LOW_PRECISION_PARAM)
        rows = Run(0, ROWS * WIDTH, F32, layout.ROLE_PARAM, WIDTH)
        return [
            ChunkPlan(12 * N, (Unit((w, m, v), adam),)),
            ChunkPlan(8 * N, (Unit((w, momentum), sgd),)),
            ChunkPlan(6 * N, (Unit((w, low)),)),
            ChunkPlan(4 * ROWS * WIDTH, (Unit((rows,)),)),
            opaque(NOISE_BYTES),
            opaque(NOISE_BYTES),
        ]

    @property
    def lengths(self) -> Sequence[int]:
        return [plan.bytes for plan in self.plans]

    def state(self) -> bytes:
        """All of it as bytes."""
        a = self.arrays
        bits = a["b"].view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
        parts = [a["w"], a["m"], a["v"], a["s"], a["momentum"], a["b"], rounded, a["rows"]]
        return b"".join(part.tobytes() for part in parts) + self.static + self.noise
