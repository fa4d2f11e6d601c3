"""Copying a flattened state into a mapped segment, as fast as memory allows. All raw addresses live here.

Contiguous CPU tensors are cut into pieces and moved by `memmove` on a few threads: it releases the
interpreter lock, and unlike torch's copy_ it starts no team of OpenMP threads per calling thread.
Everything else (strided, on a GPU) goes through torch on the caller's thread, whose stream it is.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .state import dtypes
from .state.flatten import FlatState, Piece
from .state.places import Move

_PIECE_BYTES = 16 << 20
#: Below this, waking threads costs more than they save.
_PARALLEL_BYTES_MIN = 32 << 20


def default_copy_threads() -> int:
    """Four saturate the memory of most machines; never more than the cores that this process may use."""
    return min(4, len(os.sched_getaffinity(0)))


class Copier:
    """Copies states with a fixed number of threads, the caller's included."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, flat: FlatState, segment: torch.Tensor) -> None:
        """Write tensors, header, and zeros between them to `segment` (flat uint8, at least state_bytes long)."""
        assert segment.numel() >= flat.state_bytes
        plain: list[Piece] = []
        others: list[Piece] = []
        base, end = segment.data_ptr(), 0
        for piece in flat.pieces:
            by_address = piece.tensor.is_cpu and piece.tensor.is_contiguous()
            (plain if by_address else others).append(piece)
            if piece.offset > end:  # what an earlier state left there is no part of this one
                ctypes.memset(base + end, 0, piece.offset - end)
            end = piece.offset + piece.bytes
        todo = deque(_moves(plain, base))
        helpers = []
        if sum(piece.bytes for piece in plain) >= _PARALLEL_BYTES_MIN:
            helpers = [self._helpers().submit(_drain, todo) for _ in range(self._threads - 1)]
        try:
            for piece in others:
                place = segment[piece.offset : piece.offset + piece.bytes]
                source = piece.tensor
                into = place.view(source.dtype).view(source.shape)
                dtypes.carrier(into).copy_(dtypes.carrier(source))
            _drain(todo)
        finally:
            todo.clear()  # after an error the helpers must not go on with memory that is given back
            for helper in helpers:
                helper.result()
        ctypes.memset(base + end, 0, flat.header_offset - end)
        ctypes.memmove(base + flat.header_offset, flat.header, len(flat.header))
        end = flat.header_offset + len(flat.header)
        ctypes.memset(base + end, 0, flat.state_bytes - end)

    def pour(self, moves: Sequence[Move]) -> None:
        """Move bytes from address to address, on all threads if they are many."""
        todo = deque(_cut(moves))
        helpers = []
        if sum(size for _, _, size in moves) >= _PARALLEL_BYTES_MIN:
            helpers = [self._helpers().submit(_drain, todo) for _ in range(self._threads - 1)]
        try:
            _drain(todo)
        finally:
            todo.clear()
            for helper in helpers:
                helper.result()

    def _helpers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="fastcheck-copy")
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _cut(moves: Sequence[Move]) -> Iterator[Move]:
    for into, source, size in moves:
        for start in range(0, size, _PIECE_BYTES):
            yield into + start, source + start, min(_PIECE_BYTES, size - start)


def _moves(pieces: list[Piece], base: int) -> Iterator[Move]:
    for piece in pieces:
        source = piece.tensor.data_ptr()
        for start in range(0, piece.bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, piece.bytes - start)
            yield base + piece.offset + start, source + start, size


def _drain(todo: deque[Move]) -> None:
    while True:
        try:
            move = todo.popleft()
        except IndexError:
            return
        ctypes.memmove(*move)


def contiguous_bytes(tensor: torch.Tensor, piece_bytes: int) -> Iterator[bytes]:
    """A tensor's bytes in order, in pieces of at most `piece_bytes`; from any device, however strided."""
    if not tensor.numel():
        return
    source = dtypes.carrier(tensor).contiguous().cpu()
    size = source.numel() * source.dtype.itemsize
    for start in range(0, size, piece_bytes):
        yield ctypes.string_at(source.data_ptr() + start, min(piece_bytes, size - start))
