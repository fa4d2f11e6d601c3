"""Copying a flattened state into a mapped segment, as fast as memory allows. All raw addresses live here.

Contiguous CPU tensors are cut into pieces and moved by `memmove` on a few threads: it releases the
interpreter lock, and unlike torch's copy_ it starts no team of OpenMP threads per calling thread.
Tensors on a GPU are the business of `gpu`; what is strided goes through torch on the caller's thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from operator import attrgetter, not_

import torch

from fastcheck_proto.conventions import TENSOR_ALIGNMENT_BYTES

from .errors import SaveFailedError
from .gpu import Cuda, Mark, Pair
from .segments import populate
from .state.flatten import FlatState, Piece, uncollected
from .state.records import Move
from .state.tensors import carrier

#: Long moves are cut into pieces of this to twice this. Beyond a part of the processor's last cache, 43 MB where it has
#: 105, memmove writes past the caches, and takes two thirds of the time.
_PIECE_BYTES = 48 << 20
#: Pages are made present in blocks of this at least.
_POPULATE_BYTES = 16 << 20
#: Below this, waking threads costs more than they save.
_PARALLEL_BYTES_MIN = 32 << 20

#: Pieces begin at multiples of this, so a gap is a part of one line as a rule.
_LINE_BYTES = TENSOR_ALIGNMENT_BYTES

#: Copies one run of bytes. Tests put a gate in its place, to stop a copy in the middle.
move_bytes = ctypes.memmove


def default_copy_threads() -> int:
    """Four saturate the memory of most machines; never more than the cores that this process may use."""
    return min(4, len(os.sched_getaffinity(0)))


class Moves:
    """Runs of bytes still to be copied; any number of threads may work them off together."""

    def __init__(self, moves: Iterable[Move]) -> None:
        #: Destination, source, bytes. Without a source: the destination's pages are only made present.
        self._todo = deque(moves)
        self._changed = threading.Condition()
        #: Threads that copy.
        self._workers = 0
        self._error: BaseException | None = None

    def work(self) -> None:
        """Copy until nothing is left to begin; others may still be at their last run."""
        with self._changed:
            self._workers += 1
        try:
            while True:
                try:
                    move = self._todo.popleft()
                except IndexError:
                    return
                if move[1]:
                    move_bytes(*move)
                else:
                    populate(move[0], move[2])
        except BaseException as error:
            self.spoil(error)
            raise
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()

    def spoil(self, error: BaseException) -> None:
        """Something was not copied, or not as it should be: `join` will say so."""
        self._error = self._error or error
        self.cancel()

    def cancel(self) -> None:
        """Begin nothing more: the memory is about to be given back."""
        self._todo.clear()

    def quiet(self) -> None:
        """Wait until nobody copies: for as long as one run takes per thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._workers)

    def join(self) -> None:
        """Wait until nobody copies; raises SaveFailedError if not everything was copied, by whomever."""
        self.quiet()
        if self._error is not None:
            raise SaveFailedError(
                f"the copy into the segment was broken off: {self._error!r}"
            ) from self._error


