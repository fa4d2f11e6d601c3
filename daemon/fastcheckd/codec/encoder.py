"""One chunk → the smallest encoding that pays. Pure; several threads may each encode a chunk.

A unit of an optimizer is predicted if the hyper-parameters explain a sample of it, with the learning rate that
the trainer named or with a fitted one; everything else is coded run by run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcheck_proto.v1 import layout_pb2 as pb

from . import adam, sgd
from .chunk_plan import ChunkPlan, Run, Unit
from .dtypes import DType
from .fit import Fits, fit_adam_lr, fit_sgd_lr
from .format import HEADER_BYTES, NO_DIGEST, SECTIONS_MAX, CodecId, Header, Section, pack
from .lossy import encode_lossy
from .rounded import encode_rounded
from .runs import TINY_PART, encode_run, is_same, raw
from .scratch import SCRATCH

#: An encoding must save this much of the chunk, or it travels raw.
_WORTH = 0.98
_SAMPLE = 4096
#: Mean bits of a residual above which a prediction explains nothing and the plain delta is as good.
_EXPLAINED_BITS = 8.0
#: Below this a prediction is right, and no better rate is looked for.
_RIGHT_BITS = 2.5


@dataclass(frozen=True, slots=True)
class Use:
    """What one codec made of some bytes."""

    codec: str
    raw_bytes: int
    encoded_bytes: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded chunk, and by what codecs."""

    payload: bytes | memoryview
    uses: tuple[Use, ...]


def encode(
    new: Any,
    base: Any | None,
    plan: ChunkPlan,
    *,
    step: int,
    base_step: int,
    digest: bytes,
    base_digest: bytes = NO_DIGEST,
    fits: Fits | None = None,
) -> Encoded | None:
    """Encode the chunk `new`, against `base` if there is one; None when it would not shrink.

    `new` and `base` are buffers of `plan.bytes` bytes, the digests those of their bytes. `fits` is
    shared by the chunks of one save.
    """
    assert base is None or base_digest != NO_DIGEST, "a base is known by its digest"
    sections = encode_sections(new, base, plan, fits or Fits())
    if len(sections) > SECTIONS_MAX:
        return None
    size = HEADER_BYTES + sum(section.encoded_bytes for section in sections)
    if size > _WORTH * plan.bytes:
        return None
    header = Header(
        plan.bytes, base is not None, step, base_step if base is not None else 0, digest,
        base_digest if base is not None else NO_DIGEST,
    )  # fmt: skip
    return Encoded(pack(header, sections), uses(sections))


def unchanged(size: int, *, step: int, base_step: int, digest: bytes) -> Encoded:
    """The chunk of `size` bytes that equals its base; costs nothing to make."""
    section = Section(CodecId.SAME, DType.BYTES, 0, size)
    payload = pack(Header(size, True, step, base_step, digest, digest), [section])
    return Encoded(payload, (Use("same", size, len(payload)),))


def encode_sections(new: Any, base: Any | None, plan: ChunkPlan, fits: Fits) -> list[Section]:
    """Sections for all bytes of the chunk."""
    SCRATCH.empty_arena(plan.bytes + 4096)
    sections: list[Section] = []
    with np.errstate(all="ignore"):
        for unit in plan.units:
            sections += _encode_unit(unit, new, base, fits, plan.precision)
    sections += encode_gaps([run for unit in plan.units for run in unit.runs], new, base)
    # A rounded copy comes after its master; all else stands alone.
    return sorted(sections, key=lambda s: (s.codec == CodecId.ROUNDED, s.offset))


def uses(sections: Iterable[Section]) -> tuple[Use, ...]:
    """By section."""
    return tuple(Use(s.codec.label, covered_bytes(s), s.encoded_bytes) for s in sections)


