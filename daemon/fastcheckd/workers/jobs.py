"""What a worker is asked and what it answers, as bytes: fixed sizes, every field bounded. Pure.

A job and its answer are one small message each, over the socket of a line. What has no fixed size lies in the
line's scratch memory, which both sides map: an encoded chunk or a plan on the way in (at 0), an encoded chunk on
the way out (at OUT_AT), and behind it how it was coded. A chunk itself is named, not sent: a segment file and a range.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from fastcheck_proto.v1 import layout_pb2 as pb

from ..chunks import CHUNK_LENGTH_MAX
from ..codec.chunk_plan import ChunkPlan, layout_of, parse_layout
from ..codec.encoder import Use
from ..codec.fitting import Fits
from ..codec.format import NO_DIGEST, OVERHEAD_BYTES_MAX, SECTIONS_MAX, CodecId
from ..errors import InvalidRequestError
from ..store.segments import Place

#: Largest input or output: an encoded chunk. A plan that is longer has so many runs that it is not worth sending.
PART_BYTES_MAX = CHUNK_LENGTH_MAX + OVERHEAD_BYTES_MAX
_USE = struct.Struct("<BII")
_FIT = struct.Struct("<dI")
_COUNT = struct.Struct("<I")
#: Where a result begins in the scratch memory.
OUT_AT = 17 << 20
#: Size of the scratch memory; only what is used takes any.
SCRATCH_BYTES = OUT_AT + (18 << 20)
#: More optimizer steps than this in one chunk: it is encoded here.
FITS_MAX = 4096
assert OUT_AT >= PART_BYTES_MAX
assert OUT_AT + PART_BYTES_MAX + _USE.size * SECTIONS_MAX + _FIT.size * FITS_MAX <= SCRATCH_BYTES

_MAGIC = b"FCJ1"
_SEGMENT = re.compile(rb"[0-9a-f]{32}\.seg\Z")
_PLACE = struct.Struct("<36sQI")
_JOB = struct.Struct(f"<4sBB2xIIQQ16s16s{3 * _PLACE.size}s")
_ANSWER = struct.Struct("<4sB3xIIIQ")
#: A worker's first byte on each line.
READY = b"R"
JOB_BYTES = _JOB.size
ANSWER_BYTES = _ANSWER.size


class JobKind(IntEnum):
    """What is to be done. `new`, `base` and `out` are the job's places."""

    #: `new`, against `base` if there is one; a plan comes in, an encoded chunk goes out.
    ENCODE = 1
    #: `new`, by itself: an encoded chunk goes out.
    ENCODE_ALONE = 2
    #: An encoded chunk comes in, goes to `out`.
    DECODE = 3
    #: As DECODE with a base, and the way back goes out.
    APPLY = 4


class Status(IntEnum):
    """How a job went."""

    DONE = 0
    #: It would not shrink.
    NOTHING = 1
    #: A CodecError, its text in the scratch memory; likewise a MispredictedError.
    BAD_CODE = 2
    MISPREDICTED = 3
    #: The worker could not, for a reason of its own or the system's. Nothing is known of the chunk.
    REFUSED = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work. `base_digest` is NO_DIGEST where it is not known."""

    kind: JobKind
    new: Place | None = None
    base: Place | None = None
    out: Place | None = None
    step: int = 0
    base_step: int = 0
    digest: bytes = NO_DIGEST
    base_digest: bytes = NO_DIGEST
    #: Bytes in the scratch memory: the encoded chunk or the plan; behind it how far its optimizer steps were fitted.
    in_bytes: int = 0
    fits: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it: bytes at OUT_AT, then `uses` uses, then `fits` fits."""

    status: Status
    out_bytes: int = 0
    uses: int = 0
    fits: int = 0
    #: Thread time that it took.
    cpu_ns: int = 0


#: The places that each kind must have, and those that it may have.
_PLACES = {
    JobKind.ENCODE: ({"new"}, {"base"}),
    JobKind.ENCODE_ALONE: ({"new"}, set[str]()),
    JobKind.DECODE: ({"out"}, {"base"}),
    JobKind.APPLY: ({"out", "base"}, set[str]()),
}


def pack_job(job: Job) -> bytes:
    """A job of JOB_BYTES bytes."""
    places = b"".join(_pack_place(place) for place in (job.new, job.base, job.out))
    return _JOB.pack(
        _MAGIC, job.kind, 0, job.in_bytes, job.fits, job.step, job.base_step, job.digest, job.base_digest, places
    )  # fmt: skip


