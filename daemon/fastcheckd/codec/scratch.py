"""Working memory of one thread, kept between chunks: fresh pages would cost more than the arithmetic.

Per thread at most one chunk's planes for three tensors (its own size) and a few blocks: about twice a chunk.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Elements that are worked on at a time: a few arrays of them fit in a core's caches, and numpy's cost per call is
#: spread over enough of them. Measured from 8192 to 400000: flat from here to 131072, slower on both sides.
BLOCK = 65536

U8 = NDArray[np.uint8]


class Scratch(threading.local):
    """Named arrays, valid until their name is asked for again, and an arena, valid until it is emptied."""

    def __init__(self) -> None:
        self._arrays: dict[str, U8] = {}
        self._arena = np.empty(0, np.uint8)
        self._taken = 0

    def empty_arena(self, size: int) -> None:
        """Begin a chunk that will probably take `size` bytes of the arena."""
        if len(self._arena) < size:
            self._arena = np.empty(size, np.uint8)
        self._taken = 0

    def take(self, size: int) -> U8:
        """`size` bytes of the arena; of fresh memory when it has no more."""
        start = self._taken
        if start + size > len(self._arena):
            return np.empty(size, np.uint8)
        self._taken = -(-(start + size) // 64) * 64
        return self._arena[start : start + size]

    def bytes(self, name: str, size: int) -> U8:
        """At least `size` bytes, exactly that many of them; content undefined."""
        array = self._arrays.get(name)
        if array is None or len(array) < size:
            array = self._arrays[name] = np.empty(size, np.uint8)
        return array[:size]

    def array(self, name: str, elements: int, dtype: Any) -> NDArray[Any]:
        """An array of `elements` numbers; content undefined."""
        return self.bytes(name, elements * np.dtype(dtype).itemsize).view(dtype)


SCRATCH = Scratch()
