"""Encoded chunk → the chunk, and → its reverse delta. Pure; several threads may each decode a chunk.

Trusts nothing: malformed input is a CodecError, never a crash, a hang or more memory than the chunk takes.
What comes out is the chunk with the digest in the header, or an error.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from fastcheck_proto.v1 import layout_pb2 as pb

from ..digests import chunk_digest
from ..errors import CodecError, MispredictedError
from . import adam, sgd
from .bounded import decode_bounded
from .chunk_plan import ChunkPlan, Run, Unit
from .encoder import Use, encode_gaps, uses
from .format import (
    OVERHEAD_BYTES_MAX,
    SECTIONS_MAX,
    CodecId,
    Header,
    Section,
    pack,
    parse,
    parse_header,
)
from .index import decode_index
from .rounded import decode_rounded, encode_rounded, master_of
from .runs import decode_run, encode_run, need_base, reverse_run
from .scratch import SCRATCH


def read_header(payload: Any) -> Header:
    """What an encoded chunk says of itself; its checksum holds.

    Raises:
        CodecError: damaged, of another version, or impossible.
    """
    return parse_header(payload)[0]


def decode(
    payload: Any,
    base: Any | None,
    out: Any,
    *,
    digest: bytes | None = None,
    base_digest: bytes | None = None,
) -> tuple[Use, ...]:
    """Write the chunk into `out`, a writable buffer of its size that does not overlap `base`.

    `digest` is that of the chunk which it has to be, `base_digest` that of the bytes in `base`, where they are known.

    Raises:
        CodecError: malformed, another chunk, or made for another base; the content of `out` is undefined.
        MispredictedError: well-formed, but the outcome is not the chunk: this side computes otherwise, or
            `base` is not what it was.
    """
    header, sections = parse(payload)
    if digest not in {None, header.digest}:
        raise CodecError(
            f"an encoded chunk of step {header.step} holds another chunk than the one that is wanted"
        )
    base = _check_use(header, base, out, base_digest)
    _clear_gaps(_covered(sections, header.raw_bytes), out)
    _decode_sections(sections, base, out)
    if chunk_digest(out) != header.digest:
        raise MispredictedError(
            f"a chunk of step {header.step} decoded against step {header.base_step} is not what was encoded"
        )
    return uses(sections)


def decode_range(payload: Any, base: Any | None, out: Any, start: int, stop: int) -> None:
    """Write at least bytes [start, stop) of the chunk to their places in `out`, which has the chunk's size.

    Only sections that are needed are decoded, so the chunk's digest cannot be checked: the payload's checksum is.

    Raises:
        CodecError: malformed, or it needs a base and there is none.
    """
    header, sections = parse(payload)
    base = _check_use(header, base, out, None)
    _clear_gaps(_covered(sections, header.raw_bytes), out)
    runs = [runs_of(section, header.raw_bytes) for section in sections]
    wanted = [any(r.offset < stop and start < r.stop for r in of_section) for of_section in runs]
    index_at = {run.offset: index for index, of_section in enumerate(runs) for run in of_section}
    for index, section in enumerate(sections):
        if wanted[index] and section.codec == CodecId.ROUNDED:
            master = index_at.get(master_of(section, header.raw_bytes).offset)
            if master is None:
                raise CodecError("an encoded chunk is malformed: a master that no section holds")
            wanted[master] = True
    _decode_sections([s for s, yes in zip(sections, wanted, strict=True) if yes], base, out)


def reverse(payload: Any, base: Any, new: Any) -> bytes | None:
    """The reverse delta: an encoded chunk that `decode` turns, with `new` as its base, into `base`.

    `new` is what `payload` and `base` decode to. Most bodies serve both ways and are taken over as they are. The
    reverse delta was decoded once: the bytes that it leads to may go when this has returned. None: there is none that
    leads there and fits the bounds of an encoded chunk.

    Raises:
        CodecError: `payload` is malformed.
    """
    header, sections = parse(payload)
    if len(base) != header.raw_bytes or len(new) != header.raw_bytes:
        raise CodecError("an encoded chunk is malformed: it is for a chunk of another size")
    SCRATCH.empty_arena(header.raw_bytes + 4096)
    covered = _covered(sections, header.raw_bytes)
    with np.errstate(all="ignore"):
        back = [_reverse(section, base, new) for section in sections]
        back += encode_gaps(covered, base, new)
    back.sort(key=lambda s: (s.codec == CodecId.ROUNDED, s.offset))
    old_digest = header.base_digest if header.needs_base else chunk_digest(base)
    result = pack(
        Header(header.raw_bytes, True, header.base_step, header.step, old_digest, header.digest), back
    )
    if len(result) > header.raw_bytes + OVERHEAD_BYTES_MAX or len(back) > SECTIONS_MAX:
        return None
    try:
        decode(result, new, SCRATCH.bytes("reverse", header.raw_bytes))
    except CodecError:  # a defect of ours: this costs the bytes that it would have saved, and nothing else
        return None
    return result


def plan_of(payload: Any) -> ChunkPlan:
    """A plan by which a chunk that came encoded can be encoded anew, against another base.

    Raises:
        CodecError: malformed.
    """
    header, sections = parse(payload)
    runs = _covered(sections, header.raw_bytes)
    return ChunkPlan(header.raw_bytes, tuple(Unit((run,)) for run in runs))


def runs_of(section: Section, chunk_bytes: int) -> list[Run]:
    """The runs that a section stands for; CodecError when they do not fit the chunk."""
    if section.codec == CodecId.ADAM:
        return adam.parse_extra(section, chunk_bytes)[0]
    if section.codec == CodecId.SGD:
        return list(sgd.parse_extra(section, chunk_bytes)[0])
    return [Run(section.offset, section.elements, section.dtype, pb.ROLE_UNSPECIFIED)]


def _check_use(header: Header, base: Any | None, out: Any, base_digest: bytes | None) -> Any | None:
    """The base that sections may use: none where the header says that they need none."""
    if len(out) != header.raw_bytes:
        raise CodecError(f"an encoded chunk holds {header.raw_bytes} bytes, {len(out)} were expected")
    if not header.needs_base:
        return None
    if base is None or len(base) != header.raw_bytes:
        raise CodecError(
            f"a chunk is encoded against step {header.base_step}, which is not here in that size"
        )
    if base_digest is not None and base_digest != header.base_digest:
        raise CodecError(f"a chunk is encoded against other bytes of step {header.base_step} than are here")
    return base


def _covered(sections: list[Section], chunk_bytes: int) -> list[Run]:
    """All runs of all sections, by offset; CodecError when two would write to one place."""
    runs = sorted((run for s in sections for run in runs_of(s, chunk_bytes)), key=lambda r: r.offset)
    if any(a.stop > b.offset for a, b in pairwise(runs)):
        raise CodecError("an encoded chunk is malformed: its sections overlap")
    return runs


def _clear_gaps(runs: list[Run], out: Any) -> None:
    """Zeros wherever no section writes; `runs` by offset."""
    whole = np.frombuffer(out, np.uint8)
    at = 0
    for run in runs:
        whole[at : run.offset] = 0
        at = run.stop
    whole[at:] = 0


def _decode_sections(sections: list[Section], base: Any | None, out: Any) -> None:
    with np.errstate(all="ignore"):
        for section in sections:
            if section.codec == CodecId.ADAM:
                adam.decode_adam(section, need_base(base), out)
            elif section.codec == CodecId.SGD:
                sgd.decode_sgd(section, need_base(base), out)
            elif section.codec == CodecId.ROUNDED:
                decode_rounded(section, out)
            elif section.codec in (CodecId.INDEX8, CodecId.INDEX4):
                decode_index(section, out)
            elif section.codec == CodecId.BOUNDED:
                decode_bounded(section, need_base(base), out)
            else:
                decode_run(section, base, out)


def _reverse(section: Section, base: Any, new: Any) -> Section:
    if section.codec == CodecId.ADAM:
        return adam.reverse_adam(section, base, new)
    if section.codec == CodecId.SGD:
        return sgd.reverse_sgd(section, base, new)
    run = Run(section.offset, section.elements, section.dtype, pb.ROLE_UNSPECIFIED)
    if section.codec == CodecId.ROUNDED:
        master = master_of(section, len(new))
        return encode_rounded(run, master, base) or encode_run(run, base, new)
    return reverse_run(section, run, base, new)