def covered_bytes(section: Section) -> int:
    """Bytes of the chunk that a section stands for."""
    runs = {CodecId.ADAM: len(section.planes) // 4, CodecId.SGD: 2}.get(section.codec, 1)
    return runs * section.elements * section.dtype.bytes


def _encode_unit(
    unit: Unit, new: Any, base: Any | None, fits: Fits, precision: pb.Precision | None
) -> list[Section]:
    rest = [run for run in unit.runs if run.elements]
    sections = []
    master = next((r for r in rest if r.role == pb.ROLE_PARAM), None)
    for run in [r for r in rest if r.role == pb.ROLE_LOW_PRECISION_PARAM and master is not None]:
        assert master is not None
        if (section := encode_rounded(run, master, new)) is not None:
            sections.append(section)
            rest.remove(run)
    lossy = {} if precision is None else _encode_lossy(rest, new, base, precision)
    sections += lossy.values()
    rest = [run for run in rest if run not in lossy]
    large = any((run.stop - run.offset) * TINY_PART > len(new) for run in rest)
    # A unit that lost something is no optimizer step any more: nothing predicts it.
    if base is not None and large and not lossy and not all(is_same(run, new, base) for run in rest):
        predicted = _predict_adam(unit, new, base, fits) or _predict_sgd(unit, new, base, fits)
        if predicted is not None:
            section, runs = predicted
            if section.encoded_bytes < sum(raw(run, new).encoded_bytes for run in runs):
                sections.append(section)
                rest = [run for run in rest if run not in runs]
    return sections + [encode_run(run, new, base) for run in rest]


def _encode_lossy(runs: list[Run], new: Any, base: Any | None, precision: pb.Precision) -> dict[Run, Section]:
    coded = {}
    for run in runs:
        section = encode_lossy(run, new, base, precision)
        if section is not None and base is not None and run.row_elements > 1:
            # Few rows that changed may take less than all of them in short codes.
            section = min(section, encode_run(run, new, base), key=lambda s: s.encoded_bytes)
        if section is not None:
            coded[run] = section
    return coded


def _predict_adam(unit: Unit, new: Any, base: Any, fits: Fits) -> tuple[Section, tuple[Run, ...]] | None:
    runs, step = adam.AdamRuns.of(unit), unit.step
    if runs is None or step is None or not runs.w.elements:
        return None

    def bits(rate: float) -> float:
        constants = adam.AdamConstants.of(step, rate)
        if constants is None:
            return math.inf
        # v is explained whatever the rate: when it is not, this is no Adam step, or not just one.
        return max(adam.sample_cost(runs, constants, new, base, _SAMPLE))

    rate = _find_rate(step, fits, bits, lambda: fit_adam_lr(runs, step, new, base))
    constants = None if rate is None else adam.AdamConstants.of(step, rate)
    return None if constants is None else (adam.encode_adam(runs, constants, new, base), runs.all())


def _predict_sgd(unit: Unit, new: Any, base: Any, fits: Fits) -> tuple[Section, tuple[Run, ...]] | None:
    runs, step = sgd.SgdRuns.of(unit), unit.step
    if runs is None or step is None or not runs.w.elements:
        return None

    def bits(rate: float) -> float:
        constants = sgd.SgdConstants.of(step, rate)
        return math.inf if constants is None else sgd.sample_cost(runs, constants, new, base, _SAMPLE)

    rate = _find_rate(step, fits, bits, lambda: fit_sgd_lr(runs, step, new, base))
    constants = None if rate is None else sgd.SgdConstants.of(step, rate)
    return None if constants is None else (sgd.encode_sgd(runs, constants, new, base), (runs.w, runs.b))


def _find_rate(
    step: pb.OptimizerStep, fits: Fits, bits: Callable[[float], float], fit: Callable[[], float | None]
) -> float | None:
    """The learning rate that predicts best: another chunk's, the trainer's, or a fitted one; None if none does."""
    known = fits.known(step)
    best, found = step.lr, math.inf
    for rate in (step.lr,) if known is None else (known, step.lr):
        if (cost := bits(rate)) < found:
            best, found = rate, cost
        if found <= _RIGHT_BITS:
            return best
    if fits.worth_trying(step):
        fitted = fit()
        if fitted is not None and (cost := bits(fitted)) < found:
            best, found = fitted, cost
    if found > _EXPLAINED_BITS:
        fits.failed(step)
        return None
    if found <= _RIGHT_BITS:
        fits.found(step, best)
    return best


def encode_gaps(runs: Iterable[Run], new: Any, base: Any | None) -> list[Section]:
    """What no run covers, as runs of bytes; zeros need no section."""
    sections = []
    at = 0
    for run in [*sorted(runs, key=lambda r: r.offset), Run(len(new), 0, DType.BYTES, pb.ROLE_UNSPECIFIED)]:
        if run.offset > at:
            gap = Run(at, run.offset - at, DType.BYTES, pb.ROLE_UNSPECIFIED)
            if np.frombuffer(new, np.uint8, gap.elements, gap.offset).any():
                sections.append(encode_run(gap, new, base))
        at = run.stop
    return sections
