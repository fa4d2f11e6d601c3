"""A chunk → an encoding that needs neither a base nor to be told what the chunk consists of. Pure.

For those who are read from: a holder has a shard's bytes and not its layout, and a reader has nothing. The bytes are
taken for numbers of the size that a sample shrinks most with, and split into planes; sign, exponent and what a lossy
coding left zero are what there is to gain. Of AdamW's fp32 state a sixth goes away, of one with `index8` moments more
than half, a twentieth less than with the layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastcheck_proto.v1 import layout_pb2 as pb

from .chunk_plan import ChunkPlan, Run, Unit
from .dtypes import DType
from .encoder import Encoded, encode
from .integers import UNSIGNED
from .planes import cost

#: Sizes of numbers that training states are made of.
_GUESSES = (DType.FLOAT32, DType.BFLOAT16)
#: Numbers looked at, in each of so many places: a chunk holds several tensors.
_SAMPLE, _PLACES = 1024, 4
#: The sample must shrink to this part of itself. What a chunk must save to travel encoded is `encode`'s matter.
_WORTH = 0.97


def encode_alone(data: Any, *, step: int, digest: bytes) -> Encoded | None:
    """Encode the chunk in the buffer `data`, whose digest that is; None when it would not shrink."""
    size = len(data)
    dtype = min(_GUESSES, key=lambda guess: _sample_cost(data, guess))
    if _sample_cost(data, dtype) > _WORTH:
        return None
    run = Run(0, size // dtype.bytes, dtype, pb.ROLE_UNSPECIFIED)
    return encode(data, None, ChunkPlan(size, (Unit((run,)),)), step=step, base_step=0, digest=digest)


def _sample_cost(data: Any, dtype: DType) -> float:
    """Encoded bytes per byte of a sample."""
    numbers = np.frombuffer(data, UNSIGNED[dtype.bytes], len(data) // dtype.bytes)
    if not len(numbers):
        return 1.0
    starts = np.linspace(0, max(0, len(numbers) - _SAMPLE), _PLACES, dtype=np.int64)
    sample = np.concatenate([numbers[start : start + _SAMPLE] for start in starts])
    return cost(sample, dtype.bytes) / dtype.bytes
