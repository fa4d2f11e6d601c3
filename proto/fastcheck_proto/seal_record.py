"""The record of a seal: what a trainer says of a state, in the segment's own last bytes.

A trainer posts `Sealed` to its stream and trains on. If it dies before the message has left it, the daemon finds the
record in the shared memory: what was sealed when `save` returned is never lost with the trainer. A record is written
after the state and counts only as a whole, for the one loan of the segment that it names.

    | state | ... | body | magic 8 | digest 16 | body bytes 4 |   the last 28 bytes are at the segment's end

Nothing in it is trusted: what is read is parsed and checked like the message.
"""

from __future__ import annotations

import hashlib
import struct

_KIND = b"FCSEAL"
VERSION = 1
_MAGIC = _KIND + b"%02d" % VERSION
_FOOTER = struct.Struct("<8s16sI")
#: What a record takes beside its body.
FOOTER_BYTES = _FOOTER.size
#: Of a body: no message of a trainer is larger.
BODY_BYTES_MAX = 16 << 20


class NewerRecordError(ValueError):
    """A record of a version that this side does not read: its trainer is newer than the daemon."""


def write_record(view: memoryview, segment_id: str, body: bytes) -> None:
    """Write the record of a loan into a segment; `view` is all of it, and its end is not part of the state."""
    end = len(view) - FOOTER_BYTES
    view[end - len(body) : end] = body
    # Last, so that a process killed in between leaves no record.
    view[end:] = _FOOTER.pack(_MAGIC, _digest(segment_id, body), len(body))


def read_record(view: memoryview, segment_id: str) -> bytes | None:
    """The body of a loan's record; None: there is no whole one.

    Raises:
        NewerRecordError: there may be one, of another version.
    """
    end = len(view) - FOOTER_BYTES
    if end < 0:
        return None
    magic, digest, length = _FOOTER.unpack(view[end:])
    if magic.startswith(_KIND) and magic != _MAGIC and magic[len(_KIND) :].isdigit():
        raise NewerRecordError(
            f"a seal record has version {int(magic[len(_KIND) :])}, this daemon reads {VERSION}: upgrade the daemon"
        )
    if magic != _MAGIC or length > min(end, BODY_BYTES_MAX):
        return None
    body = bytes(view[end - length : end])
    return body if _digest(segment_id, body) == digest else None


def _digest(segment_id: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=segment_id.encode()[:64]).digest()
