"""JSON documents that carry a checksum of all that follows it, so that one changed byte is found.

{"checksum": "0123456789abcdef", ...}
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

_BEGIN = b'{"checksum": "'
_DIGITS = 16
_END = b'", '


def dumps(document: dict[str, Any]) -> bytes:
    """A document, which is not empty, with its checksum."""
    body = json.dumps(document).encode()[1:]
    return _BEGIN + xxhash.xxh3_64_hexdigest(body).encode() + _END + body


def loads(data: bytes) -> dict[str, Any]:
    """A document.

    Raises:
        ValueError: it is none, or not what was written.
    """
    head = len(_BEGIN) + _DIGITS + len(_END)
    checksum, body = data[len(_BEGIN) : len(_BEGIN) + _DIGITS], data[head:]
    if data[:head] != _BEGIN + checksum + _END or checksum != xxhash.xxh3_64_hexdigest(body).encode():
        raise ValueError("its checksum is that of other bytes, or missing")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document
