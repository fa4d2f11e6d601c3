"""The bulk lane's bytes: hello and frame headers, packed, parsed and checked. Pure.

Everything that a peer claims is bounded here, before anybody allocates or reads a payload. What the
fields mean is in docs/formats.md, "Bulk lane". No sockets and no state of a transfer live here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from ..chunks import CHUNK_LENGTH_MAX, ChunkTable
from ..codec.format import OVERHEAD_BYTES_MAX
from ..digests import DIGEST_BYTES
from ..errors import FrameError

HELLO_BYTES = 64
FRAME_BYTES = 64
TICKET_BYTES = 32
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = CHUNK_LENGTH_MAX
#: What a codec may add to a chunk that does not compress.
CODEC_OVERHEAD_BYTES_MAX = OVERHEAD_BYTES_MAX
ERROR_BYTES_MAX = 1024
#: Most chunks that one WANT names.
WANT_INDEXES_MAX = 1024
#: Connections of one transfer.
STREAMS_MAX = 16

_HELLO_MAGIC = b"FCLANE1\n"
_HELLO_VERSION = 2
_FRAME_MAGIC = b"FCFR"
_FRAME_VERSION = 1
_HELLO = struct.Struct("<8sHHIII32s")
_FRAME = struct.Struct("<4sBBBBIIIIQ16sQ")
_CHECKSUM = struct.Struct("<Q")
_BODY_BYTES = 56
_NO_DIGEST = bytes(DIGEST_BYTES)
assert _HELLO.size == _FRAME.size == _BODY_BYTES


class Kind(IntEnum):
    """What a frame is."""

    #: From the source: one chunk.
    DATA = 1
    #: From the reader: it has all that it wants.
    END = 2
    #: From either: why it hangs up.
    ERROR = 3
    #: From the reader: send these chunks.
    WANT = 4


class Codec(IntEnum):
    """How a DATA payload is encoded. Only what is listed here may travel."""

    RAW = 0
    #: An encoded chunk, docs/formats.md; its own header says which base it needs.
    ENCODED = 1


@dataclass(frozen=True, slots=True)
class Hello:
    """First words of a connection: the reader's ticket."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """One frame's header; for a WANT `chunk` is a number of chunks."""

    kind: Kind
    chunk: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    offset: int = 0
    digest: bytes = _NO_DIGEST
    codec: Codec = Codec.RAW


def pack_hello(hello: Hello) -> bytes:
    """The 64 bytes of a hello."""
    body = _HELLO.pack(_HELLO_MAGIC, _HELLO_VERSION, 0, 0, 0, 0, hello.ticket)
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_hello(data: bytes | bytearray | memoryview) -> Hello:
    """Read a hello of 64 bytes.

    Raises:
        FrameError: it is anything else than a well-formed hello of this version.
    """
    body = _checked_body(data, _HELLO_MAGIC, "hello")
    _, version, *reserved, ticket = _HELLO.unpack(body)
    _need(version == _HELLO_VERSION, f"hello has version {version}, this side speaks {_HELLO_VERSION}")
    _need(not any(reserved), "hello has reserved bits set")
    return Hello(ticket)


def pack_frame(header: FrameHeader) -> bytes:
    """The 64 bytes of a frame header."""
    body = _FRAME.pack(
        _FRAME_MAGIC,
        _FRAME_VERSION,
        header.kind,
        header.codec,
        0,
        header.chunk,
        header.raw_bytes,
        header.encoded_bytes,
        0,
        header.offset,
        header.digest,
        0,
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_frame(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Read a frame header of 64 bytes; its payload's size is then within the bounds of its kind.

    Raises:
        FrameError: damaged, of another version, of an unknown kind or codec, or out of bounds.
    """
    body = _checked_body(data, _FRAME_MAGIC, "frame")
    (_, version, kind, codec, flags, chunk, raw, encoded, reserved_a, offset, digest, reserved_b) = (
        _FRAME.unpack(body)
    )
    _need(version == _FRAME_VERSION, f"frame has version {version}, this side speaks {_FRAME_VERSION}")
    _need(flags == 0 and reserved_a == 0 and reserved_b == 0, "frame has reserved bits set")
    try:
        header = FrameHeader(
            kind=Kind(kind),
            chunk=chunk,
            raw_bytes=raw,
            encoded_bytes=encoded,
            offset=offset,
            digest=digest,
            codec=Codec(codec),
        )
    except ValueError:
        raise FrameError(f"frame has kind {kind} and codec {codec}, which this side does not know") from None
    _check_bounds(header)
    return header


