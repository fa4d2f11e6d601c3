"""Encoded chunks as bytes: packing, and parsing with every claim checked. Pure.

docs/formats.md, "Encoded chunk", describes the format. Parsing allocates nothing that grows with a
claim: afterwards every offset, size and count is within the chunk and the payload, sections do not overlap,
and the checksum over all of it holds. What the numbers mean is the codecs' matter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn, TypeAlias

import xxhash

from ..chunks import CHUNK_LENGTH_MAX
from ..digests import DIGEST_BYTES
from ..errors import CodecError
from .dtypes import DType

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES = 96
SECTION_BYTES = 32
PLANE_BYTES = 8
#: More sections than this in a chunk are not worth their headers: it travels raw.
SECTIONS_MAX = 4096
#: What an encoded chunk may take beyond the chunk: a reverse delta that does not shrink still has a header.
OVERHEAD_BYTES_MAX = 1024
PLANES_MAX = 32
EXTRA_BYTES_MAX = 256
NO_DIGEST = bytes(DIGEST_BYTES)

_MAGIC = b"FCEC"
_VERSION = 1
_NEEDS_BASE = 1
_HEADER = struct.Struct("<4sBBHIIQQ16s16s24s")
_CHECKSUM = struct.Struct("<Q")
_SECTION = struct.Struct("<BBBBIIII12s")
_PLANE = struct.Struct("<BBHI")
assert _HEADER.size + _CHECKSUM.size == HEADER_BYTES
assert _SECTION.size == SECTION_BYTES and _PLANE.size == PLANE_BYTES


class CodecId(IntEnum):
    """Codecs by their number in encoded chunks; numbers are never reused. Names are those of docs/formats.md."""

    RAW = 0
    SAME = 1
    PLANES = 2
    DELTA = 3
    ROWS = 4
    ROUNDED = 5
    ADAM = 6
    SGD = 7
    INDEX8 = 8
    INDEX4 = 9
    BOUNDED = 10

    @property
    def label(self) -> str:
        """Name for people."""
        return self.name.lower()


#: Section flag: the body tells the way from the newer numbers to the older.
REVERSED = 1


class PlaneKind(IntEnum):
    """How one plane is stored."""

    CONSTANT = 0
    RAW = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class Plane:
    """One byte of every number: all the same (`value`), as they are, or compressed."""

    kind: PlaneKind
    value: int = 0
    body: Buffer = b""


@dataclass(frozen=True, slots=True)
class Section:
    """One codec's part of a chunk. `offset` (bytes) and `elements` name its run, of a unit the first."""

    codec: CodecId
    dtype: DType
    offset: int
    elements: int
    flags: int = 0
    extra: bytes = b""
    planes: tuple[Plane, ...] = ()

    @property
    def body_bytes(self) -> int:
        """Planes without their table."""
        return sum(len(plane.body) for plane in self.planes)

    @property
    def encoded_bytes(self) -> int:
        """All of it."""
        return SECTION_BYTES + len(self.extra) + PLANE_BYTES * len(self.planes) + self.body_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What an encoded chunk says of itself. Digests are those of chunks; NO_DIGEST without a base."""

    raw_bytes: int
    needs_base: bool
    step: int
    base_step: int
    digest: bytes
    base_digest: bytes


def pack(header: Header, sections: Sequence[Section]) -> bytes:
    """An encoded chunk."""
    parts: list[Buffer] = [b""]
    for section in sections:
        parts.append(
            _SECTION.pack(
                section.codec,
                section.dtype,
                section.flags,
                len(section.planes),
                section.offset,
                section.elements,
                section.body_bytes,
                len(section.extra),
                bytes(12),
            )
        )
        parts.append(section.extra)
        parts += [_PLANE.pack(p.kind, p.value, 0, len(p.body)) for p in section.planes]
        parts += [p.body for p in section.planes]
    size = HEADER_BYTES + sum(map(len, parts))
    parts[0] = _pack_header(header, len(sections), size)
    check = xxhash.xxh3_64()
    for part in parts:
        check.update(part)
    parts.insert(1, _CHECKSUM.pack(check.intdigest()))
    return b"".join(parts)


def _pack_header(header: Header, sections: int, size: int) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        _NEEDS_BASE if header.needs_base else 0,
        sections,
        header.raw_bytes,
        size,
        header.base_step,
        header.step,
        header.digest,
        header.base_digest or NO_DIGEST,
        bytes(24),
    )


def parse_header(payload: Buffer) -> tuple[Header, int]:
    """The header, and the number of sections behind it.

    Raises:
        CodecError: damaged, of another version, or impossible.
    """
    if not HEADER_BYTES <= len(payload) <= CHUNK_LENGTH_MAX + OVERHEAD_BYTES_MAX:
        _bad(f"it has {len(payload)} bytes")
    head = bytes(payload[:HEADER_BYTES])
    (magic, version, flags, sections, raw, size, base_step, step, digest, base_digest, reserved) = (
        _HEADER.unpack(head[: _HEADER.size])
    )
    if magic != _MAGIC:
        _bad("it is none")
    if version != _VERSION:
        _bad(f"it has version {version}, this side reads {_VERSION}: upgrade the node that reads it")
    if size != len(payload):
        _bad(f"it says {size} bytes and has {len(payload)}")
    check = xxhash.xxh3_64(head[: _HEADER.size])
    check.update(memoryview(payload)[HEADER_BYTES:])
    if _CHECKSUM.pack(check.intdigest()) != head[_HEADER.size :]:
        _bad("its checksum does not match")
    needs_base = bool(flags & _NEEDS_BASE)
    if flags & ~_NEEDS_BASE or reserved != bytes(24) or (not needs_base and base_digest != NO_DIGEST):
        _bad("it has fields set that it must not have")
    if not 0 < raw <= CHUNK_LENGTH_MAX or sections > SECTIONS_MAX or size > raw + OVERHEAD_BYTES_MAX:
        _bad(f"a chunk of {raw} bytes in {sections} sections is out of bounds")
    return Header(raw, needs_base, step, base_step, digest, base_digest), sections


def parse(payload: Buffer) -> tuple[Header, list[Section]]:
    """Header and sections, each within the chunk and the payload; plane bodies are views of `payload`.

    Raises:
        CodecError: as `parse_header`, or a section is malformed.
    """
    header, count = parse_header(payload)
    view = memoryview(payload)
    at = HEADER_BYTES
    sections = []
    for _ in range(count):
        section, at = _parse_section(view, at, header.raw_bytes)
        sections.append(section)
    if at != len(view):
        _bad(f"{len(view) - at} bytes follow its last section")
    return header, sections


def _parse_section(view: memoryview, at: int, raw_bytes: int) -> tuple[Section, int]:
    if at + SECTION_BYTES > len(view):
        _bad("a section is cut off")
    codec, dtype, flags, planes, offset, elements, body, extra, reserved = _SECTION.unpack(
        view[at : at + SECTION_BYTES]
    )
    at += SECTION_BYTES
    try:
        codec_id, number = CodecId(codec), DType(dtype)
    except ValueError:
        _bad(f"codec {codec} or dtype {dtype} is not known to this side")
    if flags & ~REVERSED or reserved != bytes(12) or planes > PLANES_MAX or extra > EXTRA_BYTES_MAX:
        _bad("a section has fields out of bounds")
    if offset % number.bytes or elements == 0 or offset + elements * number.bytes > raw_bytes:
        _bad("a section lies outside of the chunk")
    if at + extra + PLANE_BYTES * planes + body > len(view):
        _bad("a section is cut off")
    own = bytes(view[at : at + extra])
    at += extra
    bodies_at = at + PLANE_BYTES * planes
    end = bodies_at + body
    table = []
    for _ in range(planes):
        plane, bodies_at = _parse_plane(view, at, bodies_at, end)
        table.append(plane)
        at += PLANE_BYTES
    if bodies_at != end:
        _bad("the planes of a section do not make its body")
    return Section(codec_id, number, offset, elements, flags, own, tuple(table)), end


def _parse_plane(view: memoryview, at: int, body_at: int, end: int) -> tuple[Plane, int]:
    kind, value, reserved, size = _PLANE.unpack(view[at : at + PLANE_BYTES])
    if (
        kind > PlaneKind.ZSTD
        or reserved
        or (kind == PlaneKind.CONSTANT) != (size == 0)
        or body_at + size > end
    ):
        _bad("a plane is malformed")
    if kind != PlaneKind.CONSTANT and value:
        _bad("a plane is malformed")
    return Plane(PlaneKind(kind), value, view[body_at : body_at + size]), body_at + size


def _bad(why: str) -> NoReturn:
    raise CodecError(f"an encoded chunk is malformed: {why}")
