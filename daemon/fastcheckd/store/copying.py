"""Copies a chunk without holding the interpreter lock: a slice assignment would stop every other thread."""

from __future__ import annotations

import numpy as np

from ..codec.format import Buffer


def copy_bytes(into: memoryview, source: Buffer) -> None:
    """Copy `source` to `into`, which has its size and is writable."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