def check_data_frame(header: FrameHeader, table: ChunkTable) -> None:
    """Check that a DATA frame is one of the shard's chunks, with the size and place it must have.

    Raises:
        FrameError: it is not.
    """
    _need(header.kind == Kind.DATA, f"a DATA frame was due, not {header.kind.name}")
    _need(header.chunk < len(table), f"chunk {header.chunk} does not exist: the shard has {len(table)}")
    start, stop = table.range(header.chunk)
    _need(header.offset == start, f"chunk {header.chunk} is at {start}, not at {header.offset}")
    _need(
        header.raw_bytes == stop - start,
        f"chunk {header.chunk} has {stop - start} bytes, not {header.raw_bytes}",
    )


def pack_want(chunks: Sequence[int]) -> tuple[bytes, bytes]:
    """Header and payload of a WANT of 1 to WANT_INDEXES_MAX chunks."""
    assert 1 <= len(chunks) <= WANT_INDEXES_MAX
    payload = struct.pack(f"<{len(chunks)}I", *chunks)
    size = len(payload)
    header = FrameHeader(kind=Kind.WANT, chunk=len(chunks), raw_bytes=size, encoded_bytes=size)
    return pack_frame(header), payload


def parse_want(payload: bytes | bytearray, count: int) -> list[int]:
    """Indexes that a WANT names, of a shard with `count` chunks, none twice.

    Raises:
        FrameError: a chunk does not exist or is named twice.
    """
    named = list(struct.unpack(f"<{len(payload) // 4}I", payload))
    _need(
        len(set(named)) == len(named) and max(named) < count,
        f"WANT names a chunk twice, or one that a shard of {count} chunks does not have",
    )
    return named


def pack_error(sentence: str) -> tuple[bytes, bytes]:
    """Header and payload of an ERROR."""
    payload = sentence.encode()[:ERROR_BYTES_MAX]
    size = len(payload)
    return pack_frame(FrameHeader(kind=Kind.ERROR, raw_bytes=size, encoded_bytes=size)), payload


def _checked_body(data: bytes | bytearray | memoryview, magic: bytes, what: str) -> bytes:
    _need(len(data) == _BODY_BYTES + _CHECKSUM.size, f"a {what} has 64 bytes, not {len(data)}")
    body = bytes(data[:_BODY_BYTES])
    _need(body.startswith(magic), f"this is no {what} of the lane")
    (checksum,) = _CHECKSUM.unpack(data[_BODY_BYTES:])
    _need(xxhash.xxh3_64_intdigest(body) == checksum, f"a {what} arrived damaged")
    return body


def _check_bounds(header: FrameHeader) -> None:
    raw, encoded = header.raw_bytes, header.encoded_bytes
    if header.kind == Kind.DATA:
        _need(1 <= raw <= CHUNK_BYTES_MAX, f"a chunk of {raw} bytes is not from 1 byte to 16 MiB")
        _need(
            1 <= encoded <= raw + CODEC_OVERHEAD_BYTES_MAX,
            f"a chunk of {raw} bytes may not take {encoded} bytes on the lane",
        )
        _need(
            header.codec != Codec.RAW or encoded == raw,
            f"a raw chunk of {raw} bytes may not take {encoded} bytes on the lane",
        )
        return
    plain = header.codec == Codec.RAW and header.offset == 0 and header.digest == _NO_DIGEST
    _need(plain and raw == encoded, f"{header.kind.name} frame has fields set that it must not have")
    if header.kind == Kind.END:
        _need(raw == 0 and header.chunk == 0, "END has no payload")
    elif header.kind == Kind.WANT:
        _need(
            1 <= header.chunk <= WANT_INDEXES_MAX and raw == 4 * header.chunk,
            f"WANT of {header.chunk} chunks lists {raw} bytes of indexes",
        )
    else:
        _need(header.chunk == 0 and raw <= ERROR_BYTES_MAX, "ERROR has at most 1024 bytes")


def _need(ok: bool, why: str) -> None:
    if not ok:
        raise FrameError(why)
