"""Chunks to encode: by hand, by hypothesis, and as an optimizer makes them; and the checks that hold for all."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fastcheck_proto.v1 import layout_pb2 as pb
from fastcheckd.codec.chunk_plan import ChunkPlan, Run, Unit
from fastcheckd.codec.decoder import decode, decode_range, read_header, reverse
from fastcheckd.codec.dtypes import DType
from fastcheckd.codec.encoder import Encoded, encode
from fastcheckd.codec.format import OVERHEAD_BYTES_MAX
from fastcheckd.codec.integers import UNSIGNED
from fastcheckd.codec.scratch import BLOCK
from fastcheckd.digests import chunk_digest

PARAM, LOW = pb.ROLE_PARAM, pb.ROLE_LOW_PRECISION_PARAM
M, V, V_MAX, MOMENTUM = pb.ROLE_EXP_AVG, pb.ROLE_EXP_AVG_SQ, pb.ROLE_MAX_EXP_AVG_SQ, pb.ROLE_MOMENTUM

#: Quiet and signalling NaNs with payloads of either sign, infinities, zeros, denormals, extremes.
SPECIALS = {
    DType.FLOAT32: [
        0x7FC00000, 0xFFC00000, 0x7FC12345, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000,
        0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
    ],
    DType.BFLOAT16: [0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x8001, 0x7F7F],
    DType.FLOAT16: [0x7E00, 0xFE01, 0x7C01, 0x7C00, 0xFC00, 0, 0x8000, 1, 0x8001, 0x7BFF],
    DType.FLOAT64: [0x7FF8 << 48, (0xFFF8 << 48) + 5, (0x7FF0 << 48) + 1, 0x7FF0 << 48, 0xFFF0 << 48, 0, 1 << 63, 1],
}  # fmt: skip


def mixed(count: int, salt: int = 0) -> np.ndarray:
    """`count` 64-bit numbers without pattern, the same for ever: splitmix64 of their indices (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(salt << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def gaussian(count: int, salt: int = 0) -> np.ndarray:
    """float32 numbers around 0 with variance about 1: a sum of four uniform ones, exact in double precision."""
    parts = mixed(4 * count, salt).reshape(4, count) >> np.uint64(40)
    return ((parts.sum(axis=0).astype(np.float64) / 2**24 - 2) * 1.75).astype(np.float32)


def noise(size: int, salt: int = 0) -> bytes:
    """Bytes that do not compress."""
    return mixed(-(-size // 8), salt).tobytes()[:size]


def run(offset: int, elements: int, dtype: DType = DType.FLOAT32, role: Any = 0, rows: int = 0) -> Run:
    return Run(offset, elements, dtype, role, rows)


def single(elements: int, dtype: DType = DType.FLOAT32, rows: int = 0) -> ChunkPlan:
    """A chunk that is one run."""
    return ChunkPlan(elements * dtype.bytes, (Unit((run(0, elements, dtype, rows=rows),)),))


def encode_chunk(new: bytes, base: bytes | None, plan: ChunkPlan) -> Encoded | None:
    digests = {"digest": chunk_digest(new)}
    if base is not None:
        digests["base_digest"] = chunk_digest(base)
    return encode(new, base, plan, step=8, base_step=7, **digests)


def decoded(payload: bytes, base: bytes | None, size: int) -> bytes:
    # Whatever stood there before must not show through.
    out = bytearray(b"\xaa" * size)
    decode(payload, base, out)
    return bytes(out)


def round_trip(new: bytes, base: bytes | None, plan: ChunkPlan) -> set[str]:
    """Everything that holds for any chunk; the codecs that were used (none: it travels raw)."""
    encoded = encode_chunk(new, base, plan)
    if encoded is None:
        return set()
    payload = encoded.payload
    assert len(payload) < plan.bytes
    assert sum(use.raw_bytes for use in encoded.uses) <= plan.bytes
    assert decoded(payload, base, plan.bytes) == new
    header = read_header(payload)
    assert (header.raw_bytes, header.step, header.needs_base) == (plan.bytes, 8, base is not None)
    older = noise(plan.bytes, 77) if base is None else base
    back = reverse(payload, older, new)
    if back is None:
        assert len(zlib.compress(older, 1)) > 0.99 * len(older), "only what is noise cannot shrink"
    else:
        assert len(back) <= plan.bytes + OVERHEAD_BYTES_MAX
        assert decoded(back, new, plan.bytes) == older
        again = reverse(back, new, older)
        assert decoded(again, older, plan.bytes) == new
    for start, stop in [(0, 1), (plan.bytes // 3, plan.bytes // 2 + 1), (plan.bytes - 1, plan.bytes)]:
        check_range(payload, base, new, start, stop)
    return {use.codec for use in encoded.uses}


def check_range(payload: bytes, base: bytes | None, new: bytes, start: int, stop: int) -> None:
    out = bytearray(b"\xaa" * len(new))
    decode_range(payload, base, out, start, stop)
    assert out[start:stop] == new[start:stop]


# --- optimizers -----------------------------------------------------------------------------------


def adam_step(**changes: Any) -> pb.OptimizerStep:
    fields = {
        "kind": pb.OPTIMIZER_KIND_ADAMW, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
        "weight_decay": 0.01, "step": 5,
    }  # fmt: skip
    return pb.OptimizerStep(**(fields | changes))


def sgd_step(**changes: Any) -> pb.OptimizerStep:
    return pb.OptimizerStep(**({"kind": pb.OPTIMIZER_KIND_SGD, "lr": 0.05, "momentum": 0.9} | changes))


def adam_unit(n: int, step: pb.OptimizerStep, at: int = 0) -> Unit:
    """w m v (and max v), one behind the other."""
    roles = [PARAM, M, V] + ([V_MAX] if step.amsgrad else [])
    return Unit(tuple(run(at + 4 * n * i, n, role=role) for i, role in enumerate(roles)), step)


def sgd_unit(n: int, step: pb.OptimizerStep, at: int = 0) -> Unit:
    return Unit((run(at, n, role=PARAM), run(at + 4 * n, n, role=MOMENTUM)), step)


def whole(unit: Unit) -> ChunkPlan:
    return ChunkPlan(max(r.stop for r in unit.runs), (unit,))


def adam_arrays(n: int, step: pb.OptimizerStep, salt: int = 1) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(w m v [max v]) before and after a step, in float32, one plain operation after the other."""
    f = np.float32
    w, m, v = gaussian(n, salt), gaussian(n, salt + 1) * f(1e-3), gaussian(n, salt + 2) ** 2 * f(1e-6)
    g = gaussian(n, salt + 3) * f(3e-3)
    if step.kind == pb.OPTIMIZER_KIND_ADAM:
        g = g + f(step.weight_decay) * w
    m1 = m + (g - m) * f(1 - step.beta1)
    v1 = v * f(step.beta2) + g * g * f(1 - step.beta2)
    older, newer = [w, m, v], [m1, v1]
    used = v1
    if step.amsgrad:
        older.append(v * f(1.001))
        used = np.maximum(older[3], v1)
        newer.append(used)
    decay = 1 - step.lr * step.weight_decay if step.kind == pb.OPTIMIZER_KIND_ADAMW else 1
    size = f(step.lr / (1 - step.beta1**step.step))
    root = np.sqrt(used) / f(np.sqrt(1 - step.beta2**step.step)) + f(step.eps)
    w1 = w * f(decay) - size * m1 / root
    return older, [w1, *newer]


def sgd_arrays(n: int, step: pb.OptimizerStep, salt: int = 1) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(w momentum) before and after a step."""
    w, b, g = gaussian(n, salt), gaussian(n, salt + 1), gaussian(n, salt + 2)
    b1 = (b * np.float64(step.momentum) + g * np.float64(1 - step.dampening)).astype(np.float32)
    update = g + step.momentum * b1.astype(np.float64) if step.nesterov else b1
    return [w, b], [(w - step.lr * np.float64(1) * update).astype(np.float32), b1]


def joined(arrays: list[np.ndarray]) -> bytes:
    return b"".join(a.astype(a.dtype, copy=False).tobytes() for a in arrays)


# --- any chunk at all -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What a test encodes."""

    plan: ChunkPlan
    new: bytes
    base: bytes | None


def fill(dtype: DType, n: int, kind: str, rng: np.random.Generator) -> bytes:
    """Numbers of a kind."""
    unsigned = UNSIGNED[dtype.bytes]
    made = np.frombuffer(rng.bytes(n * dtype.bytes), unsigned)
    if kind == "zeros":
        made = np.zeros(n, unsigned)
    elif kind == "constant":
        made = np.full(n, made[0] if n else 0, unsigned)
    elif kind == "special" and dtype in SPECIALS:
        made = rng.choice(np.array(SPECIALS[dtype], unsigned), n)
    elif kind == "smooth" and dtype == DType.BFLOAT16:
        made = (rng.normal(size=n).astype(np.float32).view(np.uint32) >> 16).astype(unsigned)
    elif kind == "smooth" and dtype.is_float:
        made = rng.normal(size=n).astype(f"f{dtype.bytes}")
    elif kind == "smooth":
        made = rng.integers(0, 9, n).astype(unsigned)
    return made.tobytes()


FILLS = ["zeros", "constant", "special", "smooth", "noise"]
ELEMENTS = st.one_of(st.integers(0, 9), st.integers(10, 700), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1]))
BASES = ["none", "equal", "row", "random", "near", "zeros"]


def based(new: bytes, kind: str, rng: np.random.Generator) -> bytes | None:
    """A base of a kind for a chunk."""
    if kind == "none":
        return None
    data = np.frombuffer(new, np.uint8).copy()
    if kind == "row":
        at = int(rng.integers(0, len(data)))
        data[at : at + 64] = rng.integers(0, 256, len(data[at : at + 64]), np.uint8)
    elif kind == "random":
        data[:] = rng.integers(0, 256, len(data), np.uint8)
    elif kind == "near":
        data[:: int(rng.integers(1, 9))] ^= 1
    elif kind == "zeros":
        data[:] = 0
    return data.tobytes()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Units of one or more runs of any dtype, with gaps of any bytes; any base."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    data, units = b"", []
    for _ in range(draw(st.integers(0, 3))):
        n = draw(ELEMENTS)
        step = draw(st.sampled_from([None, adam_step(), adam_step(amsgrad=True), sgd_step()]))
        dtypes = draw(st.lists(st.sampled_from(list(DType)), min_size=1, max_size=4))
        roles = draw(st.permutations([PARAM, M, V, V_MAX, MOMENTUM, LOW]))
        if draw(st.booleans()):
            dtypes, roles = [DType.FLOAT32] * 4, draw(st.permutations([PARAM, M, V, V_MAX]))
        runs = []
        for dtype, role in zip(dtypes, roles, strict=False):
            data += fill(DType.BYTES, draw(st.integers(0, 40)), draw(st.sampled_from(FILLS)), rng)
            data += bytes(-len(data) % dtype.bytes)
            runs.append(run(len(data), n, dtype, role, draw(st.sampled_from([0, 0, 1, 4, 7, 16, 64]))))
            data += fill(dtype, n, draw(st.sampled_from(FILLS)), rng)
        units.append(Unit(tuple(runs), step))
    data += fill(DType.BYTES, draw(st.integers(0 if data else 1, 300)), draw(st.sampled_from(FILLS)), rng)
    base = based(data, draw(st.sampled_from(BASES)), rng)
    return Case(ChunkPlan(len(data), tuple(units)), data, base)