class ZeroedGaps:
    """Zeros the gaps between the pieces of a state: what an earlier one left in a segment is no part of this one.

    Knows the gaps of the state that it met last: ten thousand tensors have as many, at every save the same.
    """

    def __init__(self) -> None:
        #: Where pieces begin, their sizes, and where the header begins; the lines with gaps of such a state.
        self._places: tuple[list[int], list[int], int] | None = None
        self._lines = torch.empty(0, dtype=torch.int64)

    def zero(self, flat: FlatState, segment: torch.Tensor) -> None:
        """Zero the lines that have gaps, all in one call, before any piece is copied over the rest of them.

        `segment` is flat uint8, at least state_bytes long.
        """
        pieces = flat.pieces
        places = [piece.offset for piece in pieces], [piece.bytes for piece in pieces], flat.header_offset
        if places != self._places:
            self._lines = torch.tensor(_lines_with_gaps(*places), dtype=torch.int64)
            self._places = places
        if len(self._lines):
            lines = segment[: len(segment) // _LINE_BYTES * _LINE_BYTES].view(-1, _LINE_BYTES)
            lines.index_fill_(0, self._lines, 0)


def _lines_with_gaps(offsets: list[int], sizes: list[int], header_offset: int) -> list[int]:
    lines: list[int] = []
    end = 0
    for offset, size in (*zip(offsets, sizes, strict=True), (header_offset, 0)):
        if offset > end:
            lines += range(end // _LINE_BYTES, -(-offset // _LINE_BYTES))
        end = offset + size
    return lines


class Copier:
    """Copies states with a fixed number of threads, the caller's included."""

    def __init__(self, threads: int, gpu: Cuda | None = None) -> None:
        self._threads = threads
        self._gpu = Cuda() if gpu is None else gpu
        self._gaps = ZeroedGaps()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, flat: FlatState, segment: torch.Tensor, *, warm: bool = True) -> None:
        """Write the header, all tensors but those left for later, and zeros between them.

        `segment` is flat uint8, at least state_bytes long; `warm`: its pages were used before.
        """
        assert segment.numel() >= flat.state_bytes
        with uncollected():
            self._gaps.zero(flat, segment)
            far, near = _parted(self._gpu.takes, [piece for piece in flat.pieces if not piece.later])
            contiguous, strided = _parted(torch.Tensor.is_contiguous, near)
            plain, elsewhere = _parted(attrgetter("is_cpu"), contiguous)
            strided += elsewhere
            moves = self.begin(plain, segment, warm=warm)
        base = segment.data_ptr()
        until: Mark = {}
        try:
            if far:
                pairs = [carried(piece, segment) for piece in far]
                until = self._gpu.copy(pairs, self._gpu.mark(piece.tensor for piece in far))
            self.help(moves, sum(piece.bytes for piece in plain))
            for piece in strided:
                into, source = carried(piece, segment)
                into.copy_(source)
            moves.work()
            moves.join()
        finally:
            moves.cancel()  # after an error nobody may go on with memory that is given back
            moves.quiet()
            self._gpu.wait(until)
        ctypes.memmove(base + flat.header_offset, flat.header, len(flat.header))
        end = flat.header_offset + len(flat.header)
        ctypes.memset(base + end, 0, flat.state_bytes - end)

    def begin(self, pieces: Iterable[Piece], segment: torch.Tensor, *, warm: bool = True) -> Moves:
        """The moves for contiguous CPU tensors; nothing is copied yet. The caller keeps the tensors alive."""
        base = segment.data_ptr()
        moves = _moves(pieces, base)
        return Moves(moves if warm else _populated(moves, base + segment.numel()))

    def help(self, moves: Moves, size_bytes: int) -> None:
        """Let the helping threads work on it too, where it is large enough to be worth it."""
        if size_bytes < _PARALLEL_BYTES_MIN or self._threads == 1:
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="fastcheck-copy")
            for _ in range(self._threads - 1):
                self._pool.submit(moves.work)

    def pour(self, moves: Sequence[Move]) -> None:
        """Move bytes from address to address, on all threads if they are many."""
        # The largest first, so that the threads end together.
        todo = Moves(part for move in sorted(moves, key=lambda move: -move[2]) for part in _cut(move))
        try:
            self.help(todo, sum(size for _, _, size in moves))
            todo.work()
            todo.join()
        finally:
            todo.cancel()
            todo.quiet()

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


def carried(piece: Piece, segment: torch.Tensor) -> Pair:
    """A piece's place in the segment and its tensor, as dtypes that every copy kernel moves bit for bit."""
    source = piece.tensor
    place = segment[piece.offset : piece.offset + piece.bytes]
    into = place.view(source.dtype).view(source.shape)
    return carrier(into), carrier(source)


def _parted(test: Callable[[torch.Tensor], bool], pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Pieces whose tensors pass, and the others; quick where all are alike, as ten thousand mostly are."""
    passed = list(map(test, [piece.tensor for piece in pieces]))
    if all(passed):
        return pieces, []
    return list(compress(pieces, passed)), list(compress(pieces, map(not_, passed)))


def _cut(move: Move) -> Iterator[Move]:
    into, source, size = move
    step = -(-size // max(1, size // _PIECE_BYTES))
    for start in range(0, size, step):
        yield into + start, source + start, min(step, size - start)


def _moves(pieces: Iterable[Piece], base: int) -> list[Move]:
    moves = [(base + offset, tensor.data_ptr(), size) for tensor, offset, size, _ in pieces]
    if any(size > _PIECE_BYTES for _, _, size in moves):
        return [part for move in moves for part in _cut(move)]
    return moves


def _populated(moves: Iterable[Move], end: int) -> Iterator[Move]:
    """The moves, and before the first one into each block of memory one that makes its pages present.

    They are so up to `end` at most. A thread that copies there already comes to no harm.
    """
    present = 0
    for into, source, size in moves:
        if into + size > present:
            start = max(into, present)
            present = min(max(into + size, start + _POPULATE_BYTES), end)
            yield start, 0, present - start
        yield into, source, size


def contiguous_bytes(tensor: torch.Tensor, piece_bytes: int) -> Iterator[bytes]:
    """A tensor's bytes in order, in pieces of at most `piece_bytes`; from any device, however strided."""
    if not tensor.numel():
        return
    source = carrier(tensor).contiguous().cpu()
    size = source.numel() * source.dtype.itemsize
    for start in range(0, size, piece_bytes):
        yield ctypes.string_at(source.data_ptr() + start, min(piece_bytes, size - start))