def parse_job(data: bytes) -> Job:
    """Inverse of `pack_job`.

    Raises:
        InvalidRequestError: a field is out of bounds, or the places are not those of its kind.
    """
    magic, kind, zero, in_bytes, fits, step, base_step, digest, base_digest, places = _JOB.unpack(data)
    if magic != _MAGIC or zero or kind not in list(JobKind):
        _bad("it is none")
    new, base, out = (_parse_place(places[i * _PLACE.size : (i + 1) * _PLACE.size]) for i in range(3))
    job = Job(JobKind(kind), new, base, out, step, base_step, digest, base_digest, in_bytes, fits)
    given = {name for name in ("new", "base", "out") if getattr(job, name) is not None}
    must, may = _PLACES[job.kind]
    if not must <= given <= must | may:
        _bad(f"a job of kind {job.kind.name} does not work on {sorted(given)}")
    if len({place.size for place in (new, base, out) if place is not None}) > 1:
        _bad("its places differ in size")
    if in_bytes > PART_BYTES_MAX or fits > FITS_MAX or (in_bytes == 0) != (kind == JobKind.ENCODE_ALONE):
        _bad(f"{in_bytes} bytes and {fits} fits are out of bounds")
    return job


def pack_answer(answer: Answer) -> bytes:
    """An answer of ANSWER_BYTES bytes."""
    return _ANSWER.pack(_MAGIC, answer.status, answer.out_bytes, answer.uses, answer.fits, answer.cpu_ns)


def parse_answer(data: bytes) -> Answer:
    """Inverse of `pack_answer`; InvalidRequestError when a field is out of bounds."""
    magic, status, out_bytes, uses, fits, cpu_ns = _ANSWER.unpack(data)
    if magic != _MAGIC or status not in list(Status):
        _bad("it is none")
    if out_bytes > PART_BYTES_MAX or uses > SECTIONS_MAX or fits > FITS_MAX:
        _bad(f"{out_bytes} bytes, {uses} uses and {fits} fits are out of bounds")
    return Answer(Status(status), out_bytes, uses, fits, cpu_ns)


def pack_uses(uses: Sequence[Use]) -> bytes:
    """How a chunk was coded, section by section."""
    return b"".join(_USE.pack(CodecId[u.codec.upper()], u.raw_bytes, u.encoded_bytes) for u in uses)


def parse_uses(data: bytes, count: int) -> tuple[Use, ...]:
    """The first `count`; InvalidRequestError for a codec that does not exist."""
    try:
        return tuple(
            Use(CodecId(codec).label, raw, encoded)
            for codec, raw, encoded in _USE.iter_unpack(data[: count * _USE.size])
        )
    except ValueError as error:
        raise InvalidRequestError(f"malformed answer of a worker: {error}") from None


def pack_plan(plan: ChunkPlan, fits: Fits) -> tuple[bytes, list[pb.OptimizerStep]]:
    """A plan, and how far its steps were fitted, for the scratch memory; and those steps."""
    layout, steps = layout_of(plan)
    told = layout.SerializeToString()
    return _COUNT.pack(len(told)) + told + pack_fits(fits, steps), steps


def parse_plan(data: bytes, fits: int) -> tuple[ChunkPlan, Fits, list[pb.OptimizerStep]]:
    """Inverse of `pack_plan`, with the plan's steps, which must live as long as the fits.

    Raises:
        InvalidRequestError: it is malformed.
    """
    try:
        (size,) = _COUNT.unpack_from(data)
        layout = pb.StateLayout.FromString(data[_COUNT.size : _COUNT.size + size])
    except Exception as error:  # noqa: BLE001  protobuf and struct raise errors of their own
        raise InvalidRequestError(f"malformed job: {error}") from None
    steps = list(layout.optimizer_steps)
    if len(layout.chunks) != 1 or len(steps) != fits:
        _bad("its plan is not that of one chunk")
    plan = parse_layout(layout, layout.chunks[0].bytes)[0]
    known = Fits()
    parse_fits(data[_COUNT.size + size :], known, steps)
    return plan, known, steps


def pack_fits(fits: Fits, steps: Sequence[pb.OptimizerStep]) -> bytes:
    """What was found out about the learning rates of some steps."""
    told = (fits.told(step) for step in steps)
    return b"".join(_FIT.pack(math.nan if rate is None else rate, failures) for rate, failures in told)


def parse_fits(data: bytes, fits: Fits, steps: Sequence[pb.OptimizerStep]) -> None:
    """Learn it. InvalidRequestError when it is not about as many steps."""
    if len(data) != _FIT.size * len(steps):
        _bad(f"{len(data)} bytes about {len(steps)} optimizer steps")
    for step, (rate, failures) in zip(steps, _FIT.iter_unpack(data), strict=True):
        fits.learn(step, None if math.isnan(rate) else rate, failures)


def tail_bytes(answer: Answer) -> tuple[int, int]:
    """Sizes of an answer's uses and fits in the scratch memory."""
    return _USE.size * answer.uses, _FIT.size * answer.fits


def _pack_place(place: Place | None) -> bytes:
    return (
        bytes(_PLACE.size) if place is None else _PLACE.pack(place.segment.encode(), place.offset, place.size)
    )


def _parse_place(data: bytes) -> Place | None:
    segment, offset, size = _PLACE.unpack(data)
    if data == bytes(_PLACE.size):
        return None
    if not _SEGMENT.match(segment) or not 0 < size <= CHUNK_LENGTH_MAX or offset > 1 << 62:
        _bad("a place is not part of a segment")
    return Place(segment.decode(), offset, size)


def _bad(why: str) -> NoReturn:
    raise InvalidRequestError(f"malformed job or answer of a worker: {why}")
