"""What may be lost, where, and how: only what the trainer asked for (docs/formats.md, "Lossy codings"). Pure.

`quantise` changes a chunk into what the lossy codecs can say, before anything of it is hashed or sent; `encode_lossy`
then finds the codes in the changed bytes. So what is encoded is exact again, and every check of the
exact codecs holds. Bytes that are not of a book go to the exact codecs: a wrong hint costs size, never a number.
"""

from __future__ import annotations

from typing import Any

from fastcheck_proto.v1 import layout_pb2 as pb

from .bounded import encode_bounded, quantise_bounded
from .chunk_plan import ChunkPlan, Run, Unit
from .codebooks import BOOKS
from .dtypes import DType
from .format import CodecId, Section
from .index import encode_index, quantise_index
from .integers import signed
from .rounded import encode_rounded, round_to
from .runs import is_same, raw
from .scratch import BLOCK

#: Linear book (signed) or not.
_MOMENTS = {
    pb.ROLE_EXP_AVG: True,
    pb.ROLE_MOMENTUM: True,
    pb.ROLE_EXP_AVG_SQ: False,
    pb.ROLE_MAX_EXP_AVG_SQ: False,
}
_CODECS = {pb.MOMENTUM_CODING_INDEX8: CodecId.INDEX8, pb.MOMENTUM_CODING_INDEX4: CodecId.INDEX4}


def quantise(chunk: memoryview, base: memoryview | None, plan: ChunkPlan) -> None:
    """Change the writable chunk in place into what `plan.precision` allows it to be coded as.

    `base` is the same chunk of the step that it will be encoded against, None without one; both have `plan.bytes`
    bytes. Without a base, weights stay exact this time. A low-precision copy that was its master's rounding is so
    again. Moments: coding twice is coding once.
    """
    precision = plan.precision
    if precision is None:
        return
    for unit in plan.units:
        for run in unit.runs:
            if (codec := _moment_codec(run, precision)) is not None:
                quantise_index(run, BOOKS[codec, _MOMENTS[run.role]], chunk)
            elif _is_bounded(run, precision) and base is not None:
                _quantise_weights(unit, run, precision.weights_bound, base, chunk)


def encode_lossy(run: Run, new: Any, base: Any | None, precision: pb.Precision) -> Section | None:
    """The run's section by a lossy codec; None if none was asked for it, or its numbers are not so coded."""
    if base is not None and is_same(run, new, base):
        return None
    section = None
    if (codec := _moment_codec(run, precision)) is not None:
        section = encode_index(codec, run, _MOMENTS[run.role], new)
    elif _is_bounded(run, precision) and base is not None:
        section = encode_bounded(run, precision.weights_bound, new, base)
    if section is None or section.encoded_bytes >= raw(run, new).encoded_bytes:
        return None
    return section


def _moment_codec(run: Run, precision: pb.Precision) -> CodecId | None:
    codec = _CODECS.get(precision.momentum)
    if not run.elements or run.role not in _MOMENTS or run.dtype not in (DType.FLOAT32, DType.BFLOAT16):
        return None
    return codec


def _is_bounded(run: Run, precision: pb.Precision) -> bool:
    wanted = precision.weights_bound > 0 and run.elements > 0
    return wanted and run.role == pb.ROLE_PARAM and run.dtype == DType.FLOAT32


def _quantise_weights(unit: Unit, master: Run, bound: float, base: Any, chunk: Any) -> None:
    copies = [
        run
        for run in unit.runs
        if run.role == pb.ROLE_LOW_PRECISION_PARAM and encode_rounded(run, master, chunk) is not None
    ]
    if not quantise_bounded(master, bound, base, chunk):
        return
    numbers = signed(chunk, master.dtype, master.offset, master.elements)
    for run in copies:
        copy = signed(chunk, run.dtype, run.offset, run.elements)
        for start in range(0, run.elements, BLOCK):
            copy[start : start + BLOCK] = round_to(run.dtype, numbers[start : start + BLOCK])
