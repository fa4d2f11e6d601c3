"""The one face of chunk work: encode, decode, apply. Here, in the thread that asks, or in worker processes.

Whoever asks gets the same bytes either way, and waits for them. Work that no worker can do, or whose worker is lost,
is done here: a lost worker costs time, nothing else.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from ..codec.chunk_plan import ChunkPlan
from ..codec.decoder import decode, turn_around
from ..codec.encoder import Encoded, Use, encode
from ..codec.fitting import Fits
from ..codec.format import Buffer
from ..codec.standalone import encode_alone
from ..counters import Counters
from ..errors import CodecError, MispredictedError
from ..store.segments import Place, place_of
from .crew import Reply, WorkerLostError, Workers
from .jobs import FITS_MAX, PART_BYTES_MAX, Job, JobKind, Status, pack_plan, parse_fits, parse_uses

logger = logging.getLogger(__name__)


class ChunkWork(Protocol):
    """What is done with chunks. Buffers are whole chunks; what is written to is touched no more at the end."""

    def encode(
        self,
        new: memoryview,
        base: memoryview | None,
        plan: ChunkPlan,
        *,
        step: int,
        base_step: int,
        digest: bytes,
        base_digest: bytes,
        fits: Fits,
    ) -> tuple[Encoded | None, float]:
        """As `encoder.encode`, and the seconds of a core that it took."""

    def encode_alone(self, data: memoryview, *, step: int, digest: bytes) -> Encoded | None:
        """As `standalone.encode_alone`."""

    def decode(self, payload: Buffer, out: memoryview) -> tuple[Use, ...]:
        """As `decoder.decode`, without a base."""

    def apply(
        self, payload: Buffer, old: memoryview, out: memoryview, *, old_digest: bytes
    ) -> tuple[tuple[Use, ...], memoryview | bytes]:
        """As `decoder.decode` with `old` as base, should it need one; and the way back to `old`."""


class WorkHere:
    """In the thread that asks."""

    def encode(
        self,
        new: memoryview,
        base: memoryview | None,
        plan: ChunkPlan,
        *,
        step: int,
        base_step: int,
        digest: bytes,
        base_digest: bytes,
        fits: Fits,
    ) -> tuple[Encoded | None, float]:
        """See `ChunkWork`."""
        started = time.thread_time()
        encoded = encode(
            new, base, plan, step=step, base_step=base_step, digest=digest, base_digest=base_digest, fits=fits
        )
        return encoded, time.thread_time() - started

    def encode_alone(self, data: memoryview, *, step: int, digest: bytes) -> Encoded | None:
        """See `ChunkWork`."""
        return encode_alone(data, step=step, digest=digest)

    def decode(self, payload: Buffer, out: memoryview) -> tuple[Use, ...]:
        """See `ChunkWork`."""
        return decode(payload, None, out)

    def apply(
        self, payload: Buffer, old: memoryview, out: memoryview, *, old_digest: bytes
    ) -> tuple[tuple[Use, ...], memoryview | bytes]:
        """See `ChunkWork`."""
        uses = decode(payload, old, out, base_digest=old_digest)
        return uses, turn_around(payload, old, out)


HERE = WorkHere()


class WorkInWorkers:
    """In worker processes, as long as the bytes lie in segments and a worker is there; else here."""

    def __init__(self, workers: Workers, counters: Counters) -> None:
        self._workers = workers
        self._counters = counters

    def encode(
        self,
        new: memoryview,
        base: memoryview | None,
        plan: ChunkPlan,
        *,
        step: int,
        base_step: int,
        digest: bytes,
        base_digest: bytes,
        fits: Fits,
    ) -> tuple[Encoded | None, float]:
        """See `ChunkWork`."""
        told, steps = pack_plan(plan, fits)
        places = _places(new, base)
        reply = None
        if places is not None and len(told) <= PART_BYTES_MAX and len(steps) <= FITS_MAX:
            job = Job(
                JobKind.ENCODE,
                new=places[0],
                base=places[1],
                step=step,
                base_step=base_step,
                digest=digest,
                base_digest=base_digest,
                in_bytes=len(told),
                fits=len(steps),
            )
            reply = self._ask(job, told)
        if reply is None:
            return HERE.encode(
                new, base, plan, step=step, base_step=base_step, digest=digest, base_digest=base_digest,
                fits=fits,
            )  # fmt: skip
        if reply.fits:
            parse_fits(reply.fits, fits, steps)
        return _encoded(reply), reply.answer.cpu_ns / 1e9

    def encode_alone(self, data: memoryview, *, step: int, digest: bytes) -> Encoded | None:
        """See `ChunkWork`."""
        place = place_of(data)
        reply = place and self._ask(Job(JobKind.ENCODE_ALONE, new=place, step=step, digest=digest))
        return _encoded(reply) if reply else HERE.encode_alone(data, step=step, digest=digest)

    def decode(self, payload: Buffer, out: memoryview) -> tuple[Use, ...]:
        """See `ChunkWork`."""
        place = place_of(out)
        reply = place and self._ask(Job(JobKind.DECODE, out=place, in_bytes=len(payload)), payload)
        return parse_uses(reply.uses, reply.answer.uses) if reply else HERE.decode(payload, out)

    def apply(
        self, payload: Buffer, old: memoryview, out: memoryview, *, old_digest: bytes
    ) -> tuple[tuple[Use, ...], memoryview | bytes]:
        """See `ChunkWork`."""
        places = _places(out, old)
        reply = None
        if places is not None:
            job = Job(
                JobKind.APPLY, out=places[0], base=places[1], base_digest=old_digest, in_bytes=len(payload)
            )
            reply = self._ask(job, payload)
        if reply is None:
            return HERE.apply(payload, old, out, old_digest=old_digest)
        return parse_uses(reply.uses, reply.answer.uses), reply.result

    def _ask(self, job: Job, *given: Buffer) -> Reply | None:
        """A worker's answer; None when the work is to be done here. Raises what the codec raised there."""
        try:
            reply = self._workers.ask(job, given)
        except WorkerLostError as error:
            why = str(error)
        else:
            if reply.answer.status in (Status.DONE, Status.NOTHING):
                self._counters.add("chunks_by_workers")
                return reply
            why = bytes(reply.result).decode(errors="replace")
            if reply.answer.status == Status.MISPREDICTED:
                raise MispredictedError(why)
            if reply.answer.status == Status.BAD_CODE:
                raise CodecError(why)
            logger.warning("a worker process refused a job: %s", why)
        self._counters.add("chunks_not_by_workers")
        logger.debug("a chunk is worked on in the data process: %s", why)
        return None


def _places(first: memoryview, second: memoryview | None) -> tuple[Place, Place | None] | None:
    """Where two chunks lie, of which the second may be missing; None if not in segments."""
    a, b = place_of(first), None if second is None else place_of(second)
    return None if a is None or (second is not None and b is None) else (a, b)


def _encoded(reply: Reply) -> Encoded | None:
    if reply.answer.status == Status.NOTHING:
        return None
    return Encoded(reply.result, parse_uses(reply.uses, reply.answer.uses))
